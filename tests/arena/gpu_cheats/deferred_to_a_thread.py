# attack: leave the work to a thread while bursts are timed, and return at once
# defence: outputs decide which slot comes next, and timed outputs are checked
# expect: pass
# at-most: speed=8
# succeeds-without: timed-outputs-checked fresh-inputs
# uses: slow timed

import queue
import threading

WORK_LEFT = queue.SimpleQueue()


def work():
    while True:
        slow(*WORK_LEFT.get())


threading.Thread(target=work, daemon=True).start()


def scaled(x, by, y):
    if is_timed():
        if WORK_LEFT.qsize() < 4:
            WORK_LEFT.put((x, by, y))
        return
    slow(x, by, y)
