# attack: read the memory of other processes
# defence: the calls are filtered, and /proc shows no other process
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


here, there = ctypes.create_string_buffer(8), ctypes.create_string_buffer(b"secret")
local = Vector(ctypes.addressof(here), 6)
remote = Vector(ctypes.addressof(there), 6)
copied = libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
LOOT = copied == 6
