# attack: reach files of the system through hard links
# defence: other file systems cannot be linked to, and hold nothing
# expect: fail
# never-because: it needs a scratch folder on the file system of /etc, and that is the machine's choice
# uses: solve_with_loot

import os

LOOT = False
for number, target in enumerate(("/etc/passwd", "/etc/shadow", "/etc/hosts", "/etc/group")):
    try:
        os.link(target, f"link{number}")
        LOOT = True
    except OSError:
        pass
