"""The sentence that begins every report: what the data support and what they do not."""

from collections.abc import Sequence

#: With fewer challenges, resampling them underestimates the uncertainty.
_FEW = 5
_NAMED = 4


def conclude(
    could_lead: Sequence[str],
    first: str,
    entrants: int,
    challenges: int,
    islands: Sequence[Sequence[str]],
    smallest_visible: float | None,
) -> str:
    """One sentence, or two if the field itself limits the conclusion.

    `first` is empty if several share the highest strength; `smallest_visible` is None if naming it
    would say nothing about this field.
    """
    if entrants == 0:
        return "Nothing was measured, so nothing can be concluded."
    if entrants == 1:
        return f"Only {first} was measured; there is no other entrant to compare it with."
    if len(islands) > 1:
        return (
            f"No challenge connects {names(islands[0])} with {names(islands[1])}: "
            "places across these groups cannot be compared."
        )
    sentence = _leading(could_lead, first, entrants, challenges) + _limit(smallest_visible)
    if challenges < _FEW:
        sentence += (
            f" A ranking over {_count(challenges).lower()} is not reliable: "
            "the true intervals are wider."
        )
    return sentence


def _leading(could_lead: Sequence[str], first: str, entrants: int, challenges: int) -> str:
    if not could_lead:
        return (
            f"No entrant stands out: over {_count(challenges).lower()}, none of {entrants} is "
            "first in 2.5 % of the resampled fields"
            + (f", although {first} has the highest strength" if first else "")
        )
    if len(could_lead) == 1:
        return (
            f"{could_lead[0]} is first of {entrants}: no other is first in more than 2.5 % of the "
            f"fields resampled over {_count(challenges).lower()}"
        )
    return (
        f"{names(could_lead)} cannot be distinguished at the top of {entrants}: over "
        f"{_count(challenges).lower()}, each of them could be first"
        + (f", although {first} has the highest strength" if first in could_lead else "")
    )


def _limit(smallest_visible: float | None) -> str:
    if smallest_visible is None:
        return "."
    return f"; mean differences under {smallest_visible:.1f} points cannot be told from chance."


def _count(challenges: int) -> str:
    return "One challenge" if challenges == 1 else f"{challenges} challenges"


def names(listed: Sequence[str]) -> str:
    """a, b and c; of more than five, four names and how many others there are."""
    shown = list(listed)
    if len(listed) > _NAMED + 1:
        shown = [*listed[:_NAMED], f"{len(listed) - _NAMED} others"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
