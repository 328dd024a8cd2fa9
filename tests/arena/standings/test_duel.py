import pytest

from trapline.arena.errors import UsageError
from trapline.arena.record import Dimension
from trapline.arena.standings.anatomy import anatomy
from trapline.arena.standings.duel import duel


def test_record_is_counted_and_a_level_record_has_no_leader(field):
    result = duel(field(a=[90, 80, 70, 60], b=[80, 90, 70, 60.5]), ["a", "b"])
    tally = result.records[0]
    assert (tally.won, tally.lost, tally.tied) == (1, 1, 2)
    assert tally.text == "1-1-2"
    assert tally.sentence == "a and b are level, 1-1-2"


def test_the_leader_is_named_with_the_record_from_its_side(field):
    result = duel(field(a=[90, 80, 70], b=[80, 90, 90]), ["a", "b"])
    assert result.records[0].text == "1-2-0"
    assert result.records[0].sentence == "b leads 2-1-0"
    assert result.record("b", "a").text == "2-1-0"
    assert result.record("b", "a").difference == pytest.approx(20 / 3)
    with pytest.raises(KeyError):
        result.record("a", "stranger")


def test_margins_of_the_bouts(field):
    bouts = duel(field(a=[90, 90, 90, 90], b=[89.5, 88, 83, 70]), ["a", "b"]).bouts
    assert [bout.margin for bout in bouts] == ["tie", "narrow", "moderate", "decisive"]
    assert [bout.winners for bout in bouts] == [["a", "b"], ["a"], ["a"], ["a"]]


def test_three_ways(field):
    result = duel(field(a=[90, 50, 70], b=[80, 60, 70], c=[70, 70, None]), ["a", "b", "c"])
    assert [bout.winners for bout in result.bouts] == [["a"], ["c"], ["a", "b"]]
    assert {(t.a, t.b): t.text for t in result.records} == {
        ("a", "b"): "1-1-1",
        ("a", "c"): "1-1-0",
        ("b", "c"): "1-1-0",
    }
    assert result.verdict == "Outright wins over 3 challenges: a 1, b 0, c 1."


def test_only_shared_challenges_are_compared(field):
    cells = field(a=[90, None, 80], b=[80, 70, None], other=[50, 50, 50, 50])
    result = duel(cells, ["a", "b"])
    assert [bout.challenge for bout in result.bouts] == ["c0"]
    assert result.not_compared == ["c1", "c2"]
    apart = duel(field(a=[90, None], b=[None, 70]), ["a", "b"])
    assert apart.bouts == []
    assert "cannot be compared" in apart.verdict


def test_unmeasured_criteria_decide_nothing(cell):
    cells = [cell("a", "one", 90.0), cell("b", "one", None), cell("b", "two", 10.0)]
    assert duel(cells, ["a", "b"]).records[0].text == "0-0-0"


def test_an_edge_for_each_criterion_with_the_numbers_behind_it(cell):
    cells = [
        cell("a", "one", 90.0, dimensions={"tests": 80.0, "speed": 50.0}, held=["t1", "t2"]),
        cell("b", "one", 80.0, dimensions={"tests": 95.0}, fell=["t1"], held=["t2"]),
    ]
    result = duel(cells, ["a", "b"])
    edges = {edge.criterion: edge for edge in result.bouts[0].edges}
    assert edges["tests"].winners == ["b"]
    assert edges["tests"].margin == "decisive"
    assert edges["tests"].values == {"a": 80.0, "b": 95.0}
    assert edges["tests"].behind["b"] == "tests was looked at"
    assert edges["speed"].winners == []
    assert edges["speed"].margin is None
    assert edges["findings"].winners == ["a"]
    assert edges["findings"].values == {"a": 0.0, "b": 1.0}
    assert edges["findings"].behind["b"] == "t1"
    overall = {edge.criterion: edge for edge in result.edges}
    assert overall["tests"].winners == ["b"]
    assert overall["tests"].behind["a"] == "mean of 1 challenge"


