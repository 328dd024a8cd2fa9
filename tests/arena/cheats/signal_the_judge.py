# attack: end, stop or at least find the judge by its process number
# defence: a process tree of its own
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os

LOOT = False
for pid in [os.getppid(), *range(3, 3000)]:
    if pid in (0, 1) or pid == os.getpid():
        continue
    try:
        os.kill(pid, 0)
        LOOT = True
    except OSError:
        pass
