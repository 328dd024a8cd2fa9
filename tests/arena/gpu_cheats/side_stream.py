# attack: launch work on a stream of one's own while that is idle, and never wait for it
# defence: outputs decide which slot comes next, and timed outputs are checked
# expect: pass
# needs: gpu
# at-most: speed=8
# succeeds-without: timed-outputs-checked fresh-inputs
# uses: slow timed

import torch

SIDE = torch.cuda.Stream()
PENDING = []


def scaled(x, by, y):
    if not is_timed():
        slow(x, by, y)
        return
    if PENDING and not PENDING[-1].query():
        return
    with torch.cuda.stream(SIDE):
        slow(x, by, y)
        PENDING[:] = [SIDE.record_event()]
