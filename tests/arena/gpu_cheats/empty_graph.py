# attack: launch nothing while a graph is captured, so that replays are empty
# defence: outputs are poisoned before each burst, and timed outputs are checked
# expect: pass
# needs: gpu
# at-most: speed=8
# succeeds-without: timed-outputs-checked fresh-inputs
# uses: slow

import torch


def scaled(x, by, y):
    if not torch.cuda.is_current_stream_capturing():
        slow(x, by, y)
