import pytest

from trapline.arena.standings.trajectory import by_difficulty, over_stages

DIFFICULTY = {"c0": "medium", "c1": "medium", "c2": "hard", "c3": "research"}


def test_over_difficulty(field):
    rising, falling = by_difficulty(field(down=[90, 80, 70, 60], up=[50, 60, 70, 90]), DIFFICULTY)[
        ::-1
    ]
    assert [stage.name for stage in rising.stages] == ["medium", "hard", "research"]
    assert [stage.score for stage in rising.stages] == [55.0, 70.0, 90.0]
    assert rising.slope == pytest.approx(17.5)
    assert (rising.trend, rising.never_declines) == ("rising", True)
    assert (falling.trend, falling.never_declines) == ("falling", False)


def test_a_small_decline_after_a_rise_is_a_decline(field):
    [one] = by_difficulty(field(a=[87, 87, 93, 90]), DIFFICULTY)
    assert one.trend == "flat"
    assert one.never_declines is False


def test_a_missing_stage_leaves_a_gap(field):
    [one] = by_difficulty(field(a=[80, None, None, 90]), DIFFICULTY)
    assert [stage.score for stage in one.stages] == [80.0, None, 90.0]
    assert one.stages[1].letter is None
    assert one.slope == pytest.approx(5.0)


def test_one_stage_gives_no_trend(field):
    [one] = by_difficulty(field(a=[80]), DIFFICULTY)
    assert (one.slope, one.trend, one.never_declines) == (None, "unknown", None)


def test_over_any_stages(cell):
    cells = [cell("a", "c0", 50.0, attempt=1), cell("a", "c0", 70.0, attempt=2)]
    [staged] = over_stages(cells, [("first", ["c0"]), ("second", ["c9"])])
    assert [stage.cells for stage in staged.stages] == [2, 0]


def test_unknown_difficulty_comes_last(field):
    [one] = by_difficulty(field(a=[1, 2]), {"c0": "impossible", "c1": "hard"})
    assert [stage.name for stage in one.stages] == ["hard", "impossible"]
