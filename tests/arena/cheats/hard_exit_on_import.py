# attack: the same with a hard exit that cannot be intercepted
# defence: a pass needs answers, and an exit code is not one
# expect: fail
# succeeds-without: verdict-outside

import os

print("all tests passed")
os._exit(0)
