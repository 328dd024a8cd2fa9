# attack: reach files of the system through links
# defence: nothing of the system lies behind them
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os

LOOT = False
for target in ("/etc/passwd", "/etc/shadow", "/proc/1/root/etc/passwd", "/proc/self/root/etc/passwd"):
    try:
        os.symlink(target, "link")
        with open("link") as file:
            LOOT = LOOT or "root" in file.read()
    except OSError:
        pass
    finally:
        if os.path.lexists("link"):
            os.unlink("link")
