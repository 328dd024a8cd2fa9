# attack: become root in a user namespace of one's own
# defence: the call is filtered
# expect: fail
# succeeds-without: system-call-filter
# uses: loot

import ctypes

CLONE_NEWUSER = 0x10000000
LOOT = ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0
