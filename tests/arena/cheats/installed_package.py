# attack: import the judge itself and use its own answers
# defence: the package is not on the import path and not in the file system
# expect: fail
# succeeds-without: isolated-interpreter sandbox
# uses: solve_with_loot

import importlib
import sys

try:
    importlib.import_module("trapline.arena.judge.grade")
    LOOT = True
except ImportError:
    LOOT = False
