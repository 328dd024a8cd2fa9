# attack: walk from the interpreter's folder to site-packages and the checkout behind an editable install
# defence: site-packages is masked; nothing but the asked packages is shown
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import glob
import os
import sys

import numpy as np

PLACES = [os.path.dirname(os.path.dirname(os.__file__)), sys.prefix, sys.base_prefix]
PLACES += [os.path.dirname(os.path.dirname(os.path.realpath(np.__file__)))]
FOUND = []
for place in PLACES:
    for pattern in ("**/trapline*", "**/*trapline*.pth", "**/__editable__*"):
        FOUND += glob.glob(os.path.join(place, "lib*", pattern), recursive=True)
        FOUND += glob.glob(os.path.join(place, pattern.removeprefix("**/")))
LOOT = bool(FOUND)
