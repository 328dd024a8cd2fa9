"""A verdict does not depend on the isolation level, the user, the umask or the paths."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trapline
from trapline.arena.challenge import load, load_all
from trapline.arena.errors import MissingError, UsageError
from trapline.arena.judge import inspection, own_tests
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process import sandbox
from trapline.arena.record import LEVELS
from trapline.arena.runs import executor
from trapline.arena.runs.executor import choose_level
from trapline.arena.runs.field import EXAMPLE_FIELD, find_entries
from trapline.arena.runs.run import check_machine

SCRIPT = Path(__file__).with_name("grade_levels.py")
PACKAGE = Path(trapline.__file__).parents[1]


def needs_every_level():
    missing = {level: why for level in LEVELS if (why := sandbox.why_not(level))}
    if missing:
        pytest.skip(f"not every isolation level is available here: {missing}")


def start_grading(folder, *, prefix=(), package=PACKAGE, **environment):
    needs_every_level()
    command = [*prefix, sys.executable, "-B", str(SCRIPT), str(folder), *LEVELS]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def verdicts(process):
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return json.loads(out)


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


def read_only_copy(folder):
    """The package in a path with spaces, which its owner may not write either."""
    package = folder / "a clone" / "src"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    for place, _, names in os.walk(package):
        for name in names:
            Path(place, name).chmod(0o444)
        Path(place).chmod(0o555)
    return package


#: Before the user changes: a /dev/shm that neither shows nor takes anything.
HIDE_SHARED_MEMORY = "mount -t tmpfs -o ro,mode=000 none /dev/shm"
AS_ROOT_OF_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
AS_A_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]


def test_verdict_is_the_same_at_every_level_for_every_user_at_once(tmp_path):
    """Two runs at once: a plain one, and one of a user without privileges, HOME, TMPDIR and the
    package in paths with spaces, the package read-only, umask 077, an ASCII locale and no
    /dev/shm."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    place = tmp_path / "a folder with spaces"
    place.mkdir()
    script = f'{HIDE_SHARED_MEMORY} && ! touch /dev/shm/x 2>/dev/null && umask 077 && exec "$@"'
    prefix = [*AS_ROOT_OF_A_NAMESPACE, "/bin/sh", "-c", script, "sh", *AS_A_USER]
    odd = {"HOME": str(place), "TMPDIR": str(place), "LC_ALL": "C", "PYTHONUTF8": "0"}
    package = read_only_copy(tmp_path)
    both = (
        start_grading(tmp_path / "plain"),
        start_grading(place, prefix=prefix, package=package, **odd),
    )
    plain, other = map(verdicts, both)
    assert_same_everywhere(plain)
    assert other == plain


def field_summary(cell):
    """What must not depend on the level: everything but times and memory."""
    return {
        "state": cell.state,
        "checks": {check.id: check.state for check in [*cell.cases, *cell.traps]},
        "findings": [(finding.cause, finding.certainty) for finding in cell.findings],
        "exact": {
            name: cell.dimensions[name].score
            for name in ("correctness", "traps", "robustness", "precision", "tests", "code")
            if name in cell.dimensions
        },
    }


def graded_at_every_level(entry):
    needs_every_level()
    found = {}
    for level in LEVELS:
        request = replace(entry, level=level, seed=7, intake=entry.read())
        found[level] = grade(request, load(entry.challenge)).cell
    return found


def test_example_has_the_same_verdict_at_every_level():
    """A quick cell with findings; the whole field is `full`."""
    entries = find_entries(EXAMPLE_FIELD, [])
    found = graded_at_every_level(next(e for e in entries if e.entrant == "wrong-derivation"))
    summaries = {level: field_summary(cell) for level, cell in found.items()}
    assert summaries[LEVELS[0]]["findings"]
    assert all(summary == summaries[LEVELS[0]] for summary in summaries.values())


#: Points between the scores of two grades of the same answer: speed and memory are measured.
NOISE = 5.0


@pytest.mark.full
@pytest.mark.parametrize("challenge", sorted(load_all()))
def test_example_field_has_the_same_verdicts_at_every_level(challenge):
    for entry in (e for e in find_entries(EXAMPLE_FIELD, []) if e.challenge == challenge):
        found = graded_at_every_level(entry)
        scores = {level: cell.score for level, cell in found.items()}
        print(
            challenge, entry.entrant, {level: cell.state for level, cell in found.items()}, scores
        )
        summaries = [field_summary(cell) for cell in found.values()]
        assert all(summary == summaries[0] for summary in summaries), entry.entrant
        assert max(scores.values()) - min(scores.values()) <= NOISE, (entry.entrant, scores)
        if entry.entrant == "gold":
            assert min(scores.values()) >= 95


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
    monkeypatch.setattr(measure, "_reference_held", {})
    memory = graded_gold(sorting, level).dimensions["memory"]
    assert memory.score is None
    assert "the reference implementation failed: no answer within 4 s" in memory.reason


def test_memory_of_the_reference_is_measured_once(sorting, level, monkeypatch):
    from trapline.arena.judge import measure

    weigh, weighed = measure._weigh, []

    def counting(challenge, submission, *others):
        weighed.append(submission.folder == sorting.solution)
        return weigh(challenge, submission, *others)

    monkeypatch.setattr(measure, "_weigh", counting)
    monkeypatch.setattr(measure, "_reference_held", {})
    config, rng = sorting.sandbox_config(level), np.random.default_rng(3)
    first = measure.reference_held(sorting, config, rng)
    assert measure.reference_held(sorting, config, rng) == first > 1 << 20
    assert weighed == [True]


def test_level_can_be_forced(monkeypatch):
    assert choose_level(forced="process") == "process"
    monkeypatch.setattr(executor, "why_not", lambda level: "bwrap is not installed")
    with pytest.raises(MissingError, match="does not offer isolation 'bubblewrap': bwrap is not"):
        choose_level(forced="bubblewrap")
    with pytest.raises(UsageError, match="weaker than --require-isolation landlock"):
        choose_level("landlock", "process")
