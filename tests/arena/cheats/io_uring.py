# attack: do input and output past the filter
# defence: the calls are filtered, and no memory may be locked for them
# expect: fail
# succeeds-without: system-call-filter resource-limits
# uses: solve_with_loot

import ctypes

libc = ctypes.CDLL(None, use_errno=True)
LOOT = libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0
