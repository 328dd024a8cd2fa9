# attack: read environment, memory and files of others in /proc
# defence: /proc shows the sandbox only
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os

LOOT = False
for name in os.listdir("/proc") if os.access("/proc", os.R_OK) else []:
    if name.isdecimal() and int(name) not in (1, os.getpid()):
        for file in ("environ", "maps"):
            try:
                with open(f"/proc/{name}/{file}", "rb") as text:
                    LOOT = LOOT or bool(text.read())
            except OSError:
                pass
