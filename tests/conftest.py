"""What every test may rely on: no silent skips where none are allowed, and a plain graded cell."""

import gc
import os
import signal
import sys
import tempfile
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

# A shell starts background jobs with interrupts ignored, and every program they start inherits
# that: the tests that interrupt one would wait for its end.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine, however slow it is; `make test-full` looks further.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "long", settings.get_profile("steady"), derandomize=False, max_examples=1000
)
settings.load_profile(os.environ.get("TRAPLINE_HYPOTHESIS", "steady"))


# What a CI machine may ask of terminals would break lines and colour words that tests look for.
_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
for name in (*_COLOURS, "COLUMNS", "LINES", "TERMINAL_WIDTH"):
    os.environ.pop(name, None)

# Tests leave the key of this machine's user alone; every session draws other situations.
_state = tempfile.TemporaryDirectory(prefix="trapline-state-")
os.environ["XDG_STATE_HOME"] = _state.name


def pytest_sessionstart(session):
    """Each of several processes rewrites the assertions of a part of the modules, for all: they
    collect the same modules at the same time, and each would rewrite every one."""
    given = getattr(session.config, "workerinput", None)
    if given is not None and not sys.dont_write_bytecode:
        modules = sorted(
            Path(__file__).parent.rglob("test_*.py"), key=lambda path: path.stat().st_size
        )
        for path in modules[int(given["workerid"][2:]) :: given["workercount"]]:
            _keep_rewritten(path, session.config)


def _keep_rewritten(path, config):
    """Where pytest looks for what it rewrote in an earlier run."""
    kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
    if rewrite.try_makedirs(kept.parent) and rewrite._read_pyc(path, kept) is None:
        status, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, kept)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and collected tests stay until the end: the garbage collector passes over them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


#: Files with the longest tests, those that take longest first.
LONGEST = (
    "challenges/test_certify.py",
    "gold/test_versions.py",
    "arena/judge/test_levels.py",
    "gold/attention/test_hopper.py",
    "packaging/test_wheel.py",
    "arena/runs/test_run.py",
    "arena/runs/test_cluster.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Each of several processes begins with some of the longest tests: in the end, when there is
    nothing left to steal, the others would wait for one of them."""
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes > 1:
        items[:] = _longest_first(items, processes)


def _longest_first(items, processes):
    """As pytest-xdist deals them out: to each process a piece, all about as long."""
    here = Path(__file__).parent
    long = [[item for item in items if item.path == here / name] for name in LONGEST]
    chosen = {id(item) for group in long for item in group}
    others = iter([item for item in items if id(item) not in chosen])
    ordered, left = [], len(items)
    for number in range(processes):
        piece = [item for group in long[number::processes] for item in group]
        size = left // (processes - number)
        piece += islice(others, max(0, size - len(piece)))
        left -= size
        ordered += piece
    return [*ordered, *others]


def pytest_runtest_setup(item):
    """Tests marked `needs_gpu` run only where there is a GPU."""
    if item.get_closest_marker("needs_gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_runtest_makereport(item, call):
    """With TRAPLINE_NO_SKIP=1 a test that skips for a missing tool is a failure."""
    if not os.environ.get("TRAPLINE_NO_SKIP") or item.get_closest_marker("needs_gpu"):
        return
    if call.excinfo and call.excinfo.errisinstance(pytest.skip.Exception):
        message = f"skipped although nothing may be skipped: {call.excinfo.value}"
        call.excinfo = pytest.ExceptionInfo.from_exc_info(
            (AssertionError, AssertionError(message), call.excinfo.tb)
        )


@pytest.fixture
def plain_cell():
    """Makes graded cells about which nothing is remarkable but what is said."""
    # Here, so that the tests of the library run where nothing of the arena is installed.
    from trapline.arena.record import Cell

    def make(**said):
        plain = {
            "entrant": "me", "challenge": "kv_cache", "state": "pass", "score": 90.0,
            "letter": "A-", "reason": "", "isolation": "process", "dimensions": {}, "cases": [],
            "traps": [], "submission_digest": "s", "challenge_digest": "c", "seed": 1,
            "versions": {}, "started": datetime(2026, 1, 1, tzinfo=UTC), "seconds": 1.0,
        }  # fmt: skip
        return Cell(**(plain | said))

    return make
