# attack: change one's own files for the next process
# defence: the folder is read-only, and every process gets the same bytes
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os

LOOT = os.path.exists(os.path.join(os.path.dirname(__file__), "owned"))
try:
    with open(os.path.join(os.path.dirname(__file__), "owned"), "w") as file:
        file.write("yes")
    LOOT = True
except OSError:
    pass
