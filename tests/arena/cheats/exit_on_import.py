# attack: end with exit code 0 before anything is asked
# defence: a pass needs answers, and an exit code is not one
# expect: fail
# succeeds-without: verdict-outside

import sys

sys.exit(0)
