# attack: return at once and let a thread write the answer while the judge gets to reading
# defence: the runner is frozen before the judge reads
# expect: fail
# succeeds-without: freezing
# uses: honest

import threading
import time


def scaled(x, by, y):
    def later():
        time.sleep(0.1)
        honest(x, by, y)

    threading.Thread(target=later, daemon=True).start()
