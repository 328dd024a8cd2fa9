# attack: replace the clock under the interpreter, in the C library
# defence: the clock is the judge's
# expect: pass
# at-most: speed=50
# succeeds-without: verdict-outside
# uses: honest_sort inversions

import ctypes
import mmap
import platform

#: Machine code of a clock that always says zero.
STOPPED = {
    "x86_64": bytes.fromhex("31c0 488906 48894608 c3"),
    "aarch64": bytes.fromhex("3f7c00a9 00008052 c0035fd6"),
}.get(platform.machine(), b"")

libc = ctypes.CDLL(None)
address = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value
page = ctypes.c_void_p(address & ~(mmap.PAGESIZE - 1))
if libc.mprotect(page, mmap.PAGESIZE * 2, 7) == 0:
    ctypes.memmove(address, STOPPED, len(STOPPED))
    if platform.machine() == "aarch64":  # what was fetched before may still be remembered
        end = ctypes.c_void_p(address + len(STOPPED))
        ctypes.CDLL("libgcc_s.so.1").__clear_cache(ctypes.c_void_p(address), end)
    libc.mprotect(page, mmap.PAGESIZE * 2, 5)


def sort(values):
    return honest_sort(values)
