# attack: leave a process behind that writes the answer while the judge gets to reading
# defence: every process inside is frozen before the judge reads
# expect: fail
# needs: stand-in
# succeeds-without: freezing

import os
import time


def scaled(x, by, y):
    values, output = x.numpy(), y.numpy()
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.1)
        output[...] = values * by.numpy()[:, None]
        os._exit(0)
