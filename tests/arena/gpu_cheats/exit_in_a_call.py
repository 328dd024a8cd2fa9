# attack: end the process with code 0 in the middle of a call
# defence: a pass needs answers
# expect: fail
# succeeds-without: a-pass-needs-answers

import os


def scaled(x, by, y):
    os._exit(0)
