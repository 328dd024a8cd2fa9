"""One line of the reproduction table: what was printed, and what we get from the same figures."""

from collections.abc import Sequence
from typing import Literal

from trapline.arena.record import Record

Verdict = Literal["equal", "contradiction"]


class ComparisonRow(Record):
    #: What is compared: record, lead, overlap, grade, place, average, margin, rank, fact, claim …
    kind: str
    what: str
    reported: str
    ours: str
    verdict: Verdict
    sources: list[str]
    #: Where ours comes from, or the words that were printed.
    note: str = ""


def row(
    kind: str,
    what: str,
    reported: object,
    ours: object,
    sources: Sequence[str],
    *,
    holds: bool | None = None,
    note: str = "",
) -> ComparisonRow:
    """Equal where both print the same, unless the caller knows better."""
    same = str(reported) == str(ours) if holds is None else holds
    return ComparisonRow(
        kind=kind,
        what=what,
        reported=str(reported),
        ours=str(ours),
        verdict="equal" if same else "contradiction",
        sources=sorted(set(sources)),
        note=note,
    )
