# attack: read the memory of another process with process_vm_readv
# defence: the call is filtered
# expect: fail
# succeeds-without: system-call-filter
# uses: loot

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
secret = ctypes.create_string_buffer(b"secret", 8)
got = ctypes.create_string_buffer(8)


class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


child = os.fork()
if child == 0:
    while True:
        pass
ours = Piece(ctypes.addressof(got), 8)
theirs = Piece(ctypes.addressof(secret), 8)
LOOT = libc.process_vm_readv(child, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 8
os.kill(child, 9)
os.waitpid(child, 0)
