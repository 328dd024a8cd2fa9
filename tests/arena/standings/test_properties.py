"""What must hold for every field: no names, no order, no luck decide."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trapline.arena.record import CheckResult
from trapline.arena.standings.bradley_terry import EQUAL
from trapline.arena.standings.duel import duel
from trapline.arena.standings.ranking import ranking

NAMES = ("ada", "bo", "cy", "di", "ed")
CHALLENGES = ("one", "two", "three", "four")
#: The same examples every time: a test that fails by luck tells nobody anything.
FEW = settings(max_examples=25, derandomize=True, deadline=None)
MANY = settings(max_examples=200, derandomize=True, deadline=None)

_scores = st.one_of(st.none(), st.integers(0, 200).map(lambda half: half / 2))
_traps = st.lists(st.booleans(), min_size=3, max_size=3)
_attempts = st.lists(st.tuples(_scores, _traps), max_size=3)


@st.composite
def fields(draw, cell):
    """Sparse, with several attempts, some of them not measured."""
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    return [
        _with_traps(cell(name, challenge, score, attempt=attempt), traps)
        for name in names
        for challenge in CHALLENGES
        for attempt, (score, traps) in enumerate(draw(_attempts), 1)
    ]


def _with_traps(cell, held):
    results = [
        CheckResult(id=f"trap-{n}", state="pass" if ok else "fail") for n, ok in enumerate(held)
    ]
    return cell.model_copy(update={"traps": results})


def _renamed(cells, names):
    return [cell.model_copy(update={"entrant": names[cell.entrant]}) for cell in cells]


def _standings(table):
    return {each.entrant: each for each in table.standings}


def check_permuting(cells, order):
    names = dict(zip(NAMES, order, strict=True))
    before, after = ranking(cells, rounds=20), ranking(_renamed(cells, names), rounds=20)
    then = _standings(after)
    for name, one in _standings(before).items():
        other = then[names[name]]
        assert other.strength == pytest.approx(one.strength, abs=EQUAL)
        exact = ("rank", "place", "median_rank", "rank_low", "rank_high", "challenges", "attempts")
        assert [getattr(other, key) for key in exact] == [getattr(one, key) for key in exact]
        assert other.p_first == pytest.approx(one.p_first)
        assert (other.score_low, other.score_high) == pytest.approx((one.score_low, one.score_high))
    for pair in before.pairs:
        odds = after.odds(names[pair.a], names[pair.b])
        assert (odds is None) == (pair.p is None)
        assert pair.p is None or odds == pytest.approx(pair.p)


def check_clone(cells):
    original = NAMES[0]
    mine = [cell for cell in cells if cell.entrant == original]
    clones = [cell.model_copy(update={"entrant": "clone"}) for cell in mine]
    table = ranking([*cells, *clones], rounds=20)
    standings = _standings(table)
    if original not in standings:
        assert "clone" in table.unranked or not mine
        return
    one, two = standings[original], standings["clone"]
    assert one.place == two.place
    assert one.place.endswith("=")
    assert one.model_dump(exclude={"entrant", "strength", "expected"}) == two.model_dump(
        exclude={"entrant", "strength", "expected"}
    )
    assert one.strength == pytest.approx(two.strength, abs=EQUAL)
    assert table.odds(original, "clone") == pytest.approx(0.5)
    record = duel([*cells, *clones], [original, "clone"]).records[0]
    assert (record.won, record.lost) == (0, 0)


def check_order_and_seed(cells, shuffled, seed):
    told = ranking(cells, rounds=20, seed=seed)
    assert ranking(shuffled, rounds=20, seed=seed) == told
    assert ranking(cells, rounds=20, seed=seed).model_dump_json() == told.model_dump_json()


def _permuting(cell):
    return given(fields(cell), st.permutations(NAMES))(check_permuting)


def _clone(cell):
    return given(fields(cell))(check_clone)


def _loss(cell):
    some = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)

    def check(cells, loser, winners):
        winners = [name for name in winners if name != loser]
        lost = [cell(loser, "new", 40.0), *(cell(name, "new", 60.0) for name in winners)]
        before, after = ranking(cells, rounds=1), ranking([*cells, *lost], rounds=1)
        ranks_before = {each.entrant: each.rank for each in before.standings}
        ranks_after = {each.entrant: each.rank for each in after.standings}
        if loser in ranks_before and set(winners) <= set(ranks_before):
            assert ranks_after[loser] >= ranks_before[loser]

    return given(fields(cell), st.sampled_from(NAMES), some)(check)


def _order_and_seed(cell):
    shuffled = fields(cell).flatmap(lambda cells: st.tuples(st.just(cells), st.permutations(cells)))

    def check(pair, seed):
        check_order_and_seed(*pair, seed)

    return given(shuffled, st.integers(0, 9))(check)


PROPERTIES = {
    "permuting entrants permutes results": _permuting,
    "a clone ties with its original": _clone,
    "adding a loss never improves a rank": _loss,
    "the bootstrap is reproducible, whatever the order of the cells": _order_and_seed,
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name, cell):
    FEW(PROPERTIES[name](cell))()


@pytest.mark.full
@pytest.mark.parametrize("name", PROPERTIES)
def test_property_many_times(name, cell):
    MANY(PROPERTIES[name](cell))()
