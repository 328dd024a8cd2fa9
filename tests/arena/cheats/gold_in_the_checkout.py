# attack: read the gold solution through the path that the command line or a link gives away
# defence: the file system inside holds none of the judge's files
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os
import re

HINTS = set()
for name in os.listdir("/proc") if os.path.exists("/proc") else []:
    if name.isdecimal():
        for file in ("cmdline", "environ"):
            try:
                with open(f"/proc/{name}/{file}", "rb") as text:
                    HINTS |= set(re.findall(r"/[\w./-]+", text.read().decode(errors="replace")))
            except OSError:
                pass
LOOT = False
for hint in HINTS:
    while hint.strip("/"):  # the folder above "//" is "//"
        if os.path.exists(os.path.join(hint, "src", "trapline", "arena", "judge", "grade.py")):
            LOOT = True
        hint = os.path.dirname(hint)
