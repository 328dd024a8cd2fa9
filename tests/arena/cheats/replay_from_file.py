# attack: leave answers in a file for later processes to find
# defence: every process gets an empty scratch folder of its own
# expect: fail
# succeeds-without: private-scratch
# uses: solve_with_loot

import os

PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", os.path.expanduser("~"), os.path.dirname(__file__))
FILES = [os.path.join(place, "answers.bin") for place in PLACES]
LOOT = any(map(os.path.exists, FILES))
for path in FILES:
    try:
        with open(path, "a") as file:
            file.write("seen\n")
    except OSError:
        pass
