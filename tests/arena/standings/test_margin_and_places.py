import pytest

from trapline.arena.standings.margin import lead, leaders, margin, steps
from trapline.arena.standings.places import ordinal, places


@pytest.mark.parametrize(
    ("points", "word"),
    [
        (0.0, "tie"),
        (0.9, "tie"),
        (64.1 - 63.1, "narrow"),
        (-4.9, "narrow"),
        (5.0, "moderate"),
        (9.9, "moderate"),
        (-10.0, "decisive"),
    ],
)
def test_one_rule_for_every_margin(points, word):
    assert margin(points) == word


def test_the_ladder_of_letters():
    assert steps("F") == 0
    assert steps("A") - steps("A-") == 1


def test_leaders_are_everyone_within_the_band():
    assert leaders({"a": 90.0, "b": 89.5, "c": 89.0}) == ["a", "b"]
    assert leaders({}) == []
    assert leaders({"a": 64.1, "b": 63.1}) == ["a"]
    assert lead({"a": 90.0, "b": 89.5, "c": 80.0}) == 0.5
    assert lead({"a": 90.0}) == 0.0


def test_places_with_ties():
    assert places({"a": 3.0, "b": 2.0, "c": 3.0, "d": 1.0}) == {
        "a": "1st=",
        "c": "1st=",
        "b": "3rd",
        "d": "4th",
    }
    assert places({"a": 3.0, "b": 2.9}, tolerance=0.2) == {"a": "1st=", "b": "1st="}


def test_ordinals():
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 111)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "101st", "111th")
    ]
