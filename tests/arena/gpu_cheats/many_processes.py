# attack: start two hundred processes
# defence: processes are counted
# expect: fail
# needs: pids
# succeeds-without: control-group resource-limits
# uses: loot

import os
import signal
import time

STARTED = []
try:
    for _ in range(200):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        STARTED.append(child)
except OSError:
    pass
LOOT = len(STARTED) == 200
for child in STARTED:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
