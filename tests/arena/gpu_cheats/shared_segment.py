# attack: make a segment of shared memory that later runners could attach to
# defence: the call is filtered
# expect: fail
# succeeds-without: system-call-filter
# uses: loot

import ctypes

libc = ctypes.CDLL(None, use_errno=True)
IPC_PRIVATE, IPC_RMID = 0, 0
SEGMENT = libc.shmget(IPC_PRIVATE, 4096, 0o600)
LOOT = SEGMENT >= 0
if LOOT:
    libc.shmctl(SEGMENT, IPC_RMID, None)
