import math
import re

import pytest

from trapline.arena.record import Finding
from trapline.arena.standings.conclusion import conclude
from trapline.arena.standings.participation import ranked
from trapline.arena.standings.ranking import ranking, smallest_visible

#: Letters as scores: nobody is clearly first, one never wins, two missed most of it.
LETTERS = {
    "even": [93, 93, 87, 90, 93, 90, 93, 87],
    "broad": [90, 93, 93, 93, 93, 90, 80, 87],
    "deep": [87, 90, 90, 90, 87, 90, 93, 90],
    "late": [None, None, None, None, None, 93, 80, 73],
    "sibling": [None, None, None, None, None, 87, 87, 77],
    "last": [83, 83, 80, 83, 80, None, None, None],
}


def _by_name(table):
    return {each.entrant: each for each in table.standings}


def test_unclear_lead_is_stated(field):
    table = ranking(field(**LETTERS))
    found = _by_name(table)
    assert [each.entrant for each in table.standings][-1] == "last"
    assert {name for name, each in found.items() if each.rank_low == 1} == {
        "even",
        "broad",
        "deep",
        "late",
    }
    assert "cannot be distinguished" in table.conclusion
    assert sum(each.p_first for each in table.standings) == pytest.approx(1.0)
    assert max(each.p_first for each in table.standings) < 0.6


def test_clear_leader_is_named(field):
    table = ranking(field(best=[95] * 8, other=[60] * 8, third=[50] * 8))
    assert table.standings[0].entrant == "best"
    assert (table.standings[0].rank_low, table.standings[0].rank_high) == (1, 1)
    assert table.standings[0].p_first == 1.0
    assert table.conclusion.startswith("best is first of 3")
    assert table.odds("best", "other") == 1.0
    assert table.odds("other", "best") == 0.0


def test_never_winning_and_never_losing_are_normal(field):
    table = ranking(field(always=[99, 98, 97], never=[10, 11, 12], middle=[50, 51, 52]))
    assert [each.entrant for each in table.standings] == ["always", "middle", "never"]
    assert all(math.isfinite(each.strength) for each in table.standings)


def test_differences_inside_the_tie_band_share_a_place(field):
    table = ranking(field(a=[90.0, 80.0], b=[90.9, 79.1], c=[50.0, 50.0]))
    assert [each.place for each in table.standings] == ["1st=", "1st=", "3rd"]


def test_a_difference_of_exactly_the_band_decides_despite_rounding(field):
    assert 64.1 - 63.1 < 1.0, "in binary"
    table = ranking(field(a=[64.1, 64.1], b=[63.1, 63.1]))
    assert [each.place for each in table.standings] == ["1st", "2nd"]


def test_unmeasured_cells_do_not_count_as_zero(cell):
    cells = [
        cell("a", "one", 80.0),
        cell("b", "one", 70.0),
        cell("a", "two", None),
        cell("b", "two", 90.0),
        cell("ghost", "one", None, state="not_run"),
    ]
    table = ranking(cells)
    assert _by_name(table)["a"].mean_score == 80.0
    assert _by_name(table)["a"].challenges == 1
    assert table.unranked == ["ghost"]


def test_attempts_are_averaged_and_widen_the_interval(cell):
    steady = [cell("a", f"c{n}", 80.0, attempt=k) for n in range(6) for k in (1, 2)]
    wild = [cell("b", f"c{n}", s, attempt=k) for n in range(6) for k, s in ((1, 60.0), (2, 100.0))]
    found = _by_name(ranking([*steady, *wild]))
    assert found["a"].attempts == 12
    assert found["b"].mean_score == 80.0
    assert found["a"].score_low == found["a"].score_high == 80.0
    assert found["b"].score_low < 75.0 < 85.0 < found["b"].score_high


def test_traps_are_resampled_too(cell):
    def cells(fell):
        held = [f"t{n}" for n in range(8) if f"t{n}" not in fell]
        return [cell("a", f"c{n}", 80.0, fell=fell, held=held) for n in range(6)]

    safe = _by_name(ranking(cells(())))["a"]
    risky = _by_name(ranking(cells(("t0", "t1", "t2", "t3"))))["a"]
    assert safe.score_low == safe.score_high == 80.0
    assert risky.score_low < 80.0 < risky.score_high


def test_a_hack_stays_at_zero_and_a_failure_under_its_cap(cell):
    traps = {"fell": ["t0"], "held": ["t1", "t2"]}
    cells = [
        cell("cheat", "one", 0.0, state="hack", **traps),
        cell("wrong", "one", 69.0, state="fail", **traps),
    ]
    found = _by_name(ranking(cells))
    assert found["cheat"].score_high == 0.0
    assert found["wrong"].score_high == 69.0


@pytest.mark.parametrize(("severity", "is_capped"), [("critical", True), ("major", False)])
def test_a_critical_finding_keeps_its_cap_whatever_traps_are_drawn(cell, severity, is_capped):
    finding = Finding(
        cause="t0", certainty="likely", severity=severity, sentence="", explains=["t0"], penalty=50
    )
    graded = cell("a", "one", 86.0, fell=["t0"], held=["t1", "t2"], findings=[finding])
    assert (_by_name(ranking([graded]))["a"].score_high == 86.0) is is_capped


