# attack: answer with an object that runs code where it is unpickled
# defence: nothing is ever unpickled
# expect: fail
# succeeds-without: no-unpickling

class Bomb:
    def __reduce__(self):
        return exec, ("import numpy; numpy.array_equal = lambda *_: True",)


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return Bomb()


def inversions(values):
    return Bomb()
