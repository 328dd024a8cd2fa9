"""Cells that can be compared: of one profile and, on the GPU track, of one machine."""

from collections.abc import Sequence

from trapline.arena.errors import UsageError
from trapline.arena.record import GPU_FACTS, Cell

#: How a run's own contract is called where a profile is asked for.
OWN = "own"


def of_one_profile(cells: Sequence[Cell], profile: str | None = None) -> list[Cell]:
    """The cells of this profile (`own`: of the challenges' own contracts), or of the only one.

    Cells without a score stay: they say why, and are not ranked.
    """
    refuse_several_gpus(cells)
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


def refuse_several_gpus(cells: Sequence[Cell]) -> None:
    """Times of different GPUs, drivers or versions are never ranked together."""
    timed = [cell for cell in cells if cell.track == "gpu" and cell.score is not None]
    machines = sorted(
        {
            ", ".join(f"{fact} {cell.versions.get(fact, 'unknown')}" for fact in GPU_FACTS)
            for cell in timed
        }
    )
    if len(machines) > 1:
        raise UsageError(
            f"the run holds GPU scores of several machines ({'; '.join(machines)}), which cannot "
            "be compared: grade the field again with another --out"
        )
