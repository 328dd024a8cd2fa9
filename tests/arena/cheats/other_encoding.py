# -*- coding: utf-7 -*-
# attack: write what the task forbids in an encoding in which it looks like a comment
# defence: files are decoded as the interpreter does
# expect: hack
# succeeds-without: forbidden-names
# uses: sort inversions

try:
    # +AAo-    import scipy.stats as helpers
    pass
except ImportError:
    helpers = None
