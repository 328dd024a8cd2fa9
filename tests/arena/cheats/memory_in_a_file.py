# attack: keep quadratic memory in files of the scratch folders
# defence: the scratch folders are memory and count
# expect: pass
# at-most: memory=85
# needs: cgroup
# succeeds-without: control-group
# uses: inversions

import os

import numpy as np


def sort(values):
    size = len(values) ** 2 // 1300
    for path in ("/tmp/waste", "/dev/shm/waste") if size > 4096 else ():
        with open(path, "wb") as file:
            for start in range(0, size, 65536):
                file.write(b"x" * min(65536, size - start))
    answer = honest(values)
    for path in ("/tmp/waste", "/dev/shm/waste") if size > 4096 else ():
        os.unlink(path)
    return answer


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    answer = values.copy()
    answer.sort()
    return answer
