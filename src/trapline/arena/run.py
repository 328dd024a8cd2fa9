"""Grades a whole field into a store: resumes, shares the work with other graders, loses nothing."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trapline.arena import controls
from trapline.arena.certify import Certifier
from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import ArenaError, MissingError
from trapline.arena.executor import cores, run_all
from trapline.arena.field import Entry
from trapline.arena.grade import Job, grade_intake
from trapline.arena.intake import take_in
from trapline.arena.record import LEVELS, Cell, Level
from trapline.arena.sandbox import probe
from trapline.arena.store import Store

#: Called with a cell's key and what is being done to it.
OnStep = Callable[[Entry, str], None]


@dataclass(frozen=True)
class Options:
    """How a field is graded."""

    level: Level
    full: bool = False
    workers: int | None = None


def choose_level(required: str | None = None) -> Level:
    """The strongest level this machine offers, refused when it is weaker than required."""
    best = probe()[0]
    if required is not None and LEVELS.index(best) < LEVELS.index(required):
        raise MissingError(f"this machine offers isolation {best!r}, {required!r} was required")
    return best


def grade_field(
    entries: list[Entry], store: Store, options: Options, on_step: OnStep = lambda entry, step: None
) -> Iterator[Cell]:
    """Yields each cell as it is saved. Cells that are up to date are not graded again."""
    seed = _seed(store)
    outdated = [entry for entry in entries if not _is_done(entry, store, options)]
    store.plan(_key(entry) for entry in outdated)
    with store.grading():
        _check_rig({entry.challenge for entry in outdated}, store, options)
        jobs = sorted(outdated, key=lambda entry: -_patience(entry))
        work = _Grader(store, options, seed, on_step)
        for _, cell in run_all(work, jobs, options.workers or cores()):
            if cell is not None:
                yield cell


class _Grader:
    """Grades one entry, unless another grader is at it."""

    def __init__(self, store: Store, options: Options, seed: int, on_step: OnStep) -> None:
        self.store, self.options, self.seed, self.on_step = store, options, seed, on_step

    def __call__(self, entry: Entry) -> Cell | None:
        if not self.store.claim(_key(entry)):
            return None
        job = Job(entry, load(entry.challenge), self.options.level, self.seed, self.options.full)
        bundle = grade_intake(job, take_in(entry.folder), lambda step: self.on_step(entry, step))
        return self.store.save(bundle)


def _key(entry: Entry) -> tuple[str, str, str, int]:
    return entry.entrant, entry.challenge, "cpu", entry.attempt


def _patience(entry: Entry) -> float:
    """Long cells first, so that nobody waits for one at the end."""
    return load(entry.challenge).plan.limits.call_seconds


def _seed(store: Store) -> int:
    """Drawn once a run: every entrant faces the same inputs, and no two runs do."""
    meta = store.meta()
    if "seed" not in meta:
        store.set_meta(seed=secrets.randbits(32))
    return int(store.meta()["seed"])


def _is_done(entry: Entry, store: Store, options: Options) -> bool:
    """Graded before, by the same challenge, on the same bytes, and the evidence is whole."""
    for cell in store.cells():
        if cell.key == _key(entry):
            return (
                cell.state not in ("infra_error", "not_run")
                and cell.full == options.full
                and cell.challenge_digest == load(entry.challenge).digest
                and cell.submission_digest == take_in(entry.folder).digest
                and store.has_bundle(cell.bundle)
            )
    return False


def _check_rig(challenges: set[str], store: Store, options: Options) -> None:
    """A machine on which a right answer fails, or a worthless one passes, does not grade."""
    checked: dict[str, str] = store.meta().get("rig", {})
    for name in sorted(challenges):
        challenge = load(name)
        fact = f"{challenge.digest} {options.level}"
        if checked.get(name) != fact:
            examine_rig(challenge, options.level)
            store.set_meta(rig={**store.meta().get("rig", {}), name: fact})


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
def open_run(folder: Path) -> Iterator[Store]:
    """A run that is closed again."""
    store = Store(folder)
    try:
        yield store
    finally:
        store.close()
