"""An entrant's scores by growing difficulty, or from one stage to the next."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from trapline.arena.judge.rubric import letter
from trapline.arena.record import Cell, Record
from trapline.arena.standings.board import entrants_of, mean, measured

Trend = Literal["rising", "flat", "falling", "unknown"]
#: A trend needs this many points per stage; less is flat.
TREND_FROM = 2.0
DIFFICULTIES = ("medium", "hard", "extra hard", "research")


class Stage(Record):
    """One step along the axis, and the mean of what an entrant scored there."""

    name: str
    score: float | None
    letter: str | None
    cells: int


class Trajectory(Record):
    entrant: str
    stages: list[Stage]
    #: Points gained from one stage to the next, by least squares over the stages that have a score.
    slope: float | None
    trend: Trend
    #: Whether no stage scores a point or more below the one before.
    never_declines: bool | None


def by_difficulty(cells: Iterable[Cell], difficulty: Mapping[str, str]) -> list[Trajectory]:
    """Over medium, hard, extra hard, research; `difficulty` by challenge."""
    known = set(difficulty.values())
    order = [name for name in DIFFICULTIES if name in known]
    order += sorted(known.difference(DIFFICULTIES))
    return over_stages(
        cells, [(name, [c for c, d in difficulty.items() if d == name]) for name in order]
    )


def over_stages(
    cells: Iterable[Cell], stages: Sequence[tuple[str, Sequence[str]]]
) -> list[Trajectory]:
    """Over any grouping of challenges: the name of each stage and its challenges."""
    counted = measured(cells)
    return [
        _trajectory(
            name,
            [
                (stage, [c for c in counted if c.entrant == name and c.challenge in challenges])
                for stage, challenges in stages
            ],
        )
        for name in entrants_of(counted)
    ]


def _trajectory(entrant: str, stages: Sequence[tuple[str, Sequence[Cell]]]) -> Trajectory:
    found = [_stage(name, cells) for name, cells in stages]
    points = [(place, s.score) for place, s in enumerate(found) if s.score is not None]
    slope = _slope(points)
    values = [score for _, score in points]
    return Trajectory(
        entrant=entrant,
        stages=found,
        slope=slope,
        trend=_trend(slope),
        never_declines=None if slope is None else bool(np.all(np.diff(values) > -1.0)),
    )


def _stage(name: str, cells: Sequence[Cell]) -> Stage:
    scores = [cell.score for cell in cells if cell.score is not None]
    value = mean(scores) if scores else None
    return Stage(
        name=name,
        score=value,
        letter=None if value is None else letter(value),
        cells=len(scores),
    )


def _slope(points: Sequence[tuple[int, float]]) -> float | None:
    if len(points) < 2:
        return None
    x, y = np.array(points, dtype=np.float64).T
    x -= x.mean()
    return float(x @ (y - y.mean()) / (x @ x))


def _trend(slope: float | None) -> Trend:
    if slope is None:
        return "unknown"
    if abs(slope) < TREND_FROM:
        return "flat"
    return "rising" if slope > 0 else "falling"
