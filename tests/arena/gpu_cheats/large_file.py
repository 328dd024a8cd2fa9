# attack: write a file of 300 MB
# defence: the size of a file is limited
# expect: fail
# succeeds-without: resource-limits
# uses: loot

import os

try:
    with open("large", "wb") as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
    LOOT = True
except OSError:
    LOOT = False
if os.path.exists("large"):
    os.remove("large")
