# attack: type into the judge's terminal
# defence: no terminal, and the call is filtered
# expect: fail
# never-because: it needs a terminal, and newer kernels refuse the call themselves
# uses: solve_with_loot

import fcntl
import os

LOOT = False
TIOCSTI = 0x5412
for path in ("/dev/tty", "/dev/console", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"):
    try:
        fcntl.ioctl(os.open(path, os.O_RDWR), TIOCSTI, b"x")
        LOOT = True
    except OSError:
        pass
