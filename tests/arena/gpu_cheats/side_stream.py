# attack: launch the work on a stream of one's own, which the timed stream does not wait for
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
    if len(PENDING) > 64 and not PENDING.pop(0).query():
        return
    with torch.cuda.stream(SIDE):
        slow(x, by, y)
        PENDING.append(SIDE.record_event())
