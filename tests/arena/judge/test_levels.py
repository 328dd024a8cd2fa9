"""A verdict does not depend on the isolation level, the user, the umask or the paths."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trapline
from trapline.arena.errors import MissingError, UsageError
from trapline.arena.judge import inspection, own_tests
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process import sandbox
from trapline.arena.record import LEVELS
from trapline.arena.runs import executor
from trapline.arena.runs.executor import choose_level
from trapline.arena.runs.run import check_machine

SCRIPT = Path(__file__).with_name("grade_levels.py")


def grade_levels(folder, *, prefix=(), **environment):
    missing = {level: why for level in LEVELS if (why := sandbox.why_not(level))}
    if missing:
        pytest.skip(f"not every isolation level is available here: {missing}")
    package = str(Path(trapline.__file__).parents[1])
    command = [*prefix, sys.executable, str(SCRIPT), str(folder), *LEVELS]
    environment = {**os.environ, "PYTHONPATH": package, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_same_everywhere(found):
    first = found[LEVELS[0]]
    assert first["gold"]["state"] == "pass"
    assert first["gold"]["scores"]["tests"] > 60
    assert first["wrong"]["state"] == "fail"
    measured = first["gold"]["measured"]
    unmeasured = [name for name, is_measured in measured.items() if not is_measured]
    assert unmeasured == ["robustness", "analysis"]  # this challenge asks for no refusals
    for level in LEVELS[1:]:
        assert found[level] == first, level


def test_every_level_gives_the_same_verdict(tmp_path):
    assert_same_everywhere(grade_levels(tmp_path))


def test_verdict_is_the_same_without_root_in_odd_paths_with_a_strict_umask(tmp_path):
    """A user without privileges, HOME and TMPDIR with spaces, umask 077, an ASCII locale."""
    place = tmp_path / "a folder with spaces"
    place.mkdir()
    prefix = ["/bin/sh", "-c", 'umask 077 && exec "$@"', "sh"]
    if os.geteuid() == 0:
        if shutil.which("unshare") is None:
            pytest.skip("unshare (util-linux) is not installed")
        prefix += ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    odd = {"HOME": str(place), "TMPDIR": str(place), "LC_ALL": "C", "PYTHONUTF8": "0"}
    assert_same_everywhere(grade_levels(place, prefix=prefix, **odd))


def test_umask_does_not_change_the_way_into_the_sandbox():
    """Under umask 077 the user inside could not read the program, and a weaker way was taken."""
    code = "from trapline.arena.process import sandbox; print(sandbox._way('bubblewrap')[0])"
    package = str(Path(trapline.__file__).parents[1])
    said = {
        subprocess.run(
            ["/bin/sh", "-c", f'umask {mask} && exec "$@"', "sh", sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": package},
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout.partition(" at ")[0]
        for mask in ("022", "077")
    }
    assert len(said) == 1


@pytest.fixture
def fresh_controls():
    """Forgets before and after what the controls said."""
    caches = (inspection.why_no_inspection, own_tests.why_no_tests)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def graded_gold(sorting, level):
    request = GradeRequest("gold", "sorting", 1, sorting.solution, level=level, seed=7)
    return grade(request, sorting).cell


@pytest.fixture
def no_measures(monkeypatch):
    from trapline.arena.judge import grade as module

    monkeypatch.setattr(module, "_measures", lambda challenge: [])


def test_sandbox_that_cannot_run_tests_gives_no_score(
    sorting, level, monkeypatch, fresh_controls, no_measures
):
    broken = {"passed": 0, "failed": 1, "code": 2, "first": "PermissionError: '/tmp'"}
    monkeypatch.setattr(own_tests.OwnTests, "run", lambda *_, **__: broken)
    cell = graded_gold(sorting, level)
    assert (cell.state, cell.dimensions["tests"].score) == ("pass", None)
    assert "tests cannot run at isolation" in cell.dimensions["tests"].reason
    assert "PermissionError" in cell.dimensions["tests"].reason
    assert cell.score == 100
    check_machine(sorting, level)


def test_sandbox_that_cannot_inspect_code_gives_no_score(
    sorting, level, monkeypatch, fresh_controls, no_measures
):
    broken = inspection.Inspection(unreadable="ruff is not here")
    monkeypatch.setattr(inspection, "_inspect", lambda *_, **__: broken)
    allowing = type(sorting)(sorting.folder, "sorting")
    allowing.plan = sorting.plan.model_copy(update={"forbidden": []})
    cell = graded_gold(allowing, level)
    assert (cell.state, cell.score) == ("pass", 100)
    for name in ("code", "tests"):
        assert cell.dimensions[name].score is None
        assert "code cannot be inspected at isolation" in cell.dimensions[name].reason
    # Forbidden calls would stay unseen, so nothing is said where some are forbidden.
    assert graded_gold(sorting, level).state == "infra_error"


def test_machine_on_which_the_own_tests_of_gold_fail_is_refused(sorting, level, monkeypatch):
    from trapline.arena.certify import certify
    from trapline.arena.errors import ArenaError

    monkeypatch.setattr(certify, "why_failing", lambda *_: "test_it failed")
    with pytest.raises(ArenaError, match=r"own tests of a right answer fail.*test_it failed"):
        check_machine(sorting, level)


def test_failure_of_the_reference_is_not_a_zero(sorting, level, monkeypatch):
    from trapline.arena.errors import Violation
    from trapline.arena.judge import measure

    weigh = measure._weigh

    def failing(challenge, submission, *others):
        if submission.folder == sorting.solution:
            raise Violation("no answer within 4 s")
        return weigh(challenge, submission, *others)

    monkeypatch.setattr(measure, "_weigh", failing)
    memory = graded_gold(sorting, level).dimensions["memory"]
    assert memory.score is None
    assert "the reference implementation failed: no answer within 4 s" in memory.reason


def test_level_can_be_forced(monkeypatch):
    assert choose_level(forced="process") == "process"
    monkeypatch.setattr(executor, "why_not", lambda level: "bwrap is not installed")
    with pytest.raises(MissingError, match="does not offer isolation 'bubblewrap': bwrap is not"):
        choose_level(forced="bubblewrap")
    with pytest.raises(UsageError, match="weaker than --require-isolation landlock"):
        choose_level("landlock", "process")
