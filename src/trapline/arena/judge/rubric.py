"""From dimensions to a score and a letter: the one table that every report prints."""

from collections.abc import Mapping, Sequence

from trapline.arena.record import Dimension, Finding, FindingDimension, State

LETTERS: tuple[tuple[str, float], ...] = (
    ("A+", 97),
    ("A", 93),
    ("A-", 90),
    ("B+", 87),
    ("B", 83),
    ("B-", 80),
    ("C+", 77),
    ("C", 73),
    ("C-", 70),
    ("D", 60),
    ("F", 0),
)
FAIL_CAP = 69.0
CRITICAL_CAP = 86.0
#: Points that one finding costs in its dimension.
PENALTY = {"critical": 50.0, "major": 25.0, "minor": 10.0}
#: A constructed bug, which was seen nowhere, costs this share; all of them together at most this.
CONSTRUCTED_SHARE = 0.4
CONSTRUCTED_MOST = 20.0
UNGRADED: tuple[State, ...] = ("infra_error", "not_run")


def letter(score: float) -> str:
    """The letter of a score, by its rounded tenth: 96.96 prints as 97.0 and is an A+."""
    rounded = round(score, 1)
    return next(name for name, least in LETTERS if rounded >= least)


def penalised(findings: Sequence[Finding], dimension: FindingDimension) -> float:
    """100 points less the penalties of this dimension's findings."""
    return max(0.0, 100.0 - sum(f.penalty for f in findings if f.dimension == dimension))


def score(
    state: State,
    dimensions: Mapping[str, Dimension],
    weights: Mapping[str, float],
    *,
    critical: bool,
) -> float | None:
    """The weighted mean of what was measured, capped; None where nothing can be said.

    What was not measured leaves its weight to the rest, but never to the judged `analysis`: that
    moves a score by its own weight and no more.
    """
    if state in UNGRADED:
        return None
    if state in ("hack", "no_answer"):
        return 0.0
    measured = {
        name: (dimension.score, weights.get(name, 0.0))
        for name, dimension in dimensions.items()
        if dimension.score is not None
    }
    judged, share = measured.pop("analysis", (0.0, 0.0))
    total = sum(weight for _, weight in measured.values())
    mean = sum(value * weight for value, weight in measured.values()) / total if total else 0.0
    mean = (1.0 - share) * mean + share * judged
    return round(min(mean, cap(state, critical=critical)), 1)


def cap(state: State, *, critical: bool) -> float:
    """The highest score of a cell in this state, with a critical finding or without."""
    return min(FAIL_CAP if state == "fail" else 100.0, CRITICAL_CAP if critical else 100.0)
