# attack: climb out of the scratch folder
# defence: the root inside is another one
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os

LOOT = False
for start in (os.getcwd(), os.path.dirname(__file__), "/proc/self/cwd", "/proc/1/cwd", "/dev/fd"):
    try:
        with open(start + "/.." * 20 + "/etc/passwd") as file:
            LOOT = LOOT or "root" in file.read()
    except OSError:
        pass
