"""Changes when cells are graded again, and their possible causes."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from trapline.arena.record import Cell, Record
from trapline.arena.standings.board import age

#: Fields whose change explains a new grade, and their names in reports.
_CAUSES = (
    ("submission_digest", "the submission changed"),
    ("challenge_digest", "the challenge changed"),
    ("versions", "other versions of the tools"),
    ("isolation", "another isolation level"),
    ("full", "quick and full grade"),
    ("seed", "another seed"),
)


class Regrade(Record):
    """One cell graded once more."""

    entrant: str
    challenge: str
    track: str
    attempt: int
    #: When the earlier and the later grade began, ISO 8601.
    earlier: str
    later: str
    score_before: float | None
    score_after: float | None
    letter_before: str | None
    letter_after: str | None
    state_before: str
    state_after: str
    #: Recorded differences between the two besides the verdict.
    causes: list[str]
    #: Traps whose outcome changed.
    traps_changed: list[str]

    @property
    def changed(self) -> bool:
        before, after = (self.score_before, self.state_before), (self.score_after, self.state_after)
        return before != after


def history(cells: Iterable[Cell]) -> list[Regrade]:
    """Each pair of consecutive grades of a cell, oldest first; takes `Store.history()`."""
    grades: dict[tuple[str, str, str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        grades[cell.key].append(cell)
    return [
        _regrade(before, after)
        for key in sorted(grades)
        for before, after in pairwise(sorted(grades[key], key=age))
    ]


def _regrade(before: Cell, after: Cell) -> Regrade:
    causes = [words for name, words in _CAUSES if getattr(before, name) != getattr(after, name)]
    return Regrade(
        entrant=after.entrant,
        challenge=after.challenge,
        track=after.track,
        attempt=after.attempt,
        earlier=before.started.isoformat(),
        later=after.started.isoformat(),
        score_before=before.score,
        score_after=after.score,
        letter_before=before.letter,
        letter_after=after.letter,
        state_before=before.state,
        state_after=after.state,
        causes=causes,
        traps_changed=_traps_changed(before, after),
    )


def _traps_changed(before: Cell, after: Cell) -> list[str]:
    old = {trap.id: trap.state for trap in before.traps}
    new = {trap.id: trap.state for trap in after.traps}
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
