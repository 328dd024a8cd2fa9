"""Letters stay readable on their colours, in both schemes."""

import re
from pathlib import Path

import pytest

import trapline.arena.report
from trapline.arena.judge import rubric
from trapline.arena.report.field import letter_class

CSS = (Path(trapline.arena.report.__file__).parent / "static" / "site.css").read_text()
PAIR = r"light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\)"
LEAST = 4.5


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_is_21():
    assert contrast("#000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize(
    "name", [*(letter_class(letter) for letter, _ in rubric.LETTERS), "s-hack"]
)
def test_square_is_readable(name):
    rule = re.search(rf"\.{name} {{ background: {PAIR}; color: {PAIR}; }}", CSS)
    assert rule, name
    for back, ink in ((1, 3), (2, 4)):
        assert contrast(rule[back], rule[ink]) >= LEAST


@pytest.mark.parametrize(
    "ink",
    [
        "ink",
        "soft",
        "accent",
        "warn",
        "bad",
        "good",
        "code-keyword",
        "code-string",
        "code-comment",
        "code-number",
        "code-name",
    ],
)
@pytest.mark.parametrize("paper", ["paper", "card", "sunk"])
def test_text_is_readable_on_every_ground(ink, paper):
    colours = {name: re.search(rf"--{name}: {PAIR};", CSS) for name in (ink, paper)}
    for scheme in (1, 2):
        assert contrast(colours[ink][scheme], colours[paper][scheme]) >= LEAST
