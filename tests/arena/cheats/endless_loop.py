# attack: never answer, and ignore every signal
# defence: a deadline, and a signal that cannot be ignored
# expect: fail
# slow: yes
# succeeds-without: deadline

import signal

for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