def test_overall_edges_use_the_same_challenges_for_everyone(cell):
    cells = [
        cell("a", "one", 90.0, dimensions={"code": 60.0}),
        cell("b", "one", 80.0, dimensions={"code": 70.0}),
        cell("a", "two", 90.0, dimensions={"code": 100.0}),
        cell("b", "two", 80.0, dimensions={"code": None}),
    ]
    edges = {edge.criterion: edge for edge in duel(cells, ["a", "b"]).edges}
    assert edges["code"].values == {"a": 60.0, "b": 70.0}


def test_several_attempts_are_averaged(cell):
    cells = [
        cell("a", "one", 60.0, attempt=1, state="fail"),
        cell("a", "one", 90.0, attempt=2),
        cell("b", "one", 80.0),
    ]
    bout = duel(cells, ["a", "b"]).bouts[0]
    assert bout.scores == {"a": 75.0, "b": 80.0}
    assert bout.letters["a"] == "C"
    assert bout.states == {"a": "1 of 2 pass", "b": "pass"}
    assert bout.winners == ["b"]


def test_unknown_entrant_lists_the_known_ones(field):
    cells = field(a=[1], b=[2])
    with pytest.raises(UsageError, match="no entrant 'z' in this run; its entrants: a, b"):
        duel(cells, ["a", "z"])
    for entrants in (["a"], ["a", "a"]):
        with pytest.raises(UsageError, match="two or more different"):
            duel(cells, entrants)


def test_undetectable_difference_is_not_quoted(field):
    small = duel(field(a=[90, 50, 70, 85], b=[80, 60, 72, 70]), ["a", "b"])
    assert small.verdict == (
        "a and b are level, 2-2-0; over 4 challenges their mean scores cannot be told apart."
    )
    large = duel(field(a=[90, 91, 92], b=[50, 51, 53]), ["a", "b"])
    assert "the mean score of a is 39.7 points higher (95 % interval 38.2 to 41.1)" in large.verdict


def test_clean_sweep_is_not_called_a_tie(field):
    swept = duel(field(a=[99, 98, 97, 96, 95, 94], b=[97, 90, 91, 93, 80, 92]), ["a", "b"])
    assert "the mean score of a is 6.0 points higher" in swept.verdict
    assert swept.records[0].difference < swept.records[0].smallest_visible


def test_no_verdict_names_a_limit_beyond_the_scale(field):
    wild = duel(field(a=[100, 0], b=[0, 60]), ["a", "b"])
    assert wild.records[0].smallest_visible > 100
    assert not [word for word in wild.verdict.split() if word.replace(".", "").isdigit()][1:]


def test_higher_mean_is_named_even_against_the_record(field):
    rows = {"a": [51] * 9 + [0], "b": [50] * 9 + [100]}
    one = duel(field(a=[90], b=[60]), ["a", "b"])
    assert one.verdict == "a leads 1-0-0, 30.0 points apart on the only shared challenge."
    assert "mean scores cannot be told apart" in duel(field(**rows), ["a", "b"]).verdict


def test_named_measures_have_an_edge_for_the_lower_one(cell):
    def measured(name, ratio, ratios, peaks):
        evidence = {
            "speed": {"ratio": ratio, "noise": 0.05},
            "precision": {"ratios": ratios},
            "memory": {"extra_bytes": peaks},
        }
        dimensions = {k: Dimension(score=50.0, reason="", evidence=v) for k, v in evidence.items()}
        return cell(name, "one", 50.0).model_copy(update={"dimensions": dimensions})

    cells = [measured("a", 1.04, [1.0, 4.0], [2**21]), measured("b", 0.4, [4.1], [2**20, 2**19])]
    result = duel(cells, ["a", "b"])
    edges = {edge.criterion: edge for edge in result.bouts[0].edges}
    assert (edges["time per call"].winners, edges["time per call"].margin) == (["a"], "decisive")
    # Within the noise of the reference's own timings.
    assert edges["time per call"].text("a") == "1 × reference"
    assert edges["time per call"].text("b") == "2.5 × reference"
    assert edges["largest error"].winners == ["a", "b"]
    assert edges["peak memory"].winners == ["b"]
    # Milliseconds of different challenges have no mean.
    assert "time per call" not in {edge.criterion for edge in result.edges}


