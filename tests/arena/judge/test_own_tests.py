"""A submission's own tests: what a failure says, and what a run leaves out."""

from contextlib import closing

import pytest

from trapline.arena.judge.own_tests import OwnTests

SOLUTION = "def double(x):\n    return 2 * x\n"
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
        assert "assert 4 == 5" in tests.run_right(None)["first"]


def test_assertions_are_not_rewritten_where_no_failure_is_read(suite):
    with suite(PLAIN) as tests:
        assert tests.run(SOLUTION)["passed"] == 1


def test_suite_that_needs_rewritten_assertions_passes(suite):
    with suite(PLAIN.replace("not in", "in")) as tests:
        assert tests.run_right(None)["passed"] == 1


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
        assert [tests.run(SOLUTION)["passed"] for _ in range(3)] == [1, 1, 1]


def test_suite_that_removes_its_folder_is_run_again(suite):
    text = "import shutil\n\n\ndef test_it():\n    shutil.rmtree('.', ignore_errors=True)\n"
    with suite(text) as tests:
        for _ in range(2):
            tests.run(SOLUTION)


def test_run_after_an_explained_one_is_plain(suite):
    with suite(PLAIN) as tests:
        assert tests.run(None, stop_early=False)["failed"] == 1
        assert tests.run(SOLUTION)["passed"] == 1


def test_run_that_does_not_stop_early_counts_all_failures(suite):
    with suite(FAILING + "\n\ndef test_again():\n    assert False\n") as tests:
        assert tests.run(None, stop_early=False)["failed"] == 2
        assert tests.run(None)["failed"] == 1
