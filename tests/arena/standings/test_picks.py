from trapline.arena.standings.picks import picks

DIFFICULTY = {"c0": "medium", "c1": "research"}


def _by_criterion(cells, difficulty=DIFFICULTY):
    return {pick.criterion: pick for pick in picks(cells, difficulty)}


def test_nine_criteria_each_with_its_rule(field):
    found = picks(field(a=[80, 90], b=[90, 70]), DIFFICULTY)
    assert len(found) == 9
    assert all(pick.rule for pick in found)


def test_scores_decide_where_scores_are_asked_for(field):
    found = _by_criterion(field(deep=[80, 90], even=[84, 84], broad=[99, 60]))
    assert found["solve a hard algorithmic problem"].winners == ["deep"]
    assert found["most reliable across diverse tasks"].winners == ["even"]
    assert found["most reliable across diverse tasks"].values["broad"] == 60
    assert found["most improved as it gets harder"].winners == ["deep"]
    assert found["most improved as it gets harder"].values["deep"] == 10.0
    assert found["most complete participation"].winners == ["broad", "deep", "even"]


def test_dimensions_decide_where_dimensions_are_asked_for(cell):
    solid = {"correctness": 90.0, "traps": 90.0, "tests": 90.0, "code": 90.0, "analysis": 20.0}
    precise = {"correctness": 80.0, "traps": 70.0, "tests": 60.0, "code": 60.0, "precision": 99.0}
    cells = [
        cell("solid", "c0", 80.0, dimensions=solid | {"precision": 50.0}),
        cell("precise", "c0", 80.0, dimensions=precise | {"analysis": 90.0}),
    ]
    found = _by_criterion(cells)
    assert found["build a production system"].winners == ["solid"]
    assert found["build a production system"].margin == "decisive"
    assert found["write numerically perfect code"].winners == ["precise"]
    assert found["best documentation"].winners == ["precise"]
    assert found["best tests"].winners == ["solid"]


def test_the_first_attempt_is_the_quick_one(cell):
    cells = [
        cell("first", "c0", 80.0, attempt=1),
        cell("later", "c0", 60.0, attempt=1, state="fail"),
        cell("later", "c0", 95.0, attempt=2),
    ]
    pick = _by_criterion(cells)["get a correct answer quickly"]
    assert pick.winners == ["first"]
    assert pick.values == {"first": 100.0, "later": 0.0}


def test_pick_that_sets_nobody_apart_decides_nothing(field):
    found = _by_criterion(field(a=[80, 90], b=[80, 70]))
    assert found["solve a hard algorithmic problem"].decides
    assert not found["most complete participation"].decides
    assert not found["best tests"].decides


def test_unmeasured_criteria_have_no_pick(field):
    found = _by_criterion(field(a=[80, 90]), {})
    for name in ("best tests", "solve a hard algorithmic problem", "best documentation"):
        assert found[name].winners == []
        assert found[name].why_not
        assert found[name].margin is None


def test_one_good_cell_does_not_beat_a_whole_field(field):
    rows = {"lucky": [None, None, None, 99], "steady": [80, 80, 80, 80]}
    pick = _by_criterion(field(**rows), {"c3": "research"})["solve a hard algorithmic problem"]
    assert pick.winners == ["steady"]


def test_smallest_decline_is_not_an_improvement(field):
    pick = _by_criterion(field(a=[90, 80], b=[90, 50]))["most improved as it gets harder"]
    assert pick.winners == []
    assert pick.values == {"a": -10.0, "b": -40.0}
    assert "improves" in pick.why_not


def test_entrants_within_the_tie_band_share_a_pick(field):
    pick = _by_criterion(field(a=[80, 90.0], b=[80, 89.5]))["solve a hard algorithmic problem"]
    assert pick.winners == ["a", "b"]
    assert pick.margin == "tie"
