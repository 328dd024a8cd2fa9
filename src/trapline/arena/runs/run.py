"""Grades a whole field into a store: resumes, and shares the work with other graders."""

import hashlib
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trapline.arena.certify import controls
from trapline.arena.certify.certify import Certifier, Subject
from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import ArenaError, InterruptedRunError, UsageError
from trapline.arena.gpu import yardsticks
from trapline.arena.gpu.opening import machine_facts, shared_rig, why_not_gradable
from trapline.arena.judge.draws import DrawKey, draw_key, is_held_out
from trapline.arena.judge.own_tests import why_no_tests
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.session import SandboxConfig
from trapline.arena.record import Cell, CellKey, Level, Track
from trapline.arena.runs.executor import Executor, LocalExecutor, choose_level, run_all
from trapline.arena.runs.store import Store

__all__ = [
    "Options",
    "check_machine",
    "choose_level",
    "grade_field",
    "open_run",
    "refuse_other_machines",
]

#: Called with a request and the step that its grading has reached.
OnStep = Callable[[GradeRequest, str], None]
ZEROS = controls.NAMES[0]
#: What a run keeps of them: its cells are of one GPU, driver, torch and Triton.
YARDSTICKS = "yardsticks"
#: Between two looks at cells that another grader has claimed.
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    level: Level
    full: bool = False
    workers: int | None = None
    #: Grades cells again that were graded at another level.
    only_this_level: bool = False
    #: Draws the situations from the half of the seeds that nothing else draws from.
    held_out: bool = False
    #: Of every cell; each answer's own, drawn for its bytes, if None.
    seed: int | None = None
    #: All answers to a challenge meet the same situations, drawn for the bytes of all of them.
    same_draws: bool = False


def grade_field(
    entries: list[GradeRequest],
    store: Store,
    options: Options,
    on_step: OnStep = lambda entry, step: None,
    executor: Executor | None = None,
) -> Iterator[Cell]:
    """Yields each cell as it is saved. Skips cells that are up to date; waits for cells that
    another grader has claimed, and takes them over when that grader dies."""
    seed, key = _agreed_seed(store, options), draw_key()
    if options.same_draws:  # the first cell tells the seed, so all answers are fixed before it
        entries = [replace(entry, intake=entry.read()) for entry in entries]
    if key.not_kept and seed is None:
        store.set_meta(draw_key=f"of one process, not kept: {key.not_kept}")
    known = {cell.key: cell for cell in store.cells()}
    outdated = [e for e in entries if not _is_done(e, known.get(e.key), store, options)]
    _withdraw({entry.key for entry in entries} - {entry.key for entry in outdated}, store)
    store.plan(entry.key for entry in outdated)
    with store.grading(), closing(executor or LocalExecutor(options.workers)) as place:
        together = _digests_together(entries) if options.same_draws else {}
        work = _Grader(store, options, seed, partial(_drawn, key, together), on_step, place)
        jobs = _longest_first(outdated)
        if isinstance(place, LocalExecutor):
            judged = {_judge(job).digest: job for job in jobs}
            yardsticks.recall(store.meta().get(YARDSTICKS, {}))
            for entry, cell in run_all(work, filter(_is_gold, jobs), place.width):
                if cell is not None:  # else another grader has claimed it
                    yield cell
                    jobs = [job for job in jobs if job is not entry]
            _check_once(list(judged.values()), options.level, store, place, work.examined)
        yield from _grade_rounds(jobs, work)


def _is_gold(entry: GradeRequest) -> bool:
    """Whether this cell shows what `check_machine` asks of the gold solution."""
    challenge = _judge(entry)
    return entry.track == "cpu" and not challenge.not_run and entry.folder == challenge.solution


def _digests_together(entries: list[GradeRequest]) -> dict[str, str]:
    """Challenge → a digest of all answers to it."""
    answers: dict[str, set[str]] = {}
    for entry in entries:
        answers.setdefault(_judge(entry).full_id, set()).add(entry.read().digest)
    return {
        name: "all " + hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
        for name, digests in answers.items()
    }


def _drawn(
    key: DrawKey, together: Mapping[str, str], challenge: Challenge, digest: str, held_out: bool
) -> int:
    """The seed of an answer with this digest."""
    return key.seed(challenge, together.get(challenge.full_id, digest), held_out=held_out)


def _withdraw(done: set[CellKey], store: Store) -> None:
    """Takes cells off the plan that a dead grader left there and that are up to date: their bytes
    were changed, and then changed back."""
    for key, state in store.waiting().items():
        if state == "waiting" and key in done:
            store.withdraw(key)


def _longest_first(entries: list[GradeRequest]) -> list[GradeRequest]:
    """So that no work ends with a long one that nothing runs beside: those with the most time for
    a call come first, then those with the most traps."""

    def length(entry: GradeRequest) -> tuple[float, int]:
        challenge = _judge(entry)
        return challenge.plan.limits.call_seconds, len(challenge.traps)

    return sorted(entries, key=length, reverse=True)


