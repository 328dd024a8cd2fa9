"""Grades one submission: from its folder to a cell and the evidence it rests on."""

import math
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import trapline
from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError, NotMeasuredError, Violation
from trapline.arena.gpu import reproduction as gpu_reproduction
from trapline.arena.gpu import turns
from trapline.arena.gpu.contract import entries
from trapline.arena.gpu.measure import Measurer
from trapline.arena.gpu.opening import machine_facts, open_with, why_not_gradable
from trapline.arena.gpu.rig import GpuSubmission
from trapline.arena.judge import contamination, measure, reproduction, rubric
from trapline.arena.judge.checks import generator, run_checks, unexaminable
from trapline.arena.judge.diagnosis import diagnose
from trapline.arena.judge.findings import Diagnosis
from trapline.arena.judge.flaw import flaw_outcome
from trapline.arena.judge.inspection import Inspection, code_dimension, forbidden_uses, inspect
from trapline.arena.judge.intake import Intake
from trapline.arena.judge.mutants import MutantHost
from trapline.arena.judge.own_tests import FULL_MUTANTS, QUICK_MUTANTS, own_tests, tests_once
from trapline.arena.judge.request import NO_ANSWER, TROUBLE, GradeRequest, entry_files
from trapline.arena.judge.traps import Case, Trap
from trapline.arena.process.proxy import Submission
from trapline.arena.process.sandbox import scratch_folder
from trapline.arena.process.session import SandboxConfig
from trapline.arena.process.transcript import Transcript
from trapline.arena.profile import ADAPTER, CUDA_ADAPTER, FIGURES
from trapline.arena.record import (
    Bundle,
    Cell,
    CheckResult,
    Dimension,
    Finding,
    FindingDimension,
    FlawOutcome,
    State,
)

#: A quick grade ends a call after this share of its time limit in processor time.
QUICK_PROCESSOR_SHARE = 0.1
#: Why a workspace as it was deployed has no answer.
UNCHANGED = "solution.py is the starter, unchanged"
#: How the runner calls what nvcc refuses.
COMPILE_ERROR = "CompileError"
OnStep = Callable[[str], None]
#: Challenge → how many processes of their own its checks have asked for.
_fresh_asked: dict[str, int] = {}


@dataclass
class Verdict:
    state: State = "pass"
    reason: str = "every contract case holds"
    cases: list[CheckResult] = field(default_factory=list)
    traps: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    flaw: FlawOutcome = ""
    measures: dict[str, float] = field(default_factory=dict)
    dimensions: dict[str, Dimension] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    def fail(self, reason: str, state: State = "fail") -> None:
        self.state, self.reason = state, reason


def grade(
    request: GradeRequest, challenge: Challenge, on_step: OnStep = lambda step: None
) -> Bundle:
    """Never raises for what a submission does; a failure of ours becomes `infra_error`."""
    started, clock = datetime.now(UTC), time.perf_counter() - turns.waited()
    intake, verdict = request.read(), Verdict()
    try:
        if request.trouble:
            raise ArenaError(f"{TROUBLE}{request.trouble}")
        if challenge.not_run:
            verdict.fail(challenge.not_run, "not_run")
        elif intake.is_empty:
            _refuse(challenge, verdict, intake.refused)
            verdict.state = "no_answer"
        elif why := _why_no_answer(request, challenge, intake):
            _refuse(challenge, verdict, why)
            verdict.state = "no_answer"
        elif intake.refused:
            _refuse(challenge, verdict, intake.refused)
        else:
            _examine(request, challenge, intake, verdict, on_step)
    except ArenaError as error:
        verdict = Verdict(state="infra_error", reason=str(error))
    seconds = time.perf_counter() - turns.waited() - clock
    return _bundle(request, challenge, intake, verdict, started, seconds)


def _why_no_answer(request: GradeRequest, challenge: Challenge, intake: Intake) -> str:
    """Empty unless the solution is still the one that the workspace was deployed with."""
    starter = challenge.folder / "starter" / "solution.py"
    given = starter.read_text(encoding="utf-8") if starter.is_file() else None
    texts = intake.texts()[0]
    answers = [texts[name] for name in entry_files("", challenge.track) if name in texts]
    if any(answer != given for answer in answers):
        return ""
    if request.unanswered:
        return request.unanswered.join(NO_ANSWER)
    return UNCHANGED if answers else ""


