"""The sentence that every report begins with: what can and what cannot be concluded."""

from collections.abc import Sequence

#: With fewer challenges, resampling them sees too little of what could have been.
_FEW = 5
_NAMED = 4
_WHOLE_SCALE = 100.0


def conclude(
    could_lead: Sequence[str],
    first: str,
    entrants: int,
    challenges: int,
    islands: Sequence[Sequence[str]],
    smallest_visible: float | None,
) -> str:
    """One sentence, or two where the field itself limits what can be said."""
    if entrants == 0:
        return "Nothing was measured, so nothing can be concluded."
    if entrants == 1:
        return f"Only {first} was measured; there is nobody to compare it with."
    if len(islands) > 1:
        return _apart(islands)
    sentence = _leading(could_lead, first, entrants, challenges) + _limit(smallest_visible)
    if challenges < _FEW:
        sentence += (
            f" {_count(challenges)} cannot carry a ranking: read the intervals as too narrow."
        )
    return sentence


def _leading(could_lead: Sequence[str], first: str, entrants: int, challenges: int) -> str:
    if not could_lead:
        return (
            f"Nobody stands out: over {_count(challenges).lower()}, none of {entrants} is first in "
            f"2.5 % of the resampled fields, although {first} has the highest strength"
        )
    if len(could_lead) == 1:
        return (
            f"{could_lead[0]} is first of {entrants}, and 95 % of the resampled fields over "
            f"{_count(challenges).lower()} agree"
        )
    return (
        f"{names(could_lead)} cannot be told apart at the top of {entrants}: over "
        f"{_count(challenges).lower()}, each of them could be first"
        + (f", although {first} has the highest strength" if first in could_lead else "")
    )


def _limit(smallest_visible: float | None) -> str:
    if smallest_visible is None:
        return "."
    if smallest_visible >= _WHOLE_SCALE:
        return "; no mean difference at all could have been seen."
    return f"; a mean difference under {smallest_visible:.1f} points could not have been seen."


def _apart(islands: Sequence[Sequence[str]]) -> str:
    return (
        f"No challenge joins {names(islands[0])} to {names(islands[1])}: "
        "places across such groups mean nothing."
    )


def _count(challenges: int) -> str:
    return "One challenge" if challenges == 1 else f"{challenges} challenges"


def names(listed: Sequence[str]) -> str:
    """a, b and c; after four names, how many others there are."""
    shown = list(listed[:_NAMED])
    if len(listed) > _NAMED:
        shown.append(f"{len(listed) - _NAMED} others")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
