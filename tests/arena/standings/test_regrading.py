"""Regrading noise and pass@k."""

import pytest

from trapline.arena.standings.ranking import ranking
from trapline.arena.standings.regrading import TIMED, noise, pass_at, pooled, shares


def _graded_again(cell, scores, **others):
    return [
        cell("a", "one", score, minutes=minutes, **others) for minutes, score in enumerate(scores)
    ]


def test_noise_is_the_pooled_deviation_of_the_same_answer(cell):
    found = noise(
        [*_graded_again(cell, [80.0, 84.0]), *_graded_again(cell, [50.0, 50.0, 50.0], attempt=2)]
    )
    assert found.cells == 2
    assert found.overall == pytest.approx((8.0 / 3) ** 0.5)
    assert found.of(cell("a", "one", 80.0)) == found.overall
    assert found.of(cell("a", "other", 80.0)) == found.overall


def test_another_answer_or_another_challenge_is_not_noise(cell):
    cells = [
        cell("a", "one", 80.0, submission_digest="x"),
        cell("a", "one", 20.0, submission_digest="y", minutes=1),
        cell("b", "one", 80.0, full=True),
        cell("b", "one", 20.0, minutes=1),
    ]
    assert noise(cells).overall is None
    assert noise(cells).of(cells[0]) == 0.0


@pytest.mark.parametrize(
    ("speed", "deviation"), [(50.0, TIMED), (0.0, 0.0), (100.0, 0.0), (None, 0.0)]
)
def test_measured_time_has_noise_without_a_second_grade(cell, speed, deviation):
    timed = cell("a", "one", 90.0, dimensions={"speed": speed})
    assert noise([timed]).of(timed) == deviation


def test_deviation_of_a_measured_time_is_not_less_than_any_that_was_seen():
    """`confident` in the paged cache, the most restless of 42 cells in four gradings."""
    assert pooled([[65.2, 64.7, 65.3, 64.9]]) <= TIMED


def test_interval_holds_the_spread_of_the_same_bytes(cell):
    """Five gradings of one cell, one after another, differ by 0.4 points."""
    cells = [cell("a", name, 88.4, dimensions={"speed": 26.0}) for name in ("one", "two")]
    standing = ranking(cells).standings[0]
    assert standing.score_low <= 88.2
    assert standing.score_high >= 88.6


def test_noise_widens_the_intervals(cell, field):
    cells = field(a=[90.0] * 6, b=[88.0] * 6)
    again = _graded_again(cell, [80.0, 90.0])
    quiet, loud = (ranking(cells, noise=one).standings[0] for one in (noise([]), noise(again)))
    assert quiet.score_high - quiet.score_low == 0.0
    assert loud.score_high - loud.score_low > 5.0


@pytest.mark.parametrize(
    ("k", "passed", "chance"),
    [
        (1, [True, False, False, False], 0.25),
        (2, [True, False, False, False], 0.5),
        (2, [True, True, True, False], 1.0),
        (3, [False, False, False], 0.0),
    ],
)
def test_pass_at_k(k, passed, chance):
    assert pass_at(k, passed) == pytest.approx(chance)


def test_challenges_with_too_few_attempts_do_not_count():
    attempts = {"one": [True, False], "two": [False]}
    assert shares(attempts, 1) == pytest.approx(0.25)
    assert shares(attempts, 2) == 1.0
    assert shares(attempts, 3) is None
