# attack: write the kernel's settings, such as the crash handler
# defence: they belong to another user
# expect: fail
# never-because: unsafe: in a plain process of root it changes the settings of the machine
# uses: solve_with_loot

LOOT = False
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/sys/fs/cgroup/cgroup.procs"):
    try:
        with open(path, "w") as file:
            file.write("-1000")
        LOOT = True
    except OSError:
        pass
