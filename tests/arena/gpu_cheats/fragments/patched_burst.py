def patch_bursts(run):
    """Puts another function in the place of the one that runs bursts, once there is one."""
    if is_timed() and not hasattr(patch_bursts, "original"):
        kind = type(of_the_runner("Burst"))
        patch_bursts.original = kind.run
        kind.run = run
