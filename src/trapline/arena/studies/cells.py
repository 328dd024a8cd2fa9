"""The grade matrix as cells, so that every standing and every report works on it."""

from datetime import UTC, datetime

from trapline.arena.judge.rubric import LETTERS
from trapline.arena.record import Cell
from trapline.arena.studies.records import ReportedField

_LEAST = dict(LETTERS)


def as_cells(field: ReportedField) -> list[Cell]:
    """One cell a grade, scored with the least that earns the letter.

    A letter above the cap for failures implies a pass. No dimension, case or trap was measured.
    """
    return [
        Cell(
            entrant=model,
            challenge=challenge,
            harness=field.harness_of(model, challenge),
            model=model,
            state="pass",
            score=float(_LEAST[grade.letter]),
            letter=grade.letter,
            reason="a letter printed in a report; nothing was executed here",
            isolation="",
            dimensions={},
            cases=[],
            traps=[],
            submission_digest="",
            challenge_digest="",
            seed=0,
            versions={},
            started=datetime(1970, 1, 1, tzinfo=UTC),
            seconds=0.0,
        )
        for (model, challenge), grade in sorted(field.matrix().items())
    ]
