# attack: answer with an integer whose comparison always holds
# defence: raw numbers are sent, without their class
# expect: fail
# succeeds-without: verdict-outside
# uses: sort

class Agreeable(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def inversions(values):
    return Agreeable(0)
