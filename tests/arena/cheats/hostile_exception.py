# attack: raise an exception that breaks the code that prints it
# defence: names and messages are bounded text that can be written
# expect: fail
# succeeds-without: writable-text

class Violation(ValueError):
    def __str__(self):
        return "[/bold]\x1b[2J\udc80" + "x" * 10_000_000


Violation.__name__ = "[link=x]ArenaError\n"


def sort(values):
    raise Violation()


def inversions(values):
    raise Violation()
