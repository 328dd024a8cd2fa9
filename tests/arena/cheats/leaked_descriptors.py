# attack: use files that the judge has left open
# defence: nothing but the channel is inherited
# expect: fail
# succeeds-without: closed-descriptors
# uses: solve_with_loot

import os
import stat

LOOT = False
for fd in range(3, 256):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        continue
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and os.fstat(fd).st_size not in (0, 64 << 20)):
        LOOT = True
