"""The `tests` dimension: a submission's own tests on its code, on rewrites and on mutants."""

import secrets
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from trapline.arena.challenge import Challenge
from trapline.arena.errors import SubmissionDied
from trapline.arena.judge.inspection import Inspection, write_control
from trapline.arena.process.sandbox import SandboxLimits, scratch_folder
from trapline.arena.process.session import SandboxConfig, Session, printable
from trapline.arena.process.time_limit import MOST_ADDED
from trapline.arena.record import Dimension, Level

QUICK_MUTANTS, FULL_MUTANTS = 8, 24
#: For each run, whatever it runs on: a mutant that loops for ever is a dead mutant.
OWN_SECONDS = 30.0
#: Less waiting for a processor than this share of the time does not decide whether a suite ends.
WAITED_SHARE = 0.1
#: Some mutants change nothing that can be observed, so full marks do not need all of them.
KILLS_FOR_FULL_MARKS = 0.75
PASSING_SHARE, KILLING_SHARE = 20.0, 80.0
NO_MUTANTS = "its tests pass, but nothing in its code can be changed to see whether they notice"

Report = dict[str, Any] | None
#: Path inside the submission → its other text.
Files = Mapping[str, str]
OWN: Files = {}


class OwnTests:
    """One warm tester; each run is a fork of it."""

    #: Whether pytest rewrites assertions, so that they say what they compared.
    _explained = False

    def __init__(
        self, folder: Path, level: Level, memory_mb: int = 1024, packages: tuple[str, ...] = ()
    ) -> None:
        limits = SandboxLimits(memory_mb=memory_mb, processes=64)
        config = SandboxConfig(level, limits, OWN_SECONDS, ("pytest", *packages))
        self._session = Session(folder, config, "tester")

    def run(self, files: Files, *, stop_early: bool = True) -> Report:
        """The report on the suite with these texts of files; None when it gave none.

        Where it waited for a processor meanwhile, it gets that time in a second run.
        """
        report = self._run(files, OWN_SECONDS, stop_early)
        waited = min(self._session.waited, MOST_ADDED * OWN_SECONDS)
        if report is None and waited > WAITED_SHARE * OWN_SECONDS:
            return self._run(files, OWN_SECONDS + waited, stop_early)
        return report

    def run_right(self, files: Files) -> Report:
        """Of texts on which the suite should pass: where it fails, the report of a second run
        explains why. In the others nobody reads that, and it takes a quarter of a run."""
        report = self.run(files)
        if report is None or _passes(report) or self._explained:
            return report
        self._explained = True
        return self.run(files)

    def _run(self, files: Files, seconds: float, stop_early: bool) -> Report:
        texts = {name: text.encode() for name, text in files.items()}
        question = {
            "op": "test",
            "replaced": [[name, len(text)] for name, text in texts.items()],
            "seconds": seconds,
            "stop_early": stop_early,
            "explained": self._explained or not stop_early,
        }
        answer, _ = self._session.ask(question, list(texts.values()), seconds + 30)
        report = answer.get("report")
        return report if isinstance(report, dict) else None

    def close(self) -> None:
        self._session.close()


def own_tests(
    folder: Path, challenge: Challenge, level: Level, inspection: Inspection
) -> Dimension:
    """Runs the suite on everything and scores it. A zero is the submission's fault only if the
    sandbox can run a suite of ours."""
    if inspection.not_measured:
        return Dimension(score=None, reason=inspection.not_measured)
    if inspection.unreadable:
        return Dimension(score=0.0, reason="the code cannot be read, so its tests prove nothing")
    if not inspection.code.get("test_files"):
        return Dimension(score=0.0, reason="there are no tests")
    if inspection.code.get("code_from_data"):
        reason = "runs code that cannot be read, so mutants of what can be read prove nothing"
        return Dimension(score=0.0, reason=reason)
    with open_tester(folder, challenge, level) as tests:
        try:
            found = _score(tests, inspection)
        except SubmissionDied as died:
            found = Dimension(score=0.0, reason=f"the tests took their process down: {died}")
    if not found.score and (reason := why_no_tests(level)):
        return Dimension(score=None, reason=reason)
    return found


