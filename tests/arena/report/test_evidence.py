"""Evidence as lines."""

import math

import pytest

from trapline.arena.report import evidence


def test_nested_figures_carry_their_path():
    rows = evidence.rows({"milliseconds": {"reference": 5.0}, "extra_bytes": [1, 2]})
    assert rows == [("milliseconds › reference", "5"), ("extra bytes", "1, 2")]


def test_nothing_gives_no_rows():
    assert evidence.rows({}) == []


def test_too_many_figures_are_cut_and_say_so():
    rows = evidence.rows({str(n): n for n in range(100)})
    assert len(rows) == evidence.MOST_ROWS + 1
    assert rows[-1][1] == "60 more figures are in the bundle"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0, "1"),
        (0.123456, "0.1235"),
        (math.inf, "inf"),
        (None, "–"),
        (True, "yes"),
        ([], "none"),
        ("x" * 900, "x" * 599 + "…"),
    ],
)
def test_figures_are_short(value, shown):
    assert evidence.text(value) == shown
