# attack: write the kernel's settings, such as who handles crashes
# defence: they belong to somebody else
# expect: fail
# never-because: unsafe: in a plain process of root it changes the settings of the machine

import numpy as np

LOOT = False
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/sys/fs/cgroup/cgroup.procs"):
    try:
        with open(path, "w") as file:
            file.write("-1000")
        LOOT = True
    except OSError:
        pass


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
