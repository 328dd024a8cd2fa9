# attack: never return
# defence: every call has a deadline
# expect: fail
# slow: yes
# succeeds-without: deadline

import time


def scaled(x, by, y):
    while True:
        time.sleep(1)
