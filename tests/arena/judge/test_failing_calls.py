"""The failing call of a finding, as a program of its own: it shows the bug without the grader."""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.checks import run_checks
from trapline.arena.judge.reproduction import recorded, write_script
from trapline.arena.process.local import LocalSubmission
from trapline.arena.process.transcript import Exchange, Transcript

SEED = 11
loaded = cache(load)


def printed(folder, calls, files):
    """What the script prints beside an answer; its traceback where it ends with one."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    write_script(folder, "a bug", calls)
    command = [sys.executable, "-B", "reproduce.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout or done.stderr.splitlines()[-1]


def failing_calls(folder, challenge, trap_id):
    """The calls of a trap that its own mutant fails, and the mutant's files."""
    task = loaded(challenge)
    (trap,) = [trap for trap in task.traps if trap.id == trap_id]
    files = trap.plant(task.solution_files())
    config = task.sandbox_config("process", task.plan.limits.mutant_seconds)
    failures = []
    with LocalSubmission(folder / "mutant", config, files=files) as submission:
        run_checks([trap], submission, SEED, lambda *one: failures.append(one))
    ((_, transcript),) = failures
    return recorded(transcript), files


@pytest.mark.parametrize(
    ("challenge", "trap"),
    [
        ("fused_softmax_topk", "strided-logits"),
        ("flash_attention_forward", "strides-ignored"),
        ("layer_norm_backward", "strided-x"),
    ],
)
def test_script_shows_the_bug(tmp_path, challenge, trap):
    calls, files = failing_calls(tmp_path, challenge, trap)
    wrong = printed(tmp_path / "wrong", calls, files)
    assert wrong != printed(tmp_path / "right", calls, loaded(challenge).solution_files())


ROWS = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "view",
    [
        ROWS,
        ROWS[:, ::2],
        ROWS.T,
        ROWS[::-1, 1:-1],
        np.broadcast_to(ROWS[:1], (3, 6)),
        ROWS[:0],
        np.asfortranarray(ROWS),
        np.float32(3.5),
    ],
    ids=["plain", "steps", "turned", "backwards", "repeated", "empty", "by-columns", "scalar"],
)
def test_array_comes_back_as_it_was_given(tmp_path, view):
    calls = recorded(Transcript([Exchange("f", (view,), {})]))
    answer = "def f(x):\n    return x.tolist(), x.strides, x.dtype.str\n"
    expected = f"{view.tolist(), view.strides, view.dtype.str}\n"
    assert printed(tmp_path, calls, {"solution.py": answer}) == expected
