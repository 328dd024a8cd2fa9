# attack: attach to a process with ptrace
# defence: the call is filtered
# expect: fail
# succeeds-without: system-call-filter
# uses: loot

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
child = os.fork()
if child == 0:
    while True:
        pass
LOOT = libc.ptrace(PTRACE_SEIZE, child, None, None) == 0
os.kill(child, 9)
os.waitpid(child, 0)