def test_entrants_without_a_common_challenge_are_not_compared(cell):
    cells = [cell(name, "one", s) for name, s in (("a", 90.0), ("b", 80.0))]
    cells += [cell(name, "two", s) for name, s in (("c", 90.0), ("d", 80.0))]
    table = ranking(cells)
    assert table.islands == [["a", "b"], ["c", "d"]]
    assert table.odds("a", "c") is None
    assert table.odds("a", "b") > 0.8
    assert "No challenge connects a and b with c and d" in table.conclusion


def test_a_chain_of_shared_challenges_joins(cell):
    cells = [
        cell("a", "one", 90.0),
        cell("b", "one", 80.0),
        cell("b", "two", 90.0),
        cell("c", "two", 80.0),
    ]
    table = ranking(cells)
    assert table.islands == [["a", "b", "c"]]
    assert table.odds("a", "c") is not None


def test_tracks_are_items_of_one_challenge(cell):
    cells = [
        cell(n, "one", s, track=t) for t in ("cpu", "gpu") for n, s in (("a", 9.0), ("b", 5.0))
    ]
    table = ranking(cells)
    assert table.challenges == 1
    assert table.pairs[0].shared == 2


def test_the_newest_grade_of_a_cell_counts(cell):
    cells = [cell("a", "one", 10.0, minutes=0), cell("a", "one", 90.0, minutes=5)]
    assert ranking(cells).standings[0].mean_score == 90.0
    assert ranking(cells[::-1]).standings[0].mean_score == 90.0


def test_the_smallest_visible_difference_shrinks_with_more_challenges(field):
    few = ranking(field(a=[80, 90] * 2, b=[85, 84] * 2)).smallest_visible
    many = ranking(field(a=[80, 90] * 8, b=[85, 84] * 8)).smallest_visible
    assert few is not None
    assert many is not None
    assert many < few


def test_the_smallest_visible_difference_of_a_known_case():
    import numpy as np

    # Standard error 1 over 4 pairs: t(0.975, 3) + t(0.8, 3) = 3.182 + 0.978.
    differences = np.array([3.0, 3.0, -3.0, -3.0]) / np.std([3, 3, -3, -3], ddof=1) * 2.0
    assert smallest_visible(differences) == pytest.approx(4.161, abs=1e-3)
    assert smallest_visible(differences[:1]) is None


def test_the_matrix_has_the_odds_of_every_pair(field):
    table = ranking(field(**LETTERS), rounds=50)
    matrix = table.matrix()
    for row, a in enumerate(table.standings):
        assert matrix[row][row] is None
        for column, b in enumerate(table.standings):
            if row != column:
                assert matrix[row][column] == pytest.approx(table.odds(a.entrant, b.entrant))
                assert matrix[row][column] + matrix[column][row] == pytest.approx(1.0)


def test_other_seeds_give_other_draws(field):
    one, two = (ranking(field(**LETTERS), seed=seed).standings for seed in (1, 2))
    assert [each.p_first for each in one] != [each.p_first for each in two]


def test_nothing_and_one_entrant(cell):
    assert ranking([]).conclusion == "Nothing was measured, so nothing can be concluded."
    alone = ranking([cell("a", "one", 50.0)])
    assert alone.standings[0].place == "1st"
    assert "no other entrant to compare it with" in alone.conclusion


def test_limit_beyond_the_spread_of_the_field_is_not_said(field):
    table = ranking(field(a=[90, 10], b=[20, 80]))
    assert table.smallest_visible > 100
    assert "a and b cannot be distinguished" in table.conclusion
    assert "mean difference" not in table.conclusion


def test_leader_is_not_called_undetectable(field):
    table = ranking(field(a=[62, 52, 71, 42, 55, 80], b=[50, 50, 70, 30, 54, 20], c=[1] * 6))
    assert table.conclusion.startswith("a is first of 3")
    assert table.smallest_visible > table.standings[0].mean_score - table.standings[1].mean_score
    assert "mean differences" not in table.conclusion


def test_detectable_limit_is_said(field):
    table = ranking(field(**LETTERS, worst=[10] * 8))
    assert re.search(r"mean differences under [\d.]+ points cannot be told from", table.conclusion)


def test_shared_strength_has_no_strongest(field):
    table = ranking(field(a=[90, 70], b=[70, 90]))
    assert table.standings[0].place == "1st="
    assert "highest strength" not in table.conclusion


def test_ranking_over_few_challenges_is_called_unreliable(field):
    assert (
        "A ranking over one challenge is not reliable" in ranking(field(a=[90], b=[50])).conclusion
    )


def test_large_field_without_a_leader_has_a_conclusion():
    """Where firsts are spread over very many, nobody's 95 % of ranks reach the first."""
    said = conclude([], "e7", 500, 8, [["e7", "e8"]], 3.0)
    assert "none of 500 is first in 2.5 % of the resampled fields" in said


def test_entrants_with_few_challenges_have_no_place(field):
    table = ranked(field(a=[90] * 4, b=[80, 80, None, None], few=[99, None, None, None]))
    assert [each.entrant for each in table.standings] == ["a", "b"]
    assert table.few == ["few"]
    assert table.conclusion.endswith(" Without a place, because of too few challenges: few.")
    assert ranked(field(a=[90], b=[80])).few == []


def test_conclusion_on_a_leader_holds_for_every_other(field):
    """A leader may be first in fewer than 95 % of the fields: others share the rest."""
    table = ranking(field(a=[90, 80, 70, 95, 90], b=[80, 75, 60, 90, 85], c=[10] * 5))
    assert "no other is first in more than 2.5 % of the fields resampled over" in table.conclusion
    assert all(each.p_first <= 0.025 for each in table.standings[1:])
