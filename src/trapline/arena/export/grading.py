"""One answer graded outside a run, for whoever called us: Harbor's verifier, Inspect's scorer."""

import secrets
from functools import cache
from pathlib import Path

from trapline.arena.challenge import Challenge, load
from trapline.arena.judge.grade import Job, grade
from trapline.arena.record import DIMENSIONS, Bundle, Cell, Level
from trapline.arena.runs.field import Entry
from trapline.arena.runs.run import choose_level, examine_rig


def grade_folder(challenge: Challenge, folder: Path, entrant: str, *, full: bool = False) -> Bundle:
    """As `trapline grade` would: refused on a machine that cannot judge, inputs nobody knows."""
    level = choose_level()
    _examine_once(challenge.id, level)
    entry = Entry(entrant, challenge.id, 1, folder)
    return grade(Job(entry, challenge, level, secrets.randbits(32), full))


@cache
def _examine_once(challenge_id: str, level: Level) -> None:
    examine_rig(load(challenge_id), level)


def dimension_scores(cell: Cell) -> dict[str, float]:
    """The dimensions that were measured, in the order every report has them."""
    return {
        name: score
        for name in DIMENSIONS
        if name in cell.dimensions and (score := cell.dimensions[name].score) is not None
    }


def trap_states(cell: Cell) -> dict[str, str]:
    return {trap.id: trap.state for trap in cell.traps}
