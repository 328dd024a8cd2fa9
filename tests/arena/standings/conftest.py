"""Cells without a run: the standings ask for nothing else."""

from datetime import UTC, datetime, timedelta

import pytest

from trapline.arena.judge.rubric import letter
from trapline.arena.record import Cell, CheckResult, Dimension


def _cell(
    entrant,
    challenge,
    score,
    *,
    attempt=1,
    state=None,
    fell=(),
    held=(),
    dimensions=None,
    minutes=0,
    **others,
):
    state = state or ("infra_error" if score is None else "pass")
    return Cell(
        entrant=entrant,
        challenge=challenge,
        attempt=attempt,
        state=state,
        score=score,
        letter=None if score is None else letter(score),
        reason="",
        isolation="process",
        dimensions={
            name: Dimension(score=value, reason=f"{name} was looked at")
            for name, value in (dimensions or {}).items()
        },
        cases=[CheckResult(id="contract", state="fail" if state == "fail" else "pass")],
        traps=[
            *(CheckResult(id=trap, state="fail", message="fell") for trap in fell),
            *(CheckResult(id=trap, state="pass") for trap in held),
        ],
        **{
            "submission_digest": f"{entrant}-{challenge}-{attempt}",
            "challenge_digest": challenge,
            "seed": 1,
            "versions": {},
            "started": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes),
            "seconds": 1.0,
            **others,
        },
    )


@pytest.fixture(scope="session")
def cell():
    """Makes a cell."""
    return _cell


@pytest.fixture(scope="session")
def field():
    """Makes a field out of rows of scores; None where an entrant has no cell."""

    def make(**rows):
        return [
            _cell(entrant, f"c{column}", score)
            for entrant, scores in rows.items()
            for column, score in enumerate(scores)
            if score is not None
        ]

    return make
