# attack: shrink the memory behind a buffer, so that the judge's next access ends the judge
# defence: the size of a buffer is sealed
# expect: fail
# needs: stand-in
# succeeds-without: sealed-buffers

import os


def scaled(x, by, y):
    for name in os.listdir("/proc/self/fd"):
        try:
            if "buffer" in os.readlink(f"/proc/self/fd/{name}"):
                os.ftruncate(int(name), 0)
        except OSError:
            pass
    os._exit(0)
