"""The failing call of a finding, as a program of its own: it shows the bug without the grader."""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.checks import run_checks
from trapline.arena.judge.grade import grade
from trapline.arena.judge.reproduction import recorded, write_script
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.local import LocalSubmission
from trapline.arena.process.proxy import Stub
from trapline.arena.process.transcript import Exchange, Transcript
from trapline.arena.runs.store.evidence import canonical, digest
from trapline.cli.reproduce import reproduce

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
        ("flash_attention_backward", "kept-by-identity"),
        ("layer_norm_backward", "strided-x"),
        ("fused_softmax_topk", "rescale-missing"),
        ("fused_softmax_topk", "ties-across-tiles"),
        ("fused_softmax_topk", "index-within-the-tile"),
        ("fused_softmax_topk", "constant-in-the-sum"),
        ("fused_softmax_topk", "logits-modified"),
        ("fused_softmax_topk", "answer-overwritten-later"),
        ("flash_attention_forward", "integers-in-one-array-accepted"),
        ("layer_norm_backward", "output-overwrites-cache"),
        ("layer_norm_backward", "cache-aliases-an-input"),
        ("beam_search", "never-stops-early"),
        ("beam_search", "prefixes-are-tuples"),
        ("dflash", "cumulative-sum-in-single"),
        ("layer_norm_backward", "check-blind-to-length"),
        ("kv_cache", "append-keeps-the-callers-arrays"),
        ("kv_cache", "empty-answers-are-wider"),
    ],
)
def test_script_shows_the_bug(tmp_path, challenge, trap):
    calls, files = failing_calls(tmp_path, challenge, trap)
    wrong = printed(tmp_path / "wrong", calls, files)
    assert wrong != printed(tmp_path / "right", calls, loaded(challenge).solution_files())


@pytest.mark.parametrize("answer", ["return x", "raise ValueError(0)"])
def test_script_says_what_was_expected(tmp_path, answer):
    """Also where the call ends in an exception; the text of a check may be hostile."""
    calls = recorded(Transcript([Exchange("f", (1,), {})]))
    message = "indices is off at [0, 0]: got 32772, expected 25\nimport os\u2028'\"é"
    (tmp_path / "solution.py").write_text(f"def f(x):\n    {answer}\n")
    script = write_script(tmp_path, "a bug", calls, message=message)
    told = "indices is off at [0, 0]: got 32772, expected 25 import os '\"é"
    assert script.read_text().splitlines()[:2] == ["# a bug", f"# In the grade: {told}"]
    command = [sys.executable, "-B", "reproduce.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.stdout.splitlines()[0] == f"in the grade: {told}"


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


def test_calls_above_the_limit_are_not_kept():
    noise = np.random.default_rng(0).bytes(1 << 17)
    transcript = Transcript([Exchange("f", (np.frombuffer(noise, np.uint8),), {})])
    assert recorded(transcript) == []
    assert recorded(transcript, most=None)
    zeros = Transcript([Exchange("f", (np.zeros(1 << 17, np.uint8),), {})])
    assert recorded(zeros)


def test_lent_function_answers_by_all_its_arguments(tmp_path):
    """Two questions that print alike, one with a keyword, and one that was asked twice."""
    answers = iter([1, 2, 3, 4, 5])
    stub = Stub(lambda *_, **__: next(answers))
    x = np.ones(2)
    for args, kwargs in [((x,), {}), ((x + 1e-12,), {}), ((x,), {"k": 1}), ((7,), {}), ((7,), {})]:
        stub.run("", args, kwargs)
    calls = recorded(Transcript([Exchange("f", (stub, x), {}, answer=0)]))
    answer = "def f(m, x):\n    return m(x + 1e-12), m(x), m(x, k=1), m(7), m(7)\n"
    expected = "(2, 1, 3, 4, 5)\nthe functions of the grader were asked 5 times\n"
    assert printed(tmp_path, calls, {"solution.py": answer}) == expected


def test_large_calls_are_made_again(tmp_path):
    """One finding whose call no bundle holds: `trapline reproduce` asks the answer once more."""
    task = loaded("fused_softmax_topk")
    (trap,) = [trap for trap in task.traps if trap.id == "short-list-per-tile"]
    (tmp_path / "answer").mkdir()
    for name, text in trap.plant(task.solution_files()).items():
        (tmp_path / "answer" / name).write_text(text)
    request = GradeRequest("somebody", task.id, 1, tmp_path / "answer", seed=SEED, checks_only=True)
    bundle = grade(request, task)
    places = [finding.cause for finding in bundle.cell.findings]
    assert bundle.raw["calls"][trap.id] == []
    text = canonical(bundle)
    path = tmp_path / f"{digest(text)}.json"
    path.write_text(text)
    out = tmp_path / "out"
    reproduce(str(path), str(places.index(trap.id) + 1), None, out)
    assert np.load(out / "calls.npz")["array_0"].nbytes > 1 << 16
    command = [sys.executable, "-B", "reproduce.py"]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("in the grade: ")
    assert "array" in done.stdout
