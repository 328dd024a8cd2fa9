# attack: answer with an object that runs code where it is unpickled
# defence: nothing is ever unpickled
# expect: fail

import os


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/owned",)


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return Bomb()


def inversions(values):
    return Bomb()
