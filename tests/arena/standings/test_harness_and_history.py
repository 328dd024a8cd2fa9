import pytest

from trapline.arena.record import Bundle
from trapline.arena.standings.anatomy import anatomy
from trapline.arena.standings.harness_effect import harness_effect
from trapline.arena.standings.history import history

CODE = "# why\nx = 1\n\ndef test_x():\n    assert x\n"


def test_anatomy_counts_code_tests_comments_and_prose():
    body = anatomy({"solution.py": CODE, "ANALYSIS.md": "two words", "data.json": "{}"})
    assert (body.files, body.lines, body.tests, body.prose_words) == (3, 3, 1, 2)
    assert body.comment_share == pytest.approx(1 / 3)
    assert anatomy({}).comment_share == 0.0


def test_a_row_for_each_harness(cell):
    cells = [
        cell("m-small", "one", 80.0, harness="small", model="m", bundle="b1"),
        cell("m-large", "one", 90.0, harness="large", model="m"),
        cell("n-large", "one", 60.0, harness="large", model="n", state="fail"),
        cell("o-large", "one", None, harness="large", model="o"),
    ]
    bundles = {"b1": Bundle(cell=cells[0], files={"solution.py": CODE})}
    effect = harness_effect(cells, bundles)
    large, small = effect.rows
    assert (large.cells, large.mean_score, large.pass_share) == (2, 75.0, 0.5)
    assert large.models == ["m", "n"]
    assert large.letters == {"A-": 1, "D": 1}
    assert large.lines is None
    assert (small.lines, small.files, small.tests) == (3.0, 1.0, 1.0)
    [pair] = effect.pairs
    assert (pair.a, pair.b, pair.shared, pair.difference) == ("large", "small", 1, 10.0)


def test_different_models_say_nothing_about_the_harness(cell):
    cells = [
        cell("m", "one", 80.0, harness="small", model="m"),
        cell("n", "one", 90.0, harness="large", model="n"),
    ]
    assert harness_effect(cells).pairs == []


def test_a_regrade_says_what_changed_and_why(cell):
    cells = [
        cell("a", "one", 95.0, held=["t"], minutes=0),
        cell("a", "one", 70.0, fell=["t"], minutes=5, challenge_digest="newer"),
        cell("b", "one", 50.0),
    ]
    [change] = history(cells[::-1])
    assert (change.score_before, change.score_after) == (95.0, 70.0)
    assert (change.letter_before, change.letter_after) == ("A", "C-")
    assert change.causes == ["the challenge changed"]
    assert change.traps_changed == ["t"]
    assert change.changed


def test_a_regrade_without_a_cause_says_so(cell):
    [change] = history([cell("a", "one", 95.0), cell("a", "one", 95.0, minutes=1)])
    assert change.causes == []
    assert not change.changed


def test_other_attempts_are_not_regrades(cell):
    assert history([cell("a", "one", 95.0), cell("a", "one", 90.0, attempt=2)]) == []
