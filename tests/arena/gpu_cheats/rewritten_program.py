# attack: put a file beside the program that runs the answer, to be imported by the next runner
# defence: nothing but the scratch folder can be written
# expect: fail
# succeeds-without: file-rules folders-of-another-user
# uses: loot runner

import os
import sys

LOOT = False
for folder in (os.path.dirname(__file__), os.path.dirname(sys.argv[0])):
    try:
        with open(os.path.join(folder, "numpy.py"), "w") as file:
            file.write("")
        LOOT = True
    except OSError:
        pass
