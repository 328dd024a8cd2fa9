"""Moments, common failures, silent bugs and shapes."""

from trapline.arena.record import Dimension
from trapline.arena.standings.failures import common_failures, silent_bugs
from trapline.arena.standings.moments import moments, spreads
from trapline.arena.standings.shape import shapes


def _field(cell):
    """Everybody falls into `deep`, half into `split`, one into `rare`, nobody into `none`."""
    falls = {"a": ["deep"], "b": ["deep", "split"], "c": ["deep", "split", "rare"], "d": ["deep"]}
    every = ("deep", "split", "rare", "none")
    return [
        cell(
            name, "one", 80.0 - 10 * len(fell), fell=fell, held=[t for t in every if t not in fell]
        )
        for name, fell in falls.items()
    ]


def test_the_traps_that_split_the_field_most(cell):
    found = moments(_field(cell))
    assert [moment.trap for moment in found] == ["split", "rare"]
    assert found[0].split == 1.0
    assert (found[0].fell, found[0].held) == (["b", "c"], ["a", "d"])
    assert moments(_field(cell), limit=1) == found[:1]


def test_moments_are_chosen_by_what_they_separate_not_by_the_alphabet(cell):
    every = ("alpha", "omega")
    falls = {"a": ["alpha"], "b": ["alpha", "omega"], "c": ["omega"], "d": []}
    scores = {"a": 90.0, "b": 40.0, "c": 50.0, "d": 80.0}
    cells = [
        cell(name, "one", scores[name], fell=fell, held=[t for t in every if t not in fell])
        for name, fell in falls.items()
    ]
    assert [moment.trap for moment in moments(cells)] == ["omega", "alpha"]
    assert moments(cells)[0].gap == 40.0


def test_traps_with_the_same_outcomes_are_one_moment(cell):
    cells = [
        cell("a", "one", 50.0, fell=["first", "second"]),
        cell("b", "one", 90.0, held=["first", "second"]),
    ]
    assert [moment.trap for moment in moments(cells)] == ["first"]


def test_a_fall_in_any_attempt_is_a_fall(cell):
    cells = [
        cell("a", "one", 80.0, attempt=1, fell=["t"]),
        cell("a", "one", 90.0, attempt=2, held=["t"]),
        cell("b", "one", 90.0, held=["t"]),
    ]
    assert moments(cells)[0].fell == ["a"]


def test_spreads_put_the_most_telling_challenge_first(field):
    found = spreads(field(a=[80, 90], b=[80, 40]))
    assert [each.challenge for each in found] == ["c1", "c0"]
    assert (found[0].best, found[0].worst, found[0].deviation) == (90.0, 40.0, 25.0)


def test_common_failures(cell):
    assert [moment.trap for moment in common_failures(_field(cell))] == ["deep", "split"]
    assert [moment.trap for moment in common_failures(_field(cell), least=0.9)] == ["deep"]


def test_silent_bugs_pass_their_own_tests(cell):
    def tested(name, report, **others):
        made = cell(name, "one", 80.0, **others)
        tests = Dimension(score=50.0, reason="", evidence={"own": report})
        return made.model_copy(update={"dimensions": {"tests": tests}})

    good = {"passed": 5, "failed": 0, "code": 0}
    cells = [
        tested("silent", good, fell=["t"]),
        tested("clean", good, held=["t"]),
        tested("wrong", good, state="fail"),
        tested("loud", {"passed": 4, "failed": 1, "code": 0}, fell=["t"]),
        tested("crashed", {"passed": 4, "failed": 0, "code": 3}, fell=["t"]),
        tested("empty", {"passed": 0, "failed": 0, "code": 5}, fell=["t"]),
        tested("mute", None, fell=["t"]),
        cell("untested", "one", 80.0, fell=["t"]),
    ]
    found = silent_bugs(cells)
    assert [(bug.entrant, bug.traps, bug.cases) for bug in found] == [
        ("silent", ["t"], []),
        ("wrong", [], ["contract"]),
    ]
    assert found[0].own_tests == 5


def test_a_shape_has_evidence_for_every_trait(cell):
    cells = [
        cell("a", "one", 90.0, dimensions={"tests": 95.0, "code": 50.0}, held=["t"]),
        cell("b", "one", 80.0, dimensions={"tests": 60.0, "code": 52.0}, fell=["t"]),
        cell("c", "one", 80.0, dimensions={"tests": 50.0, "code": 90.0}, fell=["t"]),
    ]
    a, b, _ = shapes(cells)
    assert [(trait.name, trait.evidence) for trait in a.strengths] == [
        ("t", "does not have the bug t; 2 of 2 others do"),
        ("tests", "tests 95.0, the others 55.0 on the same challenge"),
    ]
    assert [trait.name for trait in a.weaknesses] == ["code"]
    assert a.weaknesses[0].size == 21.0
    # Half of the others fell as well: that says nothing about b.
    assert "t" not in [trait.name for trait in b.weaknesses]
    assert a.dimensions["tests"] == 95.0
    assert a.dimensions["speed"] is None


def test_only_entrant_that_fell_has_a_weakness(cell):
    cells = [cell("a", "one", 80.0, fell=["t"])]
    cells += [cell(name, "one", 90.0, held=["t"]) for name in "bcd"]
    assert shapes(cells)[0].weaknesses[0].evidence == "has the bug t; 3 of 3 others do not"
    assert shapes(cells)[1].strengths == []


def test_a_lone_entrant_has_no_shape(cell):
    [alone] = shapes([cell("a", "one", 90.0, dimensions={"code": 90.0}, fell=["t"])])
    assert alone.strengths == alone.weaknesses == []
