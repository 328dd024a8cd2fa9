"""The matrix in a terminal."""

from datetime import UTC, datetime

import pytest
from rich.console import Console

from trapline.arena import rubric
from trapline.arena.record import Cell
from trapline.arena.report.catalog import describe
from trapline.arena.report.field import Column, Field
from trapline.arena.report.runview import RunView
from trapline.cli.matrix import matrix, whole


def attempt(number, state, score, entrant="me"):
    return Cell(
        entrant=entrant,
        challenge="kv_cache",
        attempt=number,
        state=state,
        score=score,
        letter=None if score is None else rubric.letter(score),
        reason="",
        isolation="process",
        dimensions={},
        cases=[],
        traps=[],
        submission_digest="s",
        challenge_digest="c",
        seed=1,
        versions={},
        started=datetime(2026, 1, 1, tzinfo=UTC),
        seconds=1.0,
    )


def printed(cells):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(matrix(cells))
    return capture.get()


def test_points_never_contradict_their_letter():
    for tenths in range(1001):
        score = tenths / 10
        assert rubric.letter(whole(score)) == rubric.letter(score)
    assert whole(96.96) == 97  # as the letter has it


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        ([attempt(1, "pass", 100.0), attempt(2, "fail", 40.0)], "C-✗ 70"),
        ([attempt(1, "pass", 98.0), attempt(2, "hack", 0.0)], "F☠ 49"),
        ([attempt(1, "infra_error", None), attempt(2, "hack", 0.0)], "F☠ 0"),
        ([attempt(1, "infra_error", None), attempt(2, "pass", 90.0)], "A- 90"),
        ([attempt(1, "infra_error", None)], "infra"),
    ],
)
def test_several_attempts_are_one_square_as_the_report_has_it(cells, shown):
    assert shown in printed(cells)
    field = Field(RunView(cells), describe(cells))
    square = field.square("me", Column("kv_cache", "cpu"))
    assert (square.letter or "infra") in shown


def test_a_name_is_not_taken_for_markup():
    assert "[bold]" in printed([attempt(1, "pass", 90.0, "[bold]")])
