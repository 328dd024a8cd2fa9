"""The matrix in a terminal."""

import pytest
from rich.console import Console

from trapline.arena.judge import rubric
from trapline.arena.report.catalog import describe
from trapline.arena.report.field import Column, Field
from trapline.arena.report.runview import RunView
from trapline.cli.matrix import matrix, whole


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
    ("attempts", "shown"),
    [
        ([("pass", 100.0), ("fail", 40.0)], "C-✗ 70"),
        ([("pass", 98.0), ("hack", 0.0)], "F☠ 49"),
        ([("infra_error", None), ("hack", 0.0)], "F☠ 0"),
        ([("infra_error", None), ("pass", 90.0)], "A- 90"),
        ([("infra_error", None)], "infra"),
    ],
)
def test_several_attempts_are_one_square_as_the_report_has_it(plain_cell, attempts, shown):
    cells = [
        plain_cell(
            attempt=n,
            state=state,
            score=score,
            letter=None if score is None else rubric.letter(score),
        )
        for n, (state, score) in enumerate(attempts, 1)
    ]
    assert shown in printed(cells)
    field = Field(RunView(cells), describe(cells))
    square = field.square("me", Column("kv_cache", "cpu"))
    assert (square.letter or "infra") in shown


def test_a_name_is_not_taken_for_markup(plain_cell):
    assert "[bold]" in printed([plain_cell(entrant="[bold]")])
