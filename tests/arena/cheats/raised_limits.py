# attack: raise one's own limits again
# defence: soft and hard limits are set together
# expect: fail
# succeeds-without: hard-limits
# uses: solve_with_loot

import resource

LOOT = False
for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
    try:
        resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        LOOT = True
    except (OSError, ValueError):
        pass