def _judge(entry: GradeRequest) -> Challenge:
    return load(entry.challenge, entry.track, entry.profile, entry.trap_set)


def _agreed_seed(store: Store, options: Options) -> int | None:
    """The one seed of this run, or None where each answer has its own, of the half asked for."""
    asked = "held-out" if options.held_out else "public"
    agreed = store.agree("seed", asked if options.seed is None else options.seed)
    seed = None if agreed in ("public", "held-out") else int(agreed)
    held_out = agreed == "held-out" if seed is None else is_held_out(seed)
    if held_out != options.held_out:
        theirs, fix = (
            ("held-out", "add --held-out")
            if held_out
            else ("public", "leave out --held-out and --traps")
        )
        raise UsageError(
            f"{store.where} is graded on {theirs} situations: {fix}, or choose another --out"
        )
    if options.seed not in (None, seed):
        theirs = "a seed for each answer" if seed is None else f"seed {seed}"
        raise UsageError(
            f"{store.where} is graded with {theirs}: leave out --seed, or choose another --out"
        )
    if seed is None:
        _refuse_other_draws(store, options)
    return seed


def _refuse_other_draws(store: Store, options: Options) -> None:
    """In one run all answers to a challenge meet the same situations, or each its own."""
    together = store.agree("same_draws", options.same_draws)
    if together != options.same_draws:
        theirs, fix = ("with", "add") if together else ("without", "leave out")
        raise UsageError(
            f"{store.where} is graded {theirs} --same-draws: {fix} --same-draws, "
            "or choose another --out"
        )


def refuse_other_machines(store: Store, track: Track) -> None:
    """A run holds cells of one track, and on the GPU track of one GPU, which can be compared."""
    here = machine_facts() if track == "gpu" else {}
    for cell in store.cells():
        if cell.track != track:
            raise UsageError(
                f"{store.where} holds cells of the {cell.track} track; choose another --out"
            )
        theirs = {name: cell.versions.get(name) for name in here}
        if cell.score is not None and here and theirs != here:
            raise UsageError(
                f"{store.where} was graded on {_in_words(theirs)}, and this machine has "
                f"{_in_words(here)}; choose another --out"
            )


def _in_words(facts: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value or 'unknown'}" for name, value in facts.items())


def _check_once(
    entries: list[GradeRequest],
    level: Level,
    store: Store,
    place: LocalExecutor,
    examined: Collection[str],
) -> None:
    """Checks this machine once for each challenge, and notes in the store that it can grade it.

    On a GPU this measures as well what all cells' times are compared with. `examined`: challenges
    that this run has examined already.
    """
    machine = f"machine {this_machine()}"
    checked: dict[str, str] = store.meta().get(machine, {})
    due: dict[str, tuple[str, Callable[[], None]]] = {}
    for entry in entries:
        challenge = _judge(entry)
        if challenge.not_run or (challenge.track == "gpu" and why_not_gradable()):
            continue
        name = challenge.full_id if challenge.track == "cpu" else f"{challenge.full_id} gpu"
        fact = f"{challenge.digest} {level}"
        if checked.get(name) != fact:
            check = partial(place.run, examine, entry, level)
            due[name] = fact, (lambda: None) if name in examined else check
            if challenge.track == "gpu":
                lights = partial(place.run, measure_lights, entry, level)
                due = {"lights": (level, lights), **due}
    for name, _ in run_all(lambda name: due[name][1](), due, place.width):
        checked = {**checked, name: due[name][0]}
        store.set_meta(**{machine: checked, YARDSTICKS: yardsticks.known()})


def examine(entry: GradeRequest, level: Level, gold_is_right: bool = False) -> None:
    """Refuses a machine, or private traps, that cannot grade this challenge."""
    challenge = _judge(entry)
    config = challenge.sandbox_config(level)
    check = partial(check_machine, challenge, level, gold_is_right=gold_is_right)
    if _is_timed_here(challenge, config):
        yardsticks.of_challenge(challenge, config, shared_rig(config.device), check)
    else:
        check()
    refuse_bad_traps(challenge, level)


def measure_lights(entry: GradeRequest, level: Level) -> None:
    config = _judge(entry).sandbox_config(level)
    if _is_timed_here(_judge(entry), config):
        yardsticks.lights(config, shared_rig(config.device))
        yardsticks.runner_bytes(config, shared_rig(config.device))


def _is_timed_here(challenge: Challenge, config: SandboxConfig) -> bool:
    return (
        challenge.track == "gpu" and config.device == "cuda" and "speed" in challenge.plan.weights
    )


