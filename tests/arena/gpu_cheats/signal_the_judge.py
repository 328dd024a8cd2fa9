# attack: send signals to the processes that started the runner
# defence: signals do not leave the sandbox
# expect: fail
# succeeds-at: process
# uses: loot

import os

try:
    os.kill(os.getppid(), 0)
    LOOT = os.getppid() != 1
except OSError:
    LOOT = False
