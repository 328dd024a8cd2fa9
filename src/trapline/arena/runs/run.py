"""Grades a whole field into a store: resumes, shares the work with other graders, loses nothing."""

import hashlib
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trapline.arena.certify import controls
from trapline.arena.certify.certify import Certifier
from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import ArenaError, InterruptedRunError
from trapline.arena.judge.intake import take_in
from trapline.arena.record import Cell, Level
from trapline.arena.runs.executor import Executor, Here, choose_level, run_all
from trapline.arena.runs.field import Entry
from trapline.arena.runs.grade_request import Shipment, measures_time
from trapline.arena.runs.store import Key, Store

__all__ = ["Options", "choose_level", "examine_rig", "grade_field", "open_run"]

#: Called with a cell's key and what is being done to it.
OnStep = Callable[[Entry, str], None]
#: Between two looks at cells that another grader has.
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    """How a field is graded."""

    level: Level
    full: bool = False
    workers: int | None = None


def grade_field(
    entries: list[Entry],
    store: Store,
    options: Options,
    on_step: OnStep = lambda entry, step: None,
    executor: Executor | None = None,
) -> Iterator[Cell]:
    """Yields each cell as it is saved. Cells that are up to date are not graded again; cells that
    another grader has are waited for, and taken over when it dies."""
    seed = int(store.agree("seed", secrets.randbits(32)))
    known = {cell.key: cell for cell in store.cells()}
    outdated = [e for e in entries if not _is_done(e, known.get(_key(e)), store, options)]
    store.plan(_key(entry) for entry in outdated)
    with store.grading(), closing(executor or Here(options.workers)) as place:
        if place.is_here:
            _check_rig({entry.challenge for entry in outdated}, store, options)
        jobs = sorted(outdated, key=lambda entry: -_patience(entry))
        yield from _grade_rounds(jobs, _Grader(store, options, seed, on_step, place))


def _grade_rounds(jobs: list[Entry], work: "_Grader") -> Iterator[Cell]:
    while jobs:
        refused = []
        for entry, cell in run_all(work, jobs, min(work.executor.width, len(jobs))):
            if cell is not None:
                yield cell
            else:
                refused.append(entry)
        jobs = [entry for entry in refused if work.store.is_planned(_key(entry))]
        for entry in jobs[:1]:
            work.on_step(entry, "waiting for another grader")
            _wait_a_while()


def _wait_a_while() -> None:
    try:
        time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted") from None


class _Grader:
    """Grades one entry, unless another grader is at it."""

    def __init__(
        self, store: Store, options: Options, seed: int, on_step: OnStep, executor: Executor
    ) -> None:
        self.store, self.options, self.seed = store, options, seed
        self.on_step, self.executor = on_step, executor

    def __call__(self, entry: Entry) -> Cell | None:
        challenge = load(entry.challenge)
        with self.executor.seat(alone=measures_time(challenge)) as seat:
            if not self._claim(entry):
                return None
            shipment = Shipment(
                entry,
                challenge.package,
                challenge.digest,
                self.options.level,
                self.seed,
                self.options.full,
                take_in(entry.folder),
            )
            bundle = seat.grade(shipment, challenge, lambda step: self.on_step(entry, step))
        return self.store.save(bundle)

    def _claim(self, entry: Entry) -> bool:
        """Looks again once nobody else can be at it: it may have been graded since we planned."""
        key = _key(entry)
        if not self.store.claim(key):
            return False
        if _is_done(entry, self.store.newest(key), self.store, self.options):
            self.store.withdraw(key)
            return False
        return True


def _key(entry: Entry) -> Key:
    return entry.entrant, entry.challenge, "cpu", entry.attempt


def _patience(entry: Entry) -> float:
    """Long cells first, so that nobody waits for one at the end."""
    return load(entry.challenge).plan.limits.call_seconds


def _is_done(entry: Entry, cell: Cell | None, store: Store, options: Options) -> bool:
    """Graded before, by the same challenge, on the same bytes, and the evidence is whole."""
    return (
        cell is not None
        and cell.state not in ("infra_error", "not_run")
        and cell.full == options.full
        and cell.challenge_digest == load(entry.challenge).digest
        and cell.submission_digest == take_in(entry.folder).digest
        and store.has_bundle(cell.bundle)
    )


def _check_rig(challenges: set[str], store: Store, options: Options) -> None:
    """A machine on which a right answer fails, or a worthless one passes, does not grade."""
    name = f"rig {this_machine()}"
    for challenge in map(load, sorted(challenges)):
        checked: dict[str, str] = store.meta().get(name, {})
        fact = f"{challenge.digest} {options.level}"
        if checked.get(challenge.id) != fact:
            examine_rig(challenge, options.level)
            store.set_meta(**{name: {**checked, challenge.id: fact}})


def this_machine() -> str:
    """Tells the machines that share a store apart without naming them."""
    path = Path("/etc/machine-id")
    known = path.read_text() if path.is_file() else ""
    return hashlib.sha256(f"{platform.node()} {known}".encode()).hexdigest()[:12]


def examine_rig(challenge: Challenge, level: Level) -> None:
    """The gold solution holds every case here, and zeros do not."""
    certifier = Certifier(challenge, level)
    for finding in (certifier.right_on_cases(), certifier.control(controls.NAMES[0])):
        if finding.problem:
            raise ArenaError(
                f"this machine cannot grade {challenge.id}: {finding.problem} "
                f"({finding.subject}: {finding.fell_to} {finding.message})"
            )


@contextmanager
def open_run(place: Path | str) -> Iterator[Store]:
    """A run that is closed again."""
    store = Store(place)
    try:
        yield store
    finally:
        store.close()
