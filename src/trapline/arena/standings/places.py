"""Places as text: "1st", "2nd=", "2nd=", "4th"."""

from collections.abc import Mapping


def ordinal(rank: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    if rank % 100 in (11, 12, 13):
        return f"{rank}th"
    return f"{rank}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(rank % 10, 'th') }"


def ranks(values: Mapping[str, float], tolerance: float = 0.0) -> dict[str, int]:
    """1 + the number of values better by more than the tolerance; higher is better."""
    return {
        name: 1 + sum(other > value + tolerance for other in values.values())
        for name, value in values.items()
    }


def places(values: Mapping[str, float], tolerance: float = 0.0) -> dict[str, str]:
    """The place of each name; shared places end in "="."""
    return label(ranks(values, tolerance))


def label(ranks_by_name: Mapping[str, int]) -> dict[str, str]:
    """Ranks as text, with "=" for ranks that occur more than once."""
    counts: dict[int, int] = {}
    for rank in ranks_by_name.values():
        counts[rank] = counts.get(rank, 0) + 1
    return {
        name: ordinal(rank) + ("=" if counts[rank] > 1 else "")
        for name, rank in ranks_by_name.items()
    }
