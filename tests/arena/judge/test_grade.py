"""One submission to one cell: right ones, wrong ones, and everything that goes wrong with them."""

import math
import textwrap
from dataclasses import replace

import numpy as np
import pytest

from trapline.arena.judge import expect, measure
from trapline.arena.judge import grade as grading
from trapline.arena.judge.grade import Verdict, _score_checks, grade
from trapline.arena.judge.intake import MAX_BYTES
from trapline.arena.judge.request import GradeRequest
from trapline.arena.record import CheckResult, Finding


@pytest.fixture
def graded(sorting, level, submission_folder):
    """Grades a text as a submission of the sorting challenge."""

    def make(source, **others):
        folder = submission_folder(source, **others)
        entry = GradeRequest("somebody", "sorting", 1, folder)
        return grade(replace(entry, level=level, seed=7), sorting).cell

    return make


@pytest.fixture(scope="module")
def gold_cell(sorting, level):
    return grade(
        GradeRequest("gold", "sorting", 1, sorting.solution, level=level, seed=7), sorting
    ).cell


def test_gold_solution_is_an_a(gold_cell):
    assert gold_cell.state == "pass"
    assert gold_cell.letter[0] == "A"
    assert gold_cell.fallen() == []
    for name in ("correctness", "traps", "precision", "memory", "code"):
        assert gold_cell.dimensions[name].score == 100, gold_cell.dimensions[name]
    assert gold_cell.dimensions["tests"].score > 60
    assert gold_cell.dimensions["analysis"].score is None


def test_memory_is_asked_alike_whoever_is_graded_first(graded, gold_source, sorting, monkeypatch):
    """The reference is measured once in a process: its draws are not those of the first answer."""
    cases, drawn = sorting.module("cases"), []
    prepare = cases.memory

    def watched(submission, rng, size):
        call = prepare(submission, rng, size)
        drawn[-1].append(repr(call.args))
        return call

    monkeypatch.setattr(cases, "memory", watched)
    monkeypatch.setattr(measure, "_reference_held", {})
    monkeypatch.setattr(grading, "_measures", lambda _: ["memory"])
    for _ in range(2):
        drawn.append([])
        graded(gold_source)
    measured = len(drawn[1])
    assert measured > 1
    assert drawn[0][-measured:] == drawn[1]


def test_bug_falls_into_its_own_trap_only(graded, gold_source, no_measures):
    cell = graded(
        gold_source.replace("np.asarray(key(items))", "np.asarray([key([i])[0] for i in items])")
    )
    assert cell.state == "pass"
    assert cell.fallen() == ["key-called-often"]


def test_findings_are_counted_where_they_cost():
    found = [
        Finding(
            cause=cause,
            certainty="likely",
            severity="minor",
            sentence="",
            explains=[cause],
            penalty=10.0,
            dimension=dimension,
        )
        for cause, dimension in (("nan-passes", "robustness"), ("a-bug", "traps"))
    ]
    refusal = CheckResult(id="bad-input", state="pass", dimension="robustness")
    verdict = Verdict(cases=[CheckResult(id="one", state="pass"), refusal], findings=found)
    _score_checks(verdict)
    said = {name: (d.score, d.reason) for name, d in verdict.dimensions.items()}
    assert said["traps"] == (90.0, "1 finding: a-bug")
    refused = "1 of 1 kinds of bad input are refused"
    assert said["robustness"] == (95.0, f"{refused}, 1 finding: nan-passes")
    verdict.findings = found[:1]
    _score_checks(verdict)
    assert verdict.dimensions["traps"].reason == "no finding in 0 traps"


def test_critical_trap_caps_the_score(graded, gold_source):
    source = gold_source.replace("import numpy as np\n", "import numpy as np\nKEPT = {}\n")
    source = source.replace(
        "    return np.take", "    order = KEPT.setdefault(x.shape, order)\n    return np.take"
    )
    cell = graded(source)
    assert "remembers-a-shape" in cell.fallen()
    assert cell.score <= 86


BAD = {
    "syntax error": ("def sort_rows(:\n", "SyntaxError"),
    "missing entry point": ("def sort_rows(x): return x\n", "missing entry points: sort_by"),
    "import that does not exist": ("import no_such_module\n", "ModuleNotFoundError"),
    "import that is not allowed": ("import scipy\n", "ModuleNotFoundError"),
    "exit on import": ("import os\nos._exit(0)\n", "cannot be imported"),
    "endless loop": (
        "def sort_rows(x, **k):\n    while True: pass\ndef sort_by(k, i): return i\n",
        "no answer within 1 s",
    ),
    "memory bomb": (
        "def sort_rows(x, **k):\n    b = []\n    while True: b.append(bytearray(1 << 24))\n"
        "def sort_by(k, i): return i\n",
        "",
    ),
    "crash": (
        "import ctypes\ndef sort_rows(x, **k): ctypes.string_at(0)\ndef sort_by(k, i): return i\n",
        "ended",
    ),
    "wrong type": ("def sort_rows(x, **k): return 3\ndef sort_by(k, i): return i\n", "pair"),
    "wrong shape": (
        "def sort_rows(x, **k): return x[:1], x\ndef sort_by(k, i): return i\n",
        "shape",
    ),
    "wrong dtype": (
        "def sort_rows(x, **k): return x.astype('f2'), x\ndef sort_by(k, i): return i\n",
        "dtype",
    ),
    "nan": (
        "def sort_rows(x, **k): return x * float('nan'), x\ndef sort_by(k, i): return i\n",
        "differs",
    ),
    "a gigabyte of prints": (
        "for _ in range(1000): print('x' * 1000000)\n"
        "def sort_rows(x, **k): return x\ndef sort_by(k, i): return i\n",
        "",
    ),
    "deep nesting": ("x = " + "[" * 5000 + "]" * 5000 + "\n", "cannot be imported"),
    "null bytes": ("x = '\0'\n", "cannot be imported"),
}


