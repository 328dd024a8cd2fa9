"""The word for a difference: the rule that every table uses.

Less than a point is a tie. Up to five points, about one step of the letters (A to A-), is narrow;
up to ten is moderate; ten points, a whole letter, or more is decisive.
"""

from typing import Literal

from trapline.arena.judge.rubric import LETTERS

Margin = Literal["tie", "narrow", "moderate", "decisive"]
#: Differences below this, in points, are ties: scores are rounded and measures have noise.
TIE_BAND = 1.0
NARROW_BELOW = 5.0
DECISIVE_FROM = 10.0
#: Scores have one decimal; beyond the sixth, their differences hold rounding errors only.
_DECIMALS = 6
_STEPS = {name: len(LETTERS) - 1 - place for place, (name, _) in enumerate(LETTERS)}
RULE = (
    f"under {TIE_BAND:g} point a tie, under {NARROW_BELOW:g} narrow, "
    f"under {DECISIVE_FROM:g} moderate, from {DECISIVE_FROM:g} decisive"
)


def margin(difference: float) -> Margin:
    """The word for a difference in points, of either sign."""
    size = round(abs(difference), _DECIMALS)
    if size < TIE_BAND:
        return "tie"
    if size < NARROW_BELOW:
        return "narrow"
    return "moderate" if size < DECISIVE_FROM else "decisive"


def steps(letter: str) -> int:
    """The letter's rank in the rubric; F is 0."""
    return _STEPS[letter]


def leaders(values: dict[str, float], band: float = TIE_BAND) -> list[str]:
    """Everyone within the tie band of the best, by name."""
    if not values:
        return []
    best = max(values.values())
    return sorted(name for name, value in values.items() if round(best - value, _DECIMALS) < band)


def lead(values: dict[str, float]) -> float:
    ordered = sorted(values.values(), reverse=True)
    return ordered[0] - ordered[1] if len(ordered) > 1 else 0.0
