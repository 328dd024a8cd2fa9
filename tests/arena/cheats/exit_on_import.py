# attack: end with exit code 0 before anything is asked
# defence: a pass needs answers, an exit code is none
# expect: fail
# succeeds-without: verdict-outside

import sys

sys.exit(0)
