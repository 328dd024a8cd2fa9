"""A submission's own tests: what a failure says, and what a run leaves out."""

from contextlib import closing

import pytest

from trapline.arena.judge.inspection import inspect
from trapline.arena.judge.own_tests import NO_MUTANTS, OWN, OwnTests, own_tests

SOLUTION = "def double(x):\n    return 2 * x\n"
CHANGED = {"solution.py": SOLUTION}
FAILING = "from solution import double\n\n\ndef test_double():\n    assert double(2) == 5\n"
PLAIN = "def test_plain():\n    assert '@pytest_ar' not in globals()\n"


@pytest.fixture
def suite(tmp_path):
    def make(tests):
        (tmp_path / "solution.py").write_text(SOLUTION)
        (tmp_path / "test_solution.py").write_text(tests)
        return closing(OwnTests(tmp_path, "process"))

    return make


def test_failure_on_right_code_says_what_was_compared(suite):
    with suite(FAILING) as tests:
        assert "assert 4 == 5" in tests.run_right(OWN)["first"]


def test_assertions_are_not_rewritten_where_no_failure_is_read(suite):
    with suite(PLAIN) as tests:
        assert tests.run(CHANGED)["passed"] == 1


def test_suite_that_needs_rewritten_assertions_passes(suite):
    with suite(PLAIN.replace("not in", "in")) as tests:
        assert tests.run_right(OWN)["passed"] == 1


LEAVES = """
import os
from pathlib import Path


def test_nothing_is_left_of_another_run():
    assert sorted(os.listdir()) == ["solution.py", "test_solution.py"]
    Path("left", "inner").mkdir(parents=True)
    Path("left", "inner", "file").write_text("")
    Path("left", "inner").chmod(0o500)
    Path("left").chmod(0o500)
"""


def test_run_finds_nothing_of_the_run_before(suite):
    with suite(LEAVES) as tests:
        assert [tests.run(CHANGED)["passed"] for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("name", ["wire", "numpy_start"])
def test_suite_may_import_a_module_named_like_one_of_ours(suite, name, tmp_path):
    (tmp_path / f"{name}.py").write_text("MINE = True\n")
    imported = f"from {name} import MINE\n\n\ndef test_it():\n    assert MINE\n"
    with suite(imported) as tests:
        assert tests.run(CHANGED)["passed"] == 1


def test_suite_that_removes_its_folder_is_run_again(suite):
    text = "import shutil\n\n\ndef test_it():\n    shutil.rmtree('.', ignore_errors=True)\n"
    with suite(text) as tests:
        for _ in range(2):
            tests.run(CHANGED)


def test_run_after_an_explained_one_is_plain(suite):
    with suite(PLAIN) as tests:
        assert tests.run(OWN, stop_early=False)["failed"] == 1
        assert tests.run(CHANGED)["passed"] == 1


def test_run_that_does_not_stop_early_counts_all_failures(suite):
    with suite(FAILING + "\n\ndef test_again():\n    assert False\n") as tests:
        assert tests.run(OWN, stop_early=False)["failed"] == 2
        assert tests.run(OWN)["failed"] == 1


DOUBLES = FAILING.replace("double(2) == 5", "double(3) == 6")
ENGINES = {
    "module": {"solution.py": "from engine import double\n", "engine.py": SOLUTION},
    "package": {
        "solution.py": "from core import double\n",
        "core/__init__.py": "from .test_engine import double\n",
        "core/test_engine.py": SOLUTION,
    },
    "star": {"solution.py": "from lib.engine import *\n", "lib/engine.py": SOLUTION},
}


@pytest.fixture
def graded(tmp_path, sorting):
    """What the inspector finds in an answer of these files, and the score of its tests."""

    def grade(files, suite=DOUBLES):
        for name, text in {**files, "test_solution.py": suite}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        inspection = inspect(tmp_path, "process", 1, 4)
        return inspection, own_tests(tmp_path, sorting, "process", inspection)

    return grade


@pytest.mark.parametrize("engine", ENGINES)
def test_mutants_come_from_every_module_of_the_solution(graded, engine):
    inspection, tests = graded(ENGINES[engine])
    changed = {file for files in inspection.mutants.values() for file in files}
    assert changed == {list(ENGINES[engine])[-1]}
    assert tests.score == 100
    assert tests.reason == "notices 3 of 3 mutants of its own code"


def test_code_in_two_files_has_the_mutants_of_one(graded):
    changes = {name.partition(":")[2] for name in graded(ENGINES["module"])[0].mutants}
    assert changes == {name.partition(":")[2] for name in graded(CHANGED)[0].mutants}


def test_script_beside_the_solution_is_not_mutated(graded):
    """Nor is a helper of the tests: the tests of the solution cannot notice either."""
    beside = {"bench.py": "print(3 * 7)\n", "helpers.py": "FOUR = 2 * 2\n"}
    inspection, tests = graded({**CHANGED, **beside}, f"import helpers\n{DOUBLES}")
    assert {file for files in inspection.mutants.values() for file in files} == {"solution.py"}
    assert tests.score == 100


def test_suite_that_knows_the_text_of_another_module_fails_on_a_rewrite(graded):
    knows = "def test_text():\n    assert open('engine.py').read().count('\\n') == 3\n"
    spaced = SOLUTION.replace("\n", "  # twice\n\n", 1)
    _, tests = graded({**ENGINES["module"], "engine.py": spaced}, knows)
    assert tests.score == 0
    assert "fails on a rewrite that behaves the same" in tests.reason


def test_code_without_a_mutant_is_not_measured(graded):
    _, tests = graded({"solution.py": "def double(x):\n    return sum([x, x])\n"})
    assert (tests.score, tests.reason) == (None, NO_MUTANTS)


def test_code_without_a_mutant_must_still_pass_its_tests(graded):
    _, tests = graded({"solution.py": "def double(x):\n    return sum([x])\n"})
    assert tests.score == 0
