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