def _examine(
    request: GradeRequest, challenge: Challenge, intake: Intake, verdict: Verdict, on_step: OnStep
) -> None:
    if challenge.track == "gpu" and (reason := why_not_gradable(intake.files)):
        verdict.fail(reason, "not_run")
        return
    with scratch_folder() as name:
        folder = Path(name)
        intake.write(folder)
        verdict.raw["contamination"] = contamination.evidence(challenge, intake.texts()[0])
        on_step("reading")
        if challenge.track == "gpu":  # which asks for no tests and forbids no call
            _convict(_ask(request, challenge, intake, folder, verdict, on_step), verdict)
            return
        if request.checks_only:
            # Side by side: nothing is timed.
            with ThreadPoolExecutor(max_workers=1) as reader:
                reading = reader.submit(_read, request, challenge, intake, folder)
                submission = _ask(request, challenge, intake, folder, verdict, on_step)
            inspection = reading.result()
        else:
            inspection = _read(request, challenge, intake, folder)
            submission = _ask(request, challenge, intake, folder, verdict, on_step)
            on_step("own tests")
            test = own_tests if "tests" in challenge.plan.weights else tests_once
            verdict.dimensions["tests"] = test(folder, challenge, request.level, inspection)
            verdict.dimensions["code"] = code_dimension(inspection)
        _convict_code(challenge, inspection, verdict)
        _convict(submission, verdict)
    verdict.dimensions["analysis"] = Dimension(score=None, reason="no judge was asked")


def _read(request: GradeRequest, challenge: Challenge, intake: Intake, folder: Path) -> Inspection:
    mutants = FULL_MUTANTS if request.full else QUICK_MUTANTS
    if request.checks_only:
        mutants = 0
    # The same bytes get the same mutants, so that a second grade differs only by measurement.
    inspection = inspect(folder, request.level, int(intake.digest[:8], 16), mutants)
    missing = challenge.missing_packages(inspection.code.get("imports", []))
    if missing:
        raise ArenaError(f"this machine lacks what the task allows: {', '.join(missing)}")
    return inspection


def _ask(
    request: GradeRequest,
    challenge: Challenge,
    intake: Intake,
    folder: Path,
    verdict: Verdict,
    on_step: OnStep,
) -> Submission:
    """Runs and measures the submission; returns it ended, with what it did to the channel."""
    config = _config(request, challenge, intake)
    with open_with(challenge, folder, config, full=request.full) as submission:
        trouble = _import(challenge, submission)
        if isinstance(submission, GpuSubmission):
            log = trouble if COMPILE_ERROR in trouble else submission.compile_log
            verdict.raw |= {"compile log": log} if log else {}
        if trouble:
            _refuse(challenge, verdict, trouble)
        else:
            _check(request, challenge, submission, verdict, on_step)
            if not request.checks_only:
                _measure(request, challenge, submission, verdict, on_step)
                _take_figures(challenge, submission, verdict, request.seed)
    return submission


def _config(request: GradeRequest, challenge: Challenge, intake: Intake) -> SandboxConfig:
    """The sandbox of an answer; to a profile's prompt it speaks through its adapter."""
    config = challenge.sandbox_config(request.level)
    if request.checks_only:
        config = replace(config, processor_share=QUICK_PROCESSOR_SHARE)
    adapter = CUDA_ADAPTER if challenge.track == "gpu" else ADAPTER
    if challenge.profile is None or challenge.flaw or adapter not in intake.files:
        return config
    return replace(config, entry=Path(adapter).stem)


def _import(challenge: Challenge, submission: Submission) -> str:
    """Why the submission cannot be used at all; empty when it can."""
    try:
        missing = submission.start(challenge.plan.entry_points)
    except Violation as violation:
        return f"cannot be imported: {violation}"
    return f"missing entry points: {', '.join(missing)}" if missing else ""


def _refuse(challenge: Challenge, verdict: Verdict, reason: str) -> None:
    """Nothing could be asked: every measure is zero, and no bug is named."""
    verdict.fail(reason)
    verdict.flaw = "neither" if challenge.flaw else ""
    verdict.cases = [_unasked(case, reason) for case in challenge.cases]
    verdict.traps = [_unasked(trap, reason) for trap in challenge.traps]
    _add_outside(challenge, verdict)
    names = ("correctness", "traps", "robustness", *_measures(challenge), "tests", "code")
    if challenge.track == "gpu":
        names = tuple(challenge.plan.weights)
    for name in names:
        verdict.dimensions[name] = Dimension(score=0.0, reason=reason)
    verdict.dimensions["analysis"] = Dimension(score=None, reason="no judge was asked")


