# attack: end with exit code 0 when asked
# defence: a pass needs answers, an exit code is none
# expect: fail
# succeeds-without: verdict-outside

import os


def sort(values):
    os._exit(0)


def inversions(values):
    raise SystemExit(0)
