"""One answer graded outside a run, for Harbor's verifier and Inspect's scorer."""

import math
import secrets
from functools import cache
from pathlib import Path

from trapline.arena.challenge import Challenge, load
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.record import DIMENSIONS, Bundle, Cell, Level
from trapline.arena.runs.run import check_machine, choose_level


def grade_folder(challenge: Challenge, folder: Path, entrant: str, *, full: bool = False) -> Bundle:
    """As `trapline grade` does: only on a machine that passes its check, on secret inputs."""
    level = choose_level()
    _examine_once(challenge.id, level)
    seed = secrets.randbits(32)
    request = GradeRequest(entrant, challenge.id, 1, folder, level=level, seed=seed, full=full)
    return grade(request, challenge)


@cache
def _examine_once(challenge_id: str, level: Level) -> None:
    check_machine(load(challenge_id), level)


def dimension_scores(cell: Cell) -> dict[str, float]:
    return {
        name: score
        for name in DIMENSIONS
        if name in cell.dimensions and (score := cell.dimensions[name].score) is not None
    }


def trap_states(cell: Cell) -> dict[str, str]:
    return {trap.id: trap.state for trap in cell.traps}


def score_values(cell: Cell) -> dict[str, float]:
    """The same names for every cell, so that means exist; NaN is Inspect's "not scored"."""
    measured = dimension_scores(cell)
    return {
        "grade": math.nan if cell.score is None else cell.score,
        **{name: measured.get(name, math.nan) for name in DIMENSIONS},
    }