def _unasked(check: Case | Trap, reason: str) -> CheckResult:
    return CheckResult(id=check.id, state="not_asked", dimension=check.dimension, message=reason)


def _add_outside(challenge: Challenge, verdict: Verdict) -> None:
    """Lists the checks that the profile's prompt does not ask for; they weigh nothing."""
    cases, traps = challenge.outside_checks()
    for checks, results in ((cases, verdict.cases), (traps, verdict.traps)):
        results += [
            _unasked(check, f"the prompt does not ask for: {challenge.not_asked[check.id]}")
            for check in checks
        ]


def _check(
    request: GradeRequest,
    challenge: Challenge,
    submission: Submission,
    verdict: Verdict,
    on_step: OnStep,
) -> None:
    failures: list[tuple[CheckResult, Transcript]] = []

    def keep(result: CheckResult, transcript: Transcript) -> None:
        host.start()
        failures.append((result, transcript))

    left_out = challenge.left_out_of_quick if request.checks_only else frozenset()
    cases = [case for case in challenge.cases if case.id not in left_out]
    traps = [trap for trap in challenge.traps if trap.id not in left_out]
    name = challenge.full_id
    with (
        submission.fresh_ahead(_fresh_asked.get(name, 0)) as ahead,
        MutantHost(challenge, request.seed, submission.full, shared=request.shares_seed) as host,
    ):
        on_step("cases")
        verdict.cases = run_checks(cases, submission, request.seed, keep)
        on_step("traps")
        verdict.traps = run_checks(traps, submission, request.seed, keep)
        on_step("diagnosis")
        found = diagnose(challenge, failures, submission, host, quick=request.checks_only)
    _fresh_asked[name] = max(ahead.taken, _fresh_asked.get(name, 0))
    verdict.findings = found.findings
    verdict.traps = [_with_state(result, found) for result in verdict.traps]
    if challenge.flaw is not None:
        on_step("golden test")
        verdict.flaw = flaw_outcome(
            challenge, challenge.flaw, submission, verdict.traps, found.findings, request.seed
        )
    transcripts = {result.id: transcript for result, transcript in failures}
    verdict.raw["calls"] = {
        finding.explains[0]: _recorded(challenge, transcripts[finding.explains[0]])
        for finding in found.findings
    }
    _score_checks(verdict)
    _add_outside(challenge, verdict)


def _recorded(challenge: Challenge, transcript: Transcript) -> list[dict[str, Any]]:
    if challenge.track == "gpu":
        return gpu_reproduction.recorded(transcript, entries(challenge.module("cases")))
    return reproduction.recorded(transcript)


def failing_calls(request: GradeRequest, challenge: Challenge, check: str) -> list[dict[str, Any]]:
    """The calls of one check, made again and kept whatever their size; empty where it passes."""
    intake, failures = request.read(), list[tuple[CheckResult, Transcript]]()
    known: list[Case | Trap] = [*challenge.cases, *challenge.traps]
    checks = [one for one in known if one.id == check]
    with scratch_folder() as name:
        intake.write(Path(name))
        config = _config(request, challenge, intake)
        with open_with(challenge, Path(name), config, full=request.full) as submission:
            if not _import(challenge, submission):
                run_checks(checks, submission, request.seed, lambda *one: failures.append(one))
            return reproduction.recorded(failures[0][1], None) if failures else []


def _with_state(result: CheckResult, found: Diagnosis) -> CheckResult:
    if result.state != "fail":
        return result
    state, behind = found.states[result.id], found.behind[result.id]
    return result.model_copy(update={"state": state, "behind": behind})


def _score_checks(verdict: Verdict) -> None:
    cases = [case for case in verdict.cases if case.dimension == "correctness"]
    refusals = [case for case in verdict.cases if case.dimension == "robustness"]
    failed = [case for case in cases if case.state == "fail"]
    if failed:
        verdict.fail(f"{failed[0].id}: {failed[0].message}")
    verdict.dimensions["correctness"] = _correctness(cases, failed)
    score = rubric.penalised(verdict.findings, "traps")
    verdict.dimensions["traps"] = Dimension(score=round(score, 1), reason=_counted(verdict))
    verdict.dimensions["robustness"] = _robustness(verdict, refusals)


def _counted(verdict: Verdict) -> str:
    return _listed(verdict, "traps") or f"no finding in {len(verdict.traps)} traps"


def _listed(verdict: Verdict, dimension: FindingDimension) -> str:
    """The findings that lower this dimension; empty where there are none."""
    named = [finding.cause for finding in verdict.findings if finding.dimension == dimension]
    if not named:
        return ""
    return f"{len(named)} finding{'s' if len(named) > 1 else ''}: {', '.join(named)}"


