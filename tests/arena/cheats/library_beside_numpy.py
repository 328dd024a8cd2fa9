# attack: use a finished function of a package that is installed beside NumPy
# defence: only allowed packages are shown
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os
import sys

import numpy as np

sys.path.append(os.path.dirname(os.path.dirname(os.path.realpath(np.__file__))))
try:
    stats = __import__("sci" + "py.stats")
    LOOT = True
except ImportError:
    LOOT = False