def tests_once(
    folder: Path, challenge: Challenge, level: Level, inspection: Inspection
) -> Dimension:
    """Whether the suite passes on its own code, for a prompt that sets no form for tests."""
    files = inspection.code.get("test_files", [])
    if not files:
        return Dimension(score=None, reason="the answer has no test files, and none were asked for")
    why = why_failing(folder, challenge, level)
    said = f"not weighed: {why}" if why else "not weighed: its tests pass on its own code"
    return Dimension(score=None, reason=said, evidence={"files": files})


def why_failing(folder: Path, challenge: Challenge, level: Level) -> str:
    """Why the suite does not pass on its own code; empty when it passes."""
    with open_tester(folder, challenge, level) as tests:
        return _why_failing(tests)


@cache
def why_no_tests(level: Level) -> str:
    """Why no suite can run at this level on this machine; empty where one can."""
    with scratch_folder() as name:
        write_control(Path(name))
        with closing(OwnTests(Path(name), level)) as tests:
            reason = _why_failing(tests)
    return f"tests cannot run at isolation {level!r} on this machine: {reason}" if reason else ""


def _why_failing(tests: OwnTests) -> str:
    try:
        report = tests.run_right(OWN)
    except SubmissionDied as died:
        return str(died)
    return "" if _passes(report) else _failure(report)


def open_tester(folder: Path, challenge: Challenge, level: Level) -> "closing[OwnTests]":
    config = challenge.sandbox_config(level)
    return closing(OwnTests(folder, level, config.limits.memory_mb, config.packages))


def _score(tests: OwnTests, inspection: Inspection) -> Dimension:
    """In an order that no suite can know: one that counts its runs learns nothing from it."""
    reports: dict[str, Report] = {}
    variants = [("own", OWN), *inspection.rewrites.items(), *inspection.mutants.items()]
    secrets.SystemRandom().shuffle(variants)
    for name, files in variants:
        if name in inspection.mutants:
            reports[name] = tests.run(files)
            continue
        reports[name] = tests.run_right(files)
        if not _passes(reports[name]):
            return _unusable(name, reports.get("own") or tests.run_right(OWN))
    killed = {name: not _passes(reports[name]) for name in inspection.mutants}
    return _by_kills(reports["own"], killed)


def _unusable(name: str, own: Report) -> Dimension:
    """A suite that fails on its own code, or on the same program in other words."""
    reason = f"fails on a rewrite that behaves the same ({name})" if _passes(own) else _failure(own)
    return Dimension(score=0.0, reason=reason, evidence={"own": own})


def _by_kills(own: Report, killed: dict[str, bool]) -> Dimension:
    evidence = {"own": own, "killed": killed}
    count = sum(killed.values())
    if not killed:
        return Dimension(score=None, reason=NO_MUTANTS, evidence=evidence)
    if not count:
        return Dimension(score=0.0, reason="no mutant of the code is noticed", evidence=evidence)
    share = min(1.0, count / len(killed) / KILLS_FOR_FULL_MARKS)
    reason = f"notices {count} of {len(killed)} mutants of its own code"
    score = round(PASSING_SHARE + KILLING_SHARE * share, 1)
    return Dimension(score=score, reason=reason, evidence=evidence)


def _passes(report: Report) -> bool:
    """Positive evidence: something passed, nothing failed, and pytest agrees."""
    if report is None:
        return False
    passed = report.get("passed")
    return (
        type(passed) is int and passed > 0 and report.get("failed") == 0 and report.get("code") == 0
    )


def _failure(report: Report) -> str:
    if report is None:
        return f"its tests gave no report within {OWN_SECONDS:g} s"
    return f"its tests do not pass on its own code: {printable(str(report.get('first'))[:300])}"
