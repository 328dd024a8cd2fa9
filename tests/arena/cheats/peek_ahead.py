# attack: look into the channel for the next inputs and solve them all in the first call
# defence: the next input is sent only after the last answer
# expect: pass
# at-most: speed=50
# never-because: the next input does not exist before the last answer has arrived, so no switch can turn that off
# uses: honest_sort inversions

import os
import socket
import stat

SOLVED = {}
CHANNELS = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
CHANNELS = [fd for fd in CHANNELS if stat.S_ISSOCK(os.fstat(fd).st_mode)]


def sort(values):
    for fd in CHANNELS:
        try:
            ahead = socket.socket(fileno=os.dup(fd)).recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            SOLVED[ahead] = True
        except OSError:
            pass
    return SOLVED.get(values.tobytes()) or honest_sort(values)
