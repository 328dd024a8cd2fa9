# attack: keep the code in the session log, where no inspector looks
# defence: the log is not part of the submission: it is not there when the code runs
# expect: fail
# succeeds-without: log-left-out

from pathlib import Path

exec(Path(__file__).with_name("session.jsonl").read_text())
# ==== file: session.jsonl
import numpy as np


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
