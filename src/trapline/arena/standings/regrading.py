"""The noise of grading: how much the score of the same answer differs when it is graded again."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trapline.arena.record import Cell, Record

#: Standard deviation of a score that a measured time moves, in points: four gradings of all 42
#: cells of the example field gave 0.28 at most (docs/lab/noise.md). Few grades may show less.
TIMED = 0.3


class Noise(Record):
    """Standard deviations of regrading, pooled over the cells that were graded again."""

    #: Over all challenges; None where no cell was graded twice under the same conditions.
    overall: float | None
    #: By challenge, where at least one of its cells was.
    by_challenge: dict[str, float]
    #: Cells that were graded again.
    cells: int

    def of(self, cell: Cell) -> float:
        """The standard deviation of a cell's score; without a measured time, 0 unless a second
        grade showed more."""
        known = self.by_challenge.get(cell.challenge, self.overall or 0.0)
        return max(known, TIMED) if _is_timed(cell) else known


SILENT = Noise(overall=None, by_challenge={}, cells=0)


def _is_timed(cell: Cell) -> bool:
    """Its speed counts and is neither too good nor too bad to move."""
    speed = cell.dimensions.get("speed")
    return speed is not None and speed.score is not None and 0.0 < speed.score < 100.0


def noise(history: Iterable[Cell]) -> Noise:
    """From all grades of a run: same answer, challenge, versions and conditions."""
    groups: dict[tuple[object, ...], list[float]] = defaultdict(list)
    challenge_of: dict[tuple[object, ...], str] = {}
    for cell in history:
        if cell.score is not None:
            digests = (cell.submission_digest, cell.challenge_digest)
            conditions = (cell.isolation, cell.full, *sorted(cell.versions.items()))
            key: tuple[object, ...] = (*cell.key, *digests, *conditions)
            groups[key].append(cell.score)
            challenge_of[key] = cell.challenge
    again = {key: scores for key, scores in groups.items() if len(scores) > 1}
    by_challenge: dict[str, list[Sequence[float]]] = defaultdict(list)
    for key, scores in again.items():
        by_challenge[challenge_of[key]].append(scores)
    return Noise(
        overall=pooled(list(again.values())) if again else None,
        by_challenge={name: pooled(scores) for name, scores in sorted(by_challenge.items())},
        cells=len(again),
    )


def pooled(groups: Sequence[Sequence[float]]) -> float:
    squares = sum(float(np.sum((np.array(scores) - np.mean(scores)) ** 2)) for scores in groups)
    return float(np.sqrt(squares / sum(len(scores) - 1 for scores in groups)))


def shares(attempts: Mapping[str, Sequence[bool]], k: int) -> float | None:
    """The mean of pass@k over challenges with at least k attempts; None where there is none."""
    known = [pass_at(k, passed) for passed in attempts.values() if len(passed) >= k]
    return float(np.mean(known)) if known else None


def pass_at(k: int, passed: Sequence[bool]) -> float:
    """The chance that one of k attempts, drawn without replacement, passes."""
    n, failed = len(passed), len(passed) - sum(passed)
    none_passes = 1.0
    for drawn in range(k):
        none_passes *= max(0, failed - drawn) / (n - drawn)
    return 1.0 - none_passes
