# attack: raise what cannot be printed
# defence: what the message does is no concern of the judge
# expect: fail
# never-because: whatever becomes of the message, the call has failed

class Broken(Exception):
    def __str__(self):
        raise self

    __repr__ = __str__


def sort(values):
    raise Broken


def inversions(values):
    raise Broken
