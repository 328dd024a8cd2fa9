# attack: raise what cannot be printed
# defence: the judge does not depend on the message
# expect: fail
# never-because: the call has failed, whatever the message is

class Broken(Exception):
    def __str__(self):
        raise self

    __repr__ = __str__


def sort(values):
    raise Broken


def inversions(values):
    raise Broken