def _grade_rounds(jobs: list[GradeRequest], work: "_Grader") -> Iterator[Cell]:
    while jobs:
        claimed = []
        for entry, cell in run_all(work, jobs, min(work.executor.width, len(jobs))):
            if cell is not None:
                yield cell
            else:
                claimed.append(entry)
        jobs = [entry for entry in claimed if work.store.is_planned(entry.key)]
        if jobs:
            work.on_step(jobs[0], "waiting for another grader")
            try:
                time.sleep(LOOK_SECONDS)
            except KeyboardInterrupt:
                raise InterruptedRunError from None


class _Grader:
    """Grades one entry, unless another grader has claimed it."""

    def __init__(
        self,
        store: Store,
        options: Options,
        seed: int | None,
        draw: Callable[[Challenge, str, bool], int],
        on_step: OnStep,
        executor: Executor,
    ) -> None:
        self.store, self.options, self.seed, self.draw = store, options, seed, draw
        self.on_step, self.executor = on_step, executor
        #: Challenges that this machine was found able to grade.
        self.examined: set[str] = set()

    def __call__(self, entry: GradeRequest) -> Cell | None:
        challenge = _judge(entry)
        with self.executor.slot(alone=challenge.measures_time) as slot:
            if not self._claim(entry):
                return None
            intake, seed = entry.read(), self.seed
            if seed is None:
                seed = self.draw(challenge, intake.digest, self.options.held_out)
            request = replace(
                entry,
                level=self.options.level,
                seed=seed,
                full=self.options.full,
                shares_seed=self.options.same_draws or self.seed is not None,
                intake=intake,
            )
            bundle = slot.grade(request, challenge, lambda step: self.on_step(entry, step))
        if _is_gold(entry) and isinstance(self.executor, LocalExecutor):
            # Before it is kept: what is wrong with it may be wrong with this machine.
            examine(entry, self.options.level, _is_right(bundle.cell, self.options.level))
            self.examined.add(challenge.full_id)
        return self.store.save(bundle)

    def _claim(self, entry: GradeRequest) -> bool:
        """Checks again after the claim: the cell may have been graded since it was planned."""
        if not self.store.claim(entry.key):
            return False
        if _is_done(entry, self.store.newest(entry.key), self.store, self.options):
            self.store.withdraw(entry.key)
            return False
        return True


def _is_right(gold: Cell, level: Level) -> bool:
    """Whether the gold solution holds the contract and passes its own tests, if tests can run."""
    if gold.state != "pass" or any(case.state != "pass" for case in gold.cases):
        return False
    tests = gold.dimensions["tests"].score
    return bool(tests) if tests is not None else bool(why_no_tests(level))


def _is_done(entry: GradeRequest, cell: Cell | None, store: Store, options: Options) -> bool:
    """Graded before, by the same challenge, on the same bytes, and the evidence is whole."""
    return (
        cell is not None
        and cell.state not in ("infra_error", "not_run")
        and cell.profile == entry.profile
        and cell.full == options.full
        and (cell.isolation == options.level or not options.only_this_level)
        and cell.challenge_digest == _judge(entry).digest
        and cell.submission_digest == entry.read().digest
        and cell.origin == entry.origin
        and store.has_bundle(cell.bundle)
    )


def this_machine() -> str:
    """Distinguishes the machines that share a store without naming them."""
    path = Path("/etc/machine-id")
    known = path.read_text(encoding="utf-8") if path.is_file() else ""
    return hashlib.sha256(f"{platform.node()} {known}".encode()).hexdigest()[:12]


def check_machine(challenge: Challenge, level: Level, *, gold_is_right: bool = False) -> None:
    """Refuses a machine on which the gold solution fails a case or its own tests, or zeros pass.
    `gold_is_right`: a grade has shown the former."""
    certifier = Certifier(challenge, level)
    tried: list[Subject] = [] if gold_is_right else [certifier.right_on_cases]
    if "tests" in challenge.plan.weights and not gold_is_right:
        tried.append(certifier.own_tests)
    tried.append(partial(certifier.control, ZEROS))
    for finding in (one() for one in tried):
        if finding.problem:
            raise ArenaError(
                f"this machine cannot grade {challenge.id}: {finding.problem} "
                f"({finding.subject}: {finding.fell_to} {finding.message})"
            )


def refuse_bad_traps(challenge: Challenge, level: Level) -> None:
    """A `UsageError` unless the private traps pass right answers and kill their mutants."""
    if not challenge.private_traps:
        return
    try:
        for finding in Certifier(challenge, level).private_traps():
            if finding.problem:
                failed = f" ({finding.fell_to}: {finding.message})" if finding.fell_to else ""
                raise UsageError(
                    f"the trap set {challenge.trap_set} cannot grade {challenge.id}: "
                    f"{finding.subject}: {finding.problem}{failed}"
                )
    except UsageError:
        raise
    except ArenaError as error:
        raise UsageError(
            f"the trap set {challenge.trap_set} cannot grade {challenge.id}: {error}"
        ) from None


@contextmanager
def open_run(place: Path | str) -> Iterator[Store]:
    store = Store(place)
    try:
        yield store
    finally:
        store.close()
