# attack: open the machine's devices
# defence: there are five harmless ones
# expect: fail
# succeeds-without: few-devices
# uses: solve_with_loot

import glob
import os

HARMLESS = {"null", "zero", "full", "random", "urandom", "shm", "fd", "stdin", "stdout", "stderr"}
LOOT = False
for path in glob.glob("/dev/*"):
    if os.path.basename(path) not in HARMLESS:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            LOOT = True
        except OSError:
            pass
try:
    os.mknod("device", 0o600 | 0o020000, os.makedev(1, 1))
    LOOT = True
except OSError:
    pass