def _robustness(verdict: Verdict, refusals: list[CheckResult]) -> Dimension:
    """Half for the contract's own refusals, half for what the traps found."""
    if not refusals and not any(trap.dimension == "robustness" for trap in verdict.traps):
        return Dimension(score=None, reason="the prompt does not ask for refusals")
    found = rubric.penalised(verdict.findings, "robustness")
    refused = sum(1 for case in refusals if case.state == "pass")
    share = 100.0 * refused / len(refusals) if refusals else found
    reason = f"{refused} of {len(refusals)} kinds of bad input are refused"
    if listed := _listed(verdict, "robustness"):
        reason += f", {listed}"
    return Dimension(score=round((share + found) / 2, 1), reason=reason)


def _correctness(cases: list[CheckResult], failed: list[CheckResult]) -> Dimension:
    held = len(cases) - len(failed)
    score = round(100.0 * held / len(cases), 1)
    return Dimension(score=score, reason=f"{held} of {len(cases)} contract cases hold")


def _measures(challenge: Challenge) -> list[str]:
    """The measured dimensions that this challenge has hooks for."""
    hooks = challenge.module("cases")
    if challenge.track == "gpu":
        return [
            step
            for step, (hook, weight) in _GPU_HOOKS.items()
            if hasattr(hooks, hook) and weight in challenge.plan.weights
        ]
    names = [name for name in ("precision", "memory", "speed") if hasattr(hooks, name)]
    if challenge.profile is not None:
        names = [name for name in names if name in challenge.plan.weights]
    return [name for name in names if name != "memory" or challenge.plan.memory is not None]


def _measure(
    request: GradeRequest,
    challenge: Challenge,
    submission: Submission,
    verdict: Verdict,
    on_step: OnStep,
) -> None:
    for name in _measures(challenge):
        on_step(name)
        if name == "gpu":
            _measure_gpu(challenge, submission, verdict)
            continue
        if name == "speed" and verdict.state != "pass":
            reason = "the contract does not hold, so its time means nothing"
            verdict.dimensions[name] = Dimension(score=0.0, reason=reason)
            continue
        try:
            verdict.dimensions[name] = _MEASURES[name](request, challenge, submission, verdict.raw)
        except (NotMeasuredError, OSError) as error:
            verdict.dimensions[name] = Dimension(score=None, reason=f"not measured: {error}")
        except ArenaError:
            raise
        except Exception as error:  # a wrong answer, or one of an unforeseen form
            why = error if isinstance(error, Violation) else unexaminable(error)
            verdict.dimensions[name] = Dimension(score=0.0, reason=f"could not be measured: {why}")
        finally:
            submission.settle()
    verdict.measures = _named_measures(request, challenge, submission)


def _named_measures(
    request: GradeRequest, challenge: Challenge, submission: Submission
) -> dict[str, float]:
    """The figures that the challenge's hook `measures` takes; none where an answer is wrong."""
    hook = getattr(challenge.module("cases"), "measures", None)
    if hook is None:
        return {}
    try:
        found: dict[str, float] = hook(submission, generator(request.seed, "measures"))
    except ArenaError:
        raise
    except Exception:  # a wrong answer, or one of an unforeseen form
        return {}
    finally:
        submission.settle()
    return {name: round(value, 4) for name, value in found.items() if math.isfinite(value)}


def _take_figures(
    challenge: Challenge, submission: Submission, verdict: Verdict, seed: int
) -> None:
    """Figures that reports print of answers to the profile's prompt; no score depends on them."""
    if challenge.profile is None or not challenge.profile.has_figures:
        return
    take = challenge.profile_module(FIGURES).figures
    try:
        verdict.raw["figures"] = take(submission, generator(seed, FIGURES))
    except (NotMeasuredError, OSError) as error:
        verdict.raw["not_figured"] = str(error)
    except ArenaError:
        raise
    except Exception as error:  # a wrong answer, or one of an unforeseen form
        why = error if isinstance(error, Violation) else unexaminable(error)
        verdict.raw["not_figured"] = str(why)
    finally:
        submission.settle()


