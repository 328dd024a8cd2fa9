"""The effect of the harness: size, files, tests, verbosity and grades by harness."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from trapline.arena.record import Bundle, Cell, Record
from trapline.arena.standings.anatomy import anatomy
from trapline.arena.standings.board import mean, measured
from trapline.arena.standings.ranking import smallest_visible


class HarnessRow(Record):
    """All measured cells of one harness; means over cells, None without submissions."""

    harness: str
    cells: int
    models: list[str]
    mean_score: float
    pass_share: float
    letters: dict[str, int]
    files: float | None
    lines: float | None
    tests: float | None
    comment_share: float | None
    prose_words: float | None


class HarnessPair(Record):
    a: str
    b: str
    #: Pairs of (model, challenge) that both harnesses have.
    shared: int
    #: Mean score in a minus that in b.
    difference: float
    smallest_visible: float | None


class HarnessEffect(Record):
    rows: list[HarnessRow]
    pairs: list[HarnessPair]


def harness_effect(
    cells: Iterable[Cell], bundles: Mapping[str, Bundle] | None = None
) -> HarnessEffect:
    """By harness, from the cells and, for the anatomy, from the bundles by digest."""
    counted = measured(cells)
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in counted:
        groups[cell.harness].append(cell)
    return HarnessEffect(
        rows=[_row(name, groups[name], bundles or {}) for name in sorted(groups)],
        pairs=_pairs(counted),
    )


def _row(harness: str, cells: Sequence[Cell], bundles: Mapping[str, Bundle]) -> HarnessRow:
    bodies = [anatomy(bundles[cell.bundle].files) for cell in cells if cell.bundle in bundles]

    def average(name: str) -> float | None:
        return mean([float(getattr(body, name)) for body in bodies]) if bodies else None

    return HarnessRow(
        harness=harness,
        cells=len(cells),
        models=sorted({_model(cell) for cell in cells}),
        mean_score=mean([cell.score for cell in cells if cell.score is not None]),
        pass_share=mean([float(cell.state == "pass") for cell in cells]),
        letters=dict(sorted(Counter(cell.letter or "" for cell in cells).items())),
        files=average("files"),
        lines=average("lines"),
        tests=average("tests"),
        comment_share=average("comment_share"),
        prose_words=average("prose_words"),
    )


def _model(cell: Cell) -> str:
    """The model, or the entrant if no model is named."""
    return cell.model or cell.entrant


def _pairs(cells: Sequence[Cell]) -> list[HarnessPair]:
    scores: dict[str, dict[tuple[str, str, str], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for cell in cells:
        key = _model(cell), cell.challenge, cell.track
        scores[cell.harness][key].append(cell.score or 0.0)
    found = []
    for a, b in combinations(sorted(scores), 2):
        shared = sorted(scores[a].keys() & scores[b].keys())
        if shared:
            ahead = np.array([mean(scores[a][key]) - mean(scores[b][key]) for key in shared])
            found.append(
                HarnessPair(
                    a=a,
                    b=b,
                    shared=len(shared),
                    difference=float(ahead.mean()),
                    smallest_visible=smallest_visible(ahead),
                )
            )
    return found
