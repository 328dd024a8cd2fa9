"""The arithmetic of the benchmarks' protocol, with a clock that says what it is told."""

import importlib.util
import json
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

SOURCE = Path(__file__).parents[2] / "benchmarks" / "harness.py"


@pytest.fixture(scope="module")
def harness():
    """Benchmarks are scripts, not a package: loaded from their file."""
    spec = importlib.util.spec_from_file_location("trapline_benchmark_harness", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class Told:
    """A clock with a list of answers for every contender."""

    def __init__(self, **answers):
        self.answers = {name: iter(times) for name, times in answers.items()}

    def prepare(self, contender, rules):
        return lambda: next(self.answers[contender.name])


def contender(harness, name, **sizes):
    return harness.Contender(name, lambda number: lambda: None, **sizes)


def test_medians_quartiles_and_rates(harness):
    rules = harness.Rules(rounds=5, warm_up=0)
    ours, peer = contender(harness, "ours", bytes=10**9), contender(harness, "peer", flops=10**12)
    # The first contender is timed before and after its peers, and once to warm up.
    clock = Told(ours=[9] + [2.0] * 10, peer=[9, 5, 1, 3, 4, 2])
    first, second = harness.compare([ours, peer], "cpu", rules, clock=clock)
    assert (first.seconds, second.seconds) == (2.0, 3.0)
    assert (second.low, second.high) == (2.0, 4.0)
    assert first.gb_per_s == pytest.approx(0.5)
    assert second.tflop_per_s == pytest.approx(1 / 3)
    assert first.tflop_per_s is None
    assert second.raw == [5, 1, 3, 4, 2]
    assert harness.show([first, second]).splitlines()[2].split()[-1] == "1.50"


def test_a_round_that_drifts_is_repeated_but_not_for_ever(harness):
    rules = harness.Rules(rounds=2, warm_up=0, repeats=1)
    pair = [contender(harness, "ours"), contender(harness, "peer")]
    clock = Told(ours=[0, 1.0, 1.1, 1.0, 1.01, 1.0, 1.5], peer=[0, 7, 5, 6])
    ours, peer = harness.compare(pair, "cpu", rules, clock=clock)
    assert peer.raw == [5, 6]
    assert ours.raw == [1.005, 1.25]
    assert ours.repeated == 1


def test_data_sets_cover_what_must_be_touched(harness):
    rules = harness.Rules(touched=1000, most_sets=500)
    wanted = {0: 1, 1: 500, 300: 4, 1000: 1, 5000: 1}
    for size, sets in wanted.items():
        assert harness.data_sets(contender(harness, "x", bytes=size), rules) == sets


def test_the_slope_removes_what_a_burst_costs(harness):
    assert harness.slope(10 + 20 * 3, 10 + 40 * 3, 20) == 3
    assert harness.slope(2.0, 1.0, 20) > 0


def test_bursts_walk_through_the_sets_in_turn(harness):
    used = []
    watched = harness.Contender("x", lambda number: lambda: used.append(number), bytes=10)
    timer = harness.BurstClock().prepare(watched, harness.Rules(calls=4, touched=50))
    assert timer() > 0
    assert used == [i % 5 for i in range(12)]


def test_real_calls_are_timed_and_written(harness, tmp_path):
    rules = harness.Rules(rounds=2, calls=2, touched=0, warm_up=0, repeats=0)
    times = harness.compare(harness.ceilings(4096, "cpu"), "cpu", rules)
    assert [one.name for one in times] == ["copy", "read", "smallest kernel"]
    assert all(one.seconds > 0 for one in times)
    (slow,) = harness.compare(
        [contender(harness, "whole call")], "cpu", harness.Rules(2, warm_up=0), wall=True
    )
    assert len(slow.raw) == 2
    path = harness.write("thing", "cpu", {"copy": times}, folder=tmp_path, shapes=[[1, 2]])
    record = json.loads(path.read_text())
    assert path.parent.name == harness.device_name("cpu")
    assert {"torch", "numpy"} <= set(record["machine"]["versions"])
    assert record["results"]["copy"][0]["name"] == "copy"
    assert record["shapes"] == [[1, 2]]
    assert harness.measured_before("thing", "cpu", tmp_path) == record["results"]
    assert harness.measured_before("another", "cpu", tmp_path) == {}


def test_errors_are_against_float64(harness):
    exact = np.array([3.0, 4.0])
    found = harness.errors(torch.tensor([3.0, 4.5], dtype=torch.bfloat16), exact)
    assert found == {"relative": pytest.approx(0.1), "largest": 0.5}
    assert harness.eager_seconds(lambda: None, "cpu") >= 0


def test_a_graph_keeps_its_data(harness, monkeypatch):
    """A replay reads the addresses it was captured with, long after `prepare` has returned."""
    kept = []

    def make(_number):
        data = torch.zeros(1)
        kept.append(weakref.ref(data))
        return lambda: data

    clock = harness.GraphClock()
    monkeypatch.setattr(clock, "_captured", lambda sets, calls: calls)
    monkeypatch.setattr(clock, "_replay", float)
    timer = clock.prepare(harness.Contender("x", make, bytes=1), harness.Rules(touched=3))
    assert timer() == 1.0
    assert [one() is None for one in kept] == [False] * 3


def test_long_calls_fill_a_burst_and_settle_first(harness, monkeypatch):
    clock, replayed = harness.SteadyClock(burst=10.0), []

    def replay(calls):
        replayed.append(calls)
        return 3.0 * calls

    monkeypatch.setattr(clock, "_captured", lambda sets, calls: calls)
    monkeypatch.setattr(clock, "_replay", replay)
    monkeypatch.setattr(clock, "_once", lambda call: 3.0)
    timer = clock.prepare(contender(harness, "x"), harness.Rules())
    assert timer() == 3.0
    assert replayed == [4, 4]


@pytest.mark.needs_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_are_captured_and_replayed(harness):
    rules = harness.Rules(rounds=3, warm_up=0.05)
    copy, read, smallest = harness.compare(harness.ceilings(64 << 20, "cuda"), "cuda", rules)
    assert min(one.seconds for one in (copy, read, smallest)) > 0
    assert copy.gb_per_s > 0
