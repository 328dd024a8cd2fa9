"""The attention benchmark's problems, truths and bookkeeping, on tiny problems and a CPU."""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trapline.gold.attention import oracle

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = (
    "harness",
    "attention_cases",
    "attention_errors",
    "attention_memory",
    "attention_peers",
    "bench_attention",
)


@pytest.fixture
def bench(monkeypatch):
    """Scripts find each other by their folder; nothing of them stays behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("bench_attention")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    yield module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def peers(bench):
    return sys.modules["attention_peers"]


@pytest.fixture
def problems(bench):
    return sys.modules["attention_cases"]


def test_cases_are_all_there_and_the_most_important_come_first(bench):
    named = [f"{way} {one.name}" for way, one in bench.cases(None, quick=False)]
    assert named[0] == "forward D128 N16384 causal"
    assert len(set(named)) == len(named)
    for way in ("forward", "backward"):
        assert f"{way} D128 N8192 causal GQA 8:1" in named
        for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
            for width in (64, 128):
                for mask in ("causal", "full"):
                    assert f"{way} D{width} N{length} {mask}" in named
    quick = bench.cases("backward", quick=True)
    assert {way for way, _ in quick} == {"backward"}
    assert {f"{way} {one.name}" for way, one in quick} < set(named)


def test_operations_and_bytes_are_those_of_the_anchors(bench):
    one = bench.problem(16384, 128, True)
    assert (one.batch, one.heads) == (1, 16)
    assert one.flops == 4 * 16 * 16384**2 * 128 // 2
    assert one.bytes == 4 * 16384 * 2048 * 2
    assert bench.problem(4096, 64, False).batch == 4
    assert bench.problem(32768, 64, False).batch == 1
    assert bench.Case("backward", one).flops == one.flops * 5 // 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [4, 1])
def test_the_truth_is_the_oracles(problems, peers, causal, groups):
    one = peers.Problem(2, 4, groups, 24, 8, causal)
    drawn = one.draw(3, "cpu")
    q, k, v, dout = (x.double().numpy() for x in drawn)
    share = 4 // groups
    wanted = oracle.attention_backward(dout, q, k, v, causal=causal)
    for got, want in zip(problems.exactly(one, "backward", *drawn), wanted, strict=True):
        np.testing.assert_allclose(got[0], want[0, : got.shape[1]], atol=1e-12)
    (out,) = problems.exactly(one, "forward", *drawn)
    assert out.shape[1] == share
    np.testing.assert_allclose(
        out[0], oracle.attention(q, k, v, causal=causal)[0][0, :share], atol=1e-12
    )


def test_outliers_are_large_and_few(peers):
    one = peers.Problem(1, 4, 4, 512, 64, False)
    plain, struck = (one.draw(0, "cpu", outliers=on)[0].float() for on in (False, True))
    assert plain.abs().max() < 8 < struck.abs().max()
    assert (struck.abs() > 8).float().mean() < 1e-3


def test_a_case_is_timed_with_errors_and_with_those_who_cannot(bench, peers, monkeypatch):
    def sdpa(problem, q, k, v):
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=problem.causal)

    def broken(problem, q, k, v):
        raise ValueError("not this one\nand more")

    found = [
        peers.Method("SDPA", sdpa),
        peers.Method("broken", broken),
        peers.Method("elsewhere", sdpa, takes=lambda way, one: one.length > 100),
        peers.Method("backward only", backward=broken),
    ]
    monkeypatch.setattr(bench, "ceiling", lambda: bench.Contender("matmul", sdpa_like, flops=8))
    case = bench.Case("forward", peers.Problem(1, 2, 2, 32, 8, True), "cpu")
    result = bench.measured(case, found, quick=True)
    assert [one.name for one in result["times"]] == ["SDPA", "matmul"]
    assert result["left_out"] == {"broken": "ValueError: not this one"}
    assert 0 < result["errors"]["SDPA"]["out"]["relative"] < 1e-2
    assert set(result["share_of_matmul"]) == {"SDPA"}
    said = bench.shown(case.name, result)
    assert "left out: ValueError" in said
    assert "1.00x" in said
    written = json.loads(json.dumps(bench.rounded(result)))
    assert written["eager_seconds"] == {}
    assert written["times"][0]["seconds"] == float(f"{result['times'][0].seconds:.6g}")


def sdpa_like(_number):
    x = torch.randn(2, 2)
    return lambda: x @ x


def test_a_case_in_company_is_noticed(bench):
    def spread(by):
        return bench.Timing("x", 1.0, 1.0 - by / 2, 1.0 + by / 2, [])

    assert not bench._unsteady([spread(0.1), spread(0.1), spread(0.5)])
    assert bench._unsteady([spread(0.1), spread(0.4), spread(0.5)])


def test_answers_that_change_are_counted(bench):
    turns = iter(range(20))
    assert bench.repeats(lambda: [torch.ones(2)]) == 20
    assert bench.repeats(lambda: [torch.ones(2), torch.tensor(next(turns) // 5)]) == 5


def test_peers_that_compile_take_part_at_a_few_lengths(peers):
    found = {method.name: method for method in peers.methods(None)}
    flex, cudnn = found["FlexAttention"], found["cuDNN"]
    for length, forward, backward in (
        (512, False, False),
        (4096, True, True),
        (8192, True, False),
    ):
        one = peers.Problem(1, 16, 16, length, 128, True)
        assert (flex.takes("forward", one), flex.takes("backward", one)) == (forward, backward)
        assert cudnn.takes("forward", one)


def test_ours_are_listed_by_tier(peers):
    names = {method.name for method in peers.ours()}
    assert {"ours triton", "ours triton, deterministic"} <= names


def test_rounds_are_spent_where_goals_are(bench):
    assert bench.rounds(bench.problem(4096, 128, True), quick=False) == 7
    assert bench.rounds(bench.problem(1024, 128, True), quick=False) == 5
    assert bench.rounds(bench.problem(32768, 64, True), quick=False) == 3
    assert bench.rounds(bench.problem(4096, 128, True), quick=True) == 3


def test_a_second_run_adds_what_the_first_left_out(bench, monkeypatch, tmp_path, capsys):
    def cell(case, found, quick):
        one = bench.Timing("cuDNN", 1.0, 1.0, 1.0, [1.0], None, 1.0)
        return {"times": [one], "errors": {}, "share_of_matmul": {}, "left_out": {},
                "equal_of_20": {}}  # fmt: skip

    monkeypatch.setattr(bench, "measured", cell)
    monkeypatch.setattr(bench, "heat", lambda: None)
    listed = [(way, bench.problem(512, 64, True)) for way in ("forward", "backward")]
    monkeypatch.setattr(bench, "cases", lambda only, quick: listed)
    given = {"only": None, "quick": False, "cases": "forward", "seconds": 100.0, "more": False}
    for changes in ({}, {"cases": "", "more": True}):
        bench.sweep([], argparse.Namespace(**given | changes, folder=tmp_path), time.perf_counter())
    (path,) = tmp_path.rglob("attention.json")
    found = json.loads(path.read_text())["results"]
    runs = {name: one["run"] for name, one in found.items()}
    assert runs == {"forward D64 N512 causal": 1, "backward D64 N512 causal": 2}
    assert capsys.readouterr().out.count("forward D64 N512 causal") == 1


def test_errors_are_compared_with_a_peers_over_draws(bench, peers, problems):
    errors = importlib.import_module("attention_errors")

    def sdpa(problem, q, k, v):
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=problem.causal)

    found = [peers.Method("cuDNN", sdpa), peers.Method("ours", sdpa)]
    case = problems.Case("forward", peers.Problem(1, 1, 1, 24, 8, True), "cpu")
    result = errors.compared(case, found, draws=3)
    assert result["ours"]["out"]["ratio"] == result["cuDNN"]["out"]["ratio"] == 1.0
    assert 1e-4 < result["ours"]["out"]["error"] < 1e-2
    assert "1.0000 ± 0.0000" in errors.shown(case.name, result)
    doubled = errors.ratio([2.0, 4.0, 8.0], [1.0, 2.0, 1.0])
    assert doubled["ratio"] == pytest.approx(32 ** (1 / 3))
    assert doubled["highest"] == pytest.approx(8.0)
    assert doubled["standard_error"] == pytest.approx(doubled["ratio"] * np.log(4) / 3)
