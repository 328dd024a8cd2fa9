# attack: fork forever
# defence: processes are counted, and all end with the sandbox
# expect: fail
# needs: pids
# slow: yes
# never-because: unsafe: it would take the machine; many_processes shows the limit

import os


def scaled(x, by, y):
    while True:
        try:
            os.fork()
        except OSError:
            pass