def _measure_gpu(challenge: Challenge, submission: Submission, verdict: Verdict) -> None:
    """Time and memory on the timed shapes."""
    assert isinstance(submission, GpuSubmission)
    measured = ("speed", "memory")
    if submission.rig.device == "cpu":
        reason = "not measured: host memory stands in for a GPU"
        verdict.dimensions |= {name: Dimension(score=None, reason=reason) for name in measured}
        return
    if verdict.state != "pass":
        reason = "the contract does not hold, so its time means nothing"
        verdict.dimensions |= {name: Dimension(score=0.0, reason=reason) for name in measured}
        return
    try:
        found, verdict.raw["gpu"] = Measurer(challenge, submission).measure()
    except Violation as violation:
        reason = f"could not be measured: {violation}"
        found = {name: Dimension(score=0.0, reason=reason) for name in measured}
    finally:
        submission.settle()
    verdict.dimensions |= found


def _precision(
    request: GradeRequest, challenge: Challenge, submission: Submission, _: dict[str, Any]
) -> Dimension:
    return measure.precision(challenge, submission, generator(request.seed, "precision"))


def _memory(
    request: GradeRequest, challenge: Challenge, submission: Submission, raw: dict[str, Any]
) -> Dimension:
    # Each draws for itself: the reference is measured once in a process, for all answers.
    ours, theirs = (generator(request.seed, "memory") for _ in range(2))
    usual = measure.reference_held(challenge, challenge.sandbox_config(request.level), ours)
    dimension, raw["memory"] = measure.memory(challenge, submission, usual, theirs)
    return dimension


def _speed(
    request: GradeRequest, challenge: Challenge, submission: Submission, raw: dict[str, Any]
) -> Dimension:
    rng = np.random.default_rng()
    rounds = measure.FULL_ROUNDS if request.full else measure.QUICK_ROUNDS
    config = challenge.sandbox_config(request.level)
    with Submission(challenge.solution, config) as reference:
        dimension, raw["speed"] = measure.speed(
            challenge, submission.fresh(), reference, rng, rounds
        )
    return dimension


#: Steps that measure GPU answers → what a challenge's module `cases` offers, and a weight.
_GPU_HOOKS = {"precision": ("precision", "precision"), "gpu": ("timed", "speed")}
_MEASURES = {"precision": _precision, "memory": _memory, "speed": _speed}


def _convict_code(challenge: Challenge, inspection: Inspection, verdict: Verdict) -> None:
    """Marks calls of what the task forbids as `hack`."""
    if challenge.plan.forbidden and inspection.not_measured:
        raise ArenaError(inspection.not_measured)
    if challenge.plan.forbidden and not inspection.code and verdict.state == "pass":
        verdict.fail(
            f"cannot be read, so that forbidden calls stay unseen: {inspection.unreadable}"
        )
    uses = forbidden_uses(inspection, challenge.plan.forbidden)
    if uses:
        verdict.fail(f"uses what the task forbids: {', '.join(uses)}", "hack")


def _convict(submission: Submission, verdict: Verdict) -> None:
    """Marks attacks on the channel as `hack`."""
    if submission.forgeries:
        verdict.fail(f"tampered with the channel: {submission.forgeries[0]}", "hack")


def _bundle(
    request: GradeRequest,
    challenge: Challenge,
    intake: Intake,
    verdict: Verdict,
    started: datetime,
    seconds: float,
) -> Bundle:
    fell = any(finding.severity == "critical" for finding in verdict.findings)
    score = rubric.score(verdict.state, verdict.dimensions, challenge.plan.weights, critical=fell)
    cell = Cell(
        entrant=request.entrant,
        challenge=challenge.id,
        attempt=request.attempt,
        profile=request.profile,
        harness=request.harness,
        model=request.model,
        origin=request.origin,
        state=verdict.state,
        score=score,
        letter=None if score is None else rubric.letter(score),
        reason=verdict.reason[:2000],
        isolation=request.level,
        dimensions=verdict.dimensions,
        cases=verdict.cases,
        traps=verdict.traps,
        measures=verdict.measures,
        findings=verdict.findings,
        flaw=verdict.flaw,
        submission_digest=intake.digest,
        challenge_digest=challenge.digest,
        trap_set=challenge.trap_set.name(challenge.id) if challenge.trap_set else None,
        seed=request.seed,
        full=request.full,
        versions=versions() | (machine_facts() if challenge.track == "gpu" else {}),
        track=challenge.track,
        started=started,
        seconds=round(seconds, 2),
    )
    texts, others = intake.texts()
    said = {"transcript": list(request.transcript)} if request.transcript else {}
    return Bundle(cell=cell, files=texts, binary_files=others, raw=verdict.raw | said)


def versions() -> dict[str, str]:
    """What a verdict was reached with."""
    return {
        "trapline": trapline.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
