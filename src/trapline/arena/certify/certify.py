"""Certification: right answers to a challenge pass, mutants and controls fail."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from trapline.arena.certify import controls
from trapline.arena.certify.mechanical import MechanicalMutant, mechanical_mutants
from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError
from trapline.arena.gpu import controls as gpu_controls
from trapline.arena.gpu.contract import POISON
from trapline.arena.gpu.opening import open_submission
from trapline.arena.judge.checks import first_failure, run_check, run_checks
from trapline.arena.judge.grade import grade
from trapline.arena.judge.intake import Intake
from trapline.arena.judge.own_tests import why_failing, why_no_tests
from trapline.arena.judge.request import GradeRequest
from trapline.arena.judge.traps import Case, Trap
from trapline.arena.process.proxy import Submission
from trapline.arena.process.sandbox import scratch_folder
from trapline.arena.record import Level, Record
from trapline.arena.runs.executor import run_all

#: The last certificates of all challenges, mechanical mutants included (`certify --json`).
PUBLISHED_CERTIFICATES = Path(__file__).with_name("data") / "certificates.json"


class Outcome(Record):
    """The result for one subject: a right answer, a mutant or a control."""

    kind: str
    subject: str
    #: The check that failed, "" when none did.
    fell_to: str
    message: str
    #: What is wrong; empty when the result is as expected.
    problem: str = ""


class Certificate(Record):
    challenge: str
    seed: int
    findings: list[Outcome]

    def problems(self) -> list[Outcome]:
        return [finding for finding in self.findings if finding.problem]

    def of(self, kind: str) -> list[Outcome]:
        return [finding for finding in self.findings if finding.kind == kind]


#: Runs one subject through the checks.
Subject = Callable[[], Outcome]


class Certifier:
    """`levels` are those at which the gold solution is graded; the rest runs at `level`."""

    def __init__(
        self,
        challenge: Challenge,
        level: Level,
        seed: int | None = None,
        levels: Sequence[Level] = (),
    ) -> None:
        self.challenge, self.level, self.levels = challenge, level, levels or (level,)
        self.seed = secrets.randbits(32) if seed is None else seed
        self.checks: list[Case | Trap] = [*challenge.cases, *challenge.traps]
        # Most mechanical mutants fall to any check, so what takes seconds comes last for them.
        self.quick_first = sorted(self.checks, key=lambda check: check.id in challenge.slow)
        self.gold = challenge.solution_files()

    def certify(
        self, *, mechanical: bool = False, on_finding: Callable[[Outcome], None] = lambda f: None
    ) -> Certificate:
        findings = []
        # One answer at a time has the GPU.
        width = 1 if self.challenge.track == "gpu" else None
        for _, finding in run_all(lambda subject: subject(), self.subjects(mechanical), width):
            findings.append(finding)
            on_finding(finding)
        findings.sort(key=lambda finding: (finding.kind, finding.subject))
        return Certificate(challenge=self.challenge.full_id, seed=self.seed, findings=findings)

    def subjects(self, mechanical: bool) -> list[Subject]:
        """Everything to be examined, slow right answers first.

        The traps of a flawed prompt are those of the challenge, which certifies their mutants.
        """
        folders = [self.challenge.solution, *self.challenge.alternates]
        subjects: list[Subject] = [partial(self._right, folder) for folder in folders]
        subjects += [partial(self._dimensions, level) for level in self.levels]
        subjects += [partial(self.control, name) for name in controls.NAMES]
        if (flaw := self.challenge.flaw) is not None:
            outcomes = {"": "noticed", flaw.mutant: "followed", flaw.another: "neither"}
            return subjects + [partial(self._flaw, *expected) for expected in outcomes.items()]
        subjects += [
            partial(self._named, trap, form) for trap in self.challenge.traps for form in trap.forms
        ]
        if mechanical:
            subjects += [
                partial(self._mechanical, mutant)
                for mutant in mechanical_mutants(self.gold)
                if mutant.id not in self.challenge.equivalent
            ]
        return subjects

    def _right(self, folder: Path, checks: Sequence[Case | Trap] = ()) -> Outcome:
        """A right answer passes these checks; none given: all."""
        asked = checks or self.checks
        # Many traps share a control: it is asked once.
        alike = {check.control: check for check in asked if isinstance(check, Trap)}
        controls = [_control_of(trap) for trap in alike.values()]
        with open_submission(self.challenge, folder, self.level) as submission:
            failed = [
                result
                for result in run_checks([*asked, *filter(None, controls)], submission, self.seed)
                if result.state == "fail"
            ]
        return Outcome(
            kind="right",
            subject=folder.name,
            fell_to=", ".join(result.id for result in failed),
            message="; ".join(result.message for result in failed)[:2000],
            problem="a right answer was called wrong" if failed else "",
        )

    def private_traps(self) -> Iterator[Outcome]:
        """Every right answer on the private traps alone, then each of their mutants."""
        traps = self.challenge.private_traps
        for folder in (self.challenge.solution, *self.challenge.alternates):
            yield self._right(folder, traps)
        for trap in traps:
            for form in trap.forms:
                yield self._named(trap, form)

    def right_on_cases(self) -> Outcome:
        """The gold solution on the contract cases alone: can this machine judge?"""
        with open_submission(self.challenge, self.challenge.solution, self.level) as submission:
            submission.is_ours = True
            result = first_failure(self.challenge.cases, submission, self.seed)
        return Outcome(
            kind="right",
            subject="solution",
            fell_to=result.id if result else "",
            message=result.message if result else "",
            problem="a right answer was called wrong" if result else "",
        )

    def own_tests(self) -> Outcome:
        """The gold solution's own tests, where the sandbox can run any tests at all."""
        reason = ""
        if self.challenge.track == "cpu":  # the GPU track grades no own tests
            reason = why_failing(self.challenge.solution, self.challenge, self.level)
        failed = bool(reason) and not why_no_tests(self.level)
        return Outcome(
            kind="right",
            subject="solution",
            fell_to="own tests" if failed else "",
            message=reason,
            problem="the own tests of a right answer fail" if failed else "",
        )

    def _dimensions(self, level: Level) -> Outcome:
        """The gold solution, graded as any submission: each dimension is measured and above 0.

        The control answer of a profile scores 100.
        """
        request = GradeRequest(
            "gold",
            self.challenge.id,
            1,
            self.challenge.control,
            profile=self.challenge.profile_name,
            level=level,
            seed=self.seed,
            track=self.challenge.track,
        )
        cell = grade(request, self.challenge).cell
        weights = self.challenge.plan.weights
        bad = {
            name: dimension.reason
            for name, dimension in cell.dimensions.items()
            if name != "analysis" and name in weights and not dimension.score
        }
        holds = cell.state == "pass" and not bad
        if self.challenge.profile is not None and self.challenge.flaw is None:
            holds = holds and cell.score == 100.0
        return Outcome(
            kind="dimensions",
            subject=f"solution at isolation {level}",
            fell_to=", ".join(bad),
            message="; ".join(bad.values()) or f"{cell.reason} (score {cell.score})",
            problem="" if holds else "a right answer does not get the score that it must",
        )

    def _named(self, trap: Trap, form: str) -> Outcome:
        with self._submission(trap.plant(self.gold, form)) as submission:
            result = run_check(trap, submission, self.seed)
            control = _control_of(trap)
            beside = run_check(control, submission, self.seed) if control else None
        survived = result.state != "fail"
        problem = f"survives its own trap {trap.id}" if survived else ""
        if beside is not None and beside.state == "fail":
            problem = problem or f"fails without the trigger, too: {beside.message}"
        return Outcome(
            kind="named",
            subject=form,
            fell_to="" if survived else trap.id,
            message=result.message,
            problem=problem,
        )

    def _flaw(self, bug: str, expected: str) -> Outcome:
        """What a grade says of the gold solution, or of a mutant, under the flawed prompt."""
        trap = next((trap for trap in self.challenge.traps if trap.id == bug), None)
        files = trap.plant(self.gold) if trap else self.gold
        request = GradeRequest(
            "gold",
            self.challenge.id,
            1,
            self.challenge.control,
            profile=self.challenge.profile_name,
            level=self.level,
            seed=self.seed,
            checks_only=True,
            intake=Intake({name: text.encode() for name, text in files.items()}),
        )
        cell = grade(request, self.challenge).cell
        outcome = cell.flaw or cell.reason
        return Outcome(
            kind="flaw",
            subject=bug or "solution",
            fell_to="" if outcome == "noticed" else outcome,
            message=outcome,
            problem="" if outcome == expected else f"{outcome} instead of {expected}",
        )

    def control(self, name: str) -> Outcome:
        files = self._control(name)
        with self._submission(files) as submission:
            result = first_failure(self.challenge.cases, submission, self.seed)
        return Outcome(
            kind="control",
            subject=name,
            fell_to=result.id if result else "",
            message=result.message if result else "",
            problem="" if result else "a worthless answer passes every case",
        )

    def _control(self, name: str) -> dict[str, str]:
        points = self.challenge.plan.entry_points
        if self.challenge.track == "gpu":
            return gpu_controls.make(name, self.gold, points, POISON)
        return controls.make(name, self.gold, points)

    def _mechanical(self, mutant: MechanicalMutant) -> Outcome:
        patience = self.challenge.plan.limits.mutant_seconds
        with self._submission(mutant.files, patience) as submission:
            result = first_failure(self.quick_first, submission, self.seed)
        return Outcome(
            kind="mechanical",
            subject=mutant.id,
            fell_to=result.id if result else "",
            message=result.message if result else f"survives (line {mutant.line})",
        )

    @contextmanager
    def _submission(
        self, files: dict[str, str], call_seconds: float | None = None
    ) -> Iterator[Submission]:
        with scratch_folder() as folder:
            for name, source in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(source, encoding="utf-8")
            Path(folder).chmod(0o755)
            with open_submission(
                self.challenge, Path(folder), self.level, call_seconds
            ) as submission:
                yield submission


def _control_of(trap: Trap) -> Case | None:
    """The trap's situation without the trigger: its own bug passes it."""
    return Case(f"control of {trap.id}", trap.control) if trap.control else None


def kill_rate(certificate: Certificate) -> float:
    mutants = certificate.of("mechanical")
    if not mutants:
        raise ArenaError("no mechanical mutants were run")
    return sum(1 for mutant in mutants if mutant.fell_to) / len(mutants)
