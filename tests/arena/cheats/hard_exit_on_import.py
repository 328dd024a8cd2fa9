# attack: the same without any chance to notice
# defence: a pass needs answers, an exit code is none
# expect: fail
# succeeds-without: verdict-outside

import os

print("all tests passed")
os._exit(0)