def test_anatomy_is_compared_where_it_is_known(cell):
    cells = [cell("a", "one", 50.0, bundle="A"), cell("b", "one", 50.0, bundle="B")]
    files = {"solution.py": "def f():\n    return 1\n"}
    tests = {"test_f.py": "def test_f():\n    assert f() == 1\n    assert f\n"}
    known = {"A": anatomy(files), "B": anatomy(files | tests)}
    assert known["B"].functions == 1
    edges = {edge.criterion: edge for edge in duel(cells, ["a", "b"], known).bouts[0].edges}
    assert edges["assertions"].values == {"a": 0.0, "b": 2.0}
    assert edges["assertions"].winners == ["b"]
    assert edges["lines of code"].winners == ["a"]
    assert edges["files"].winners == []
    assert edges["files"].is_comparison
    assert not edges["cost"].is_comparison


def test_figures_that_a_challenge_names_have_an_edge(cell):
    def named(name, **measures):
        return cell(name, "one", 90).model_copy(
            update={"measures": {key.replace("_", " "): value for key, value in measures.items()}}
        )

    cells = [
        named("a", perplexity=12.5, accepted_length=3.1, calls_of_the_model=16),
        named("b", perplexity=20.0, accepted_length=2.9, calls_of_the_model=16),
    ]
    edges = {edge.criterion: edge for edge in duel(cells, ["a", "b"]).bouts[0].edges}
    assert (edges["perplexity"].winners, edges["perplexity"].margin) == (["a"], "moderate")
    assert edges["perplexity"].text("a") == "12.5"
    assert (edges["accepted length"].winners, edges["accepted length"].margin) == (["a"], "narrow")
    assert edges["accepted length"].text("b") == "2.9 tokens a pass"
    assert edges["calls of the model"].winners == ["a", "b"]
    assert not edges["cache bytes per token"].is_comparison


def test_throughput_is_operations_over_time(cell):
    def timed(name, milliseconds):
        evidence = {"milliseconds": {"submission": milliseconds}, "operations": 5e9}
        speed = Dimension(score=50.0, reason="", evidence=evidence)
        return cell(name, "one", 90).model_copy(update={"dimensions": {"speed": speed}})

    bout = duel([timed("a", 10.0), timed("b", 20.0)], ["a", "b"]).bouts[0]
    edge = next(edge for edge in bout.edges if edge.criterion == "throughput")
    assert (edge.text("a"), edge.text("b")) == ("0.5 TFLOP/s", "0.25 TFLOP/s")
    assert edge.winners == []


def test_gpu_answers_are_compared_by_throughput_and_beside_torch(cell):
    def timed(name, *seconds):
        rows = [{"seconds": s, "baseline": 1e-3, "operations": 5e11} for s in seconds]
        speed = Dimension(score=50.0, reason="", evidence={"shapes": rows})
        return cell(name, "one", 90, track="gpu").model_copy(
            update={"dimensions": {"speed": speed}}
        )

    bout = duel([timed("a", 1e-3, 4e-3), timed("b", 5e-4, 2e-3)], ["a", "b"]).bouts[0]
    edges = {edge.criterion: edge for edge in bout.edges}
    assert edges["GPU throughput"].text("b") == "1,000 TFLOP/s"
    assert edges["GPU throughput"].winners == ["b"]
    assert edges["GPU time per call"].text("a") == "2 × torch's best"
    assert edges["GPU time per call"].winners == ["b"]
    assert not edges["time per call"].is_comparison
