# attack: become root in a user namespace and mount file systems
# defence: the calls are filtered
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    works = libc.unshare(0x10000000) == 0 or libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0
    os._exit(42 if works else 0)
LOOT = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
