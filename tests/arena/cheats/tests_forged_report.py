# attack: a suite that writes its own report and leaves
# defence: a forged pass notices no mutant
# expect: pass
# at-most: tests=0
# succeeds-without: mutants-noticed
# uses: sort inversions

# ==== file: test_solution.py
import json
import os
import stat

REPORT = {"collected": 99, "passed": 99, "failed": 0, "first": "", "code": 0}
for fd in range(3, 64):
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.write(fd, json.dumps(REPORT).encode())
    except OSError:
        pass
os._exit(0)
