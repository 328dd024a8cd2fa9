# attack: end with exit code 0 in a call
# defence: a pass needs answers, and an exit code is not one
# expect: fail
# succeeds-without: verdict-outside

import os


def sort(values):
    os._exit(0)


def inversions(values):
    raise SystemExit(0)