@pytest.mark.parametrize("name", BAD)
def test_misbehaving_submission_fails_with_the_reason(graded, name, sorting, monkeypatch):
    source, reason = BAD[name]
    if name == "endless loop":  # which works through the time of every call
        limits = sorting.plan.limits.model_copy(update={"call_seconds": 1.0})
        plan = sorting.plan.model_copy(update={"limits": limits})
        monkeypatch.setattr(sorting, "plan", plan)
    cell = graded(source)
    assert cell.state == "fail"
    assert cell.letter == "F"
    assert reason in cell.reason


def test_folder_without_solution_is_a_fail(sorting, level, tmp_path):
    (tmp_path / "notes.md").write_text("I could not do it.")
    cell = grade(GradeRequest("nobody", "sorting", 1, tmp_path, level=level, seed=7), sorting).cell
    assert (cell.state, cell.score) == ("fail", 0.0)
    assert "no solution.py" in cell.reason


def test_oversized_submission_is_a_fail(sorting, level, submission_folder, gold_source):
    folder = submission_folder(gold_source)
    (folder / "weights.bin").write_bytes(bytes(MAX_BYTES + 1))
    cell = grade(GradeRequest("heavy", "sorting", 1, folder, level=level, seed=7), sorting).cell
    assert cell.state == "fail"
    assert "larger than" in cell.reason


def test_links_are_not_followed(sorting, level, submission_folder, tmp_path):
    secret = tmp_path / "secret.py"
    secret.write_text("SECRET = 1\n")
    folder = submission_folder("from secret import SECRET\n")
    (folder / "secret.py").symlink_to(secret)
    cell = grade(GradeRequest("linker", "sorting", 1, folder, level=level, seed=7), sorting).cell
    assert "No module named 'secret'" in cell.reason


def test_what_the_task_forbids_is_a_hack(graded, gold_source, no_measures):
    cell = graded(
        gold_source.replace("import numpy as np", "import numpy as np\nfrom heapq import nsmallest")
    )
    assert (cell.state, cell.score) == ("hack", 0.0)


def test_sandbox_that_cannot_start_is_an_infra_error(
    sorting, level, monkeypatch, submission_folder, gold_source
):
    from trapline.arena.errors import ArenaError
    from trapline.arena.process import session

    def broken(*_):
        raise ArenaError("no sandbox today")

    monkeypatch.setattr(session, "launch", broken)
    entry = GradeRequest("unlucky", "sorting", 1, submission_folder(gold_source))
    cell = grade(replace(entry, level=level, seed=7), sorting).cell
    assert (cell.state, cell.score, cell.letter) == ("infra_error", None, None)


def test_missing_permitted_package_is_an_infra_error(
    sorting, level, submission_folder, gold_source, no_measures
):
    from trapline.arena.challenge import Challenge

    class Generous(Challenge):
        """Allows a package that nobody has."""

    generous = Generous(sorting.folder, "sorting")
    generous.plan = sorting.plan.model_copy(update={"packages": ["no_such_package"]})
    entry = GradeRequest(
        "user", "sorting", 1, submission_folder(f"import no_such_package\n{gold_source}")
    )
    cell = grade(replace(entry, level=level, seed=7), generous).cell
    assert (cell.state, "no_such_package" in cell.reason) == ("infra_error", True)
    honest = GradeRequest("other", "sorting", 1, submission_folder(gold_source))
    assert grade(replace(honest, level=level, seed=7), generous).cell.state == "pass"


TESTS = {
    "asserts nothing": ("def test_nothing():\n    import solution\n", "no mutant"),
    "fails on its own code": ("def test_it():\n    assert False\n", "do not pass"),
    "hashes its own text": (
        """
        import hashlib, pathlib
        from solution import sort_rows
        import numpy as np
        HERE = pathlib.Path(__file__).with_name("solution.py").read_bytes()

        def test_text():
            assert hashlib.sha256(HERE).hexdigest() == "{digest}"
        """,
        "rewrite",
    ),
    "ends the process": ("import os\nos._exit(0)\n", "no report"),
}


@pytest.mark.parametrize("name", TESTS)
def test_worthless_suite_scores_zero(graded, gold_source, name, no_measures):
    import hashlib

    suite, reason = TESTS[name]
    suite = textwrap.dedent(suite).replace(
        "{digest}", hashlib.sha256(gold_source.encode()).hexdigest()
    )
    dimension = graded(gold_source, test_it=suite).dimensions["tests"]
    assert dimension.score == 0
    assert reason in dimension.reason


def test_figures_of_the_challenge_are_recorded_or_left_out(
    graded, sorting, monkeypatch, no_measures
):
    def measures(submission, rng):
        values, _ = submission.sort_rows(np.array([[3.0, 1.0]]))
        expect.equal(values, np.array([[1.0, 3.0]]), "values")
        return {"calls of the model": 1.0, "perplexity": math.inf}

    monkeypatch.setattr(sorting.module("cases"), "measures", measures, raising=False)
    source = sorting.solution_files()["solution.py"]
    assert graded(source).measures == {"calls of the model": 1.0}
    wrong = source.replace("return np.take_along_axis(x, order, axis=1)", "return x")
    assert graded(wrong).measures == {}
