"""The matrix in a terminal."""

import pytest
from rich.console import Console

from trapline.arena.judge import rubric
from trapline.arena.report.catalog import describe
from trapline.arena.report.field import Column, Field
from trapline.arena.report.runview import RunView
from trapline.cli.grade import progress_lines
from trapline.cli.matrix import matrix

LONG = ("flash_attention_backward", "fused_softmax_topk", "layer_norm_backward", "beam_search")


def printed(cells, width=80):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(matrix(cells, width))
    return capture.get()


@pytest.mark.parametrize(
    ("attempts", "shown"),
    [
        ([("pass", 100.0), ("fail", 40.0)], "C-✗ 70.0"),
        ([("pass", 98.0), ("hack", 0.0)], "hack"),
        ([("infra_error", None), ("hack", 0.0)], "hack"),
        ([("infra_error", None), ("pass", 90.4)], "A- 90.4"),
        ([("no_answer", 0.0)], "no answer"),
        ([("infra_error", None)], "our error"),
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
    assert not square.graded or square.letter in shown


def test_a_name_is_not_taken_for_markup(plain_cell):
    assert "[bold]" in printed([plain_cell(entrant="[bold]")])


@pytest.mark.parametrize("width", [200, 80, 40, 24])
def test_names_and_tenths_are_whole_at_any_width(plain_cell, width):
    cells = [
        plain_cell(
            entrant="wrong-derivation"[: width // 3], challenge=name, score=89.9, letter="B+"
        )
        for name in LONG
    ]
    text = printed(cells, width)
    assert max(map(len, text.splitlines())) <= width
    for name in LONG:
        for word in name.split("_"):
            assert word in text
    assert text.count("89.9") == len(LONG)


def test_legend_and_isolation_are_below_the_matrix(plain_cell):
    cells = [
        plain_cell(state="fail", score=60.0, letter="D"),
        plain_cell(entrant="you", challenge="beam_search"),
    ]
    text = printed(cells)
    assert "✗ the contract fails (at most 69); · no answer in the field" in text
    assert "◆" not in text
    assert f"isolation: {cells[0].isolation}" in text


def test_progress_without_a_terminal_is_a_line_per_cell(plain_cell):
    cells = [plain_cell(attempt=n, score=98.5, letter="A+", seconds=61.0) for n in (1, 2)]
    first, last = progress_lines(cells, cells)
    assert first.startswith("[1/2] me/kv_cache #1: A+ 98.5, 1 min 1 s; about 0 s left")
    assert last == "[2/2] me/kv_cache #2: A+ 98.5, 1 min 1 s"
