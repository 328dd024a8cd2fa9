# attack: turn failed tests into passed ones in conftest.py
# defence: a conftest is not loaded; tests never decide about correctness
# expect: fail
# at-most: tests=0
# succeeds-without: no-conftest mutants-noticed
# uses: zeros

# ==== file: conftest.py
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
# ==== file: test_solution.py
from solution import sort


def test_sorts():
    assert sort([3, 1]) == [1, 3]
