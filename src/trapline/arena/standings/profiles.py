"""Cells of one profile: scores under different prompts are never ranked together."""

from collections.abc import Sequence

from trapline.arena.errors import UsageError
from trapline.arena.record import Cell

#: How a run's own contract is called where a profile is asked for.
OWN = "own"


def of_one_profile(cells: Sequence[Cell], profile: str | None = None) -> list[Cell]:
    """The cells of this profile (`own`: of the challenges' own contracts), or of the only one.

    Cells without a score stay: they say why, and are not ranked.
    """
    scored = sorted({cell.profile or OWN for cell in cells if cell.score is not None})
    if profile is None:
        if len(scored) > 1:
            raise UsageError(
                f"the run holds scores of several profiles ({', '.join(scored)}), which cannot be "
                "compared: choose one with --profile"
            )
        return list(cells)
    if profile not in scored:
        there = ", ".join(scored) or "none"
        raise UsageError(f"the run has no scores of profile {profile!r}; it has: {there}")
    return [cell for cell in cells if cell.score is None or (cell.profile or OWN) == profile]
