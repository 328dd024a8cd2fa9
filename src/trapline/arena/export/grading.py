"""One answer graded outside a run, for Harbor's verifier, Inspect's scorer and environments."""

import math
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

from trapline.arena.challenge import Challenge, load
from trapline.arena.judge.draws import draw_key, public_seed
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.record import DIMENSIONS, Bundle, Cell, Level
from trapline.arena.runs.run import check_machine, choose_level

_examining = threading.Lock()


def grade_folder(
    challenge: Challenge,
    folder: Path,
    entrant: str,
    *,
    full: bool = False,
    checks_only: bool = False,
    seed: int | None = None,
) -> Bundle:
    """As `trapline grade` does: only on a machine that passes its check, on inputs drawn for these
    bytes with a secret key unless there is a `seed`."""
    level = choose_level()
    with _examining:  # the first caller examines the machine, the others wait for the result
        _examine_once(challenge.id, level)
        key = draw_key()
    request = GradeRequest(
        entrant, challenge.id, 1, folder, level=level, full=full, checks_only=checks_only
    )
    intake = request.read()
    drawn = key.seed(challenge, intake.digest) if seed is None else public_seed(seed)
    return grade(replace(request, intake=intake, seed=drawn), challenge)


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
