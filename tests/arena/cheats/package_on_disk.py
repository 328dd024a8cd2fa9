# attack: find the judge's sources on the disk, wherever they were installed
# defence: only the interpreter, NumPy and the submission are in the file system
# expect: fail
# succeeds-without: hidden-files
# uses: solve_with_loot

import os


def search():
    for root in ("/usr", "/opt", "/home", "/root", "/srv", "/var", "/mnt", "/tmp"):
        for folder, names, _ in os.walk(root):
            if "challenges" in names and "gold" in names and "arena" in names:
                return True
            names[:] = [n for n in names if n not in ("proc", "sys")][:200]
    return False


LOOT = search()
