"""Speed and memory of GPU answers, with host memory in place of a GPU."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from trapline.arena.errors import Violation
from trapline.arena.gpu import fresh_inputs, measure, timing, turns, yardsticks
from trapline.arena.gpu.contract import Entry, Output, Timed, bfloat16, narrow, rounded, widen
from trapline.arena.gpu.measure import Measurer, shares
from trapline.arena.gpu.rig import GpuSubmission, Rig
from trapline.arena.gpu.timing import Clock, Times
from trapline.arena.process.isolation.spec import SandboxLimits
from trapline.arena.process.session import SandboxConfig

ENTRIES = {"double": Entry(lambda x: (Output(x.shape, "float32"),))}
SOURCE = "def double(x, y):\n    y.copy_(2 * x)\n"
SHAPE = Timed(
    "64 float32",
    "double",
    lambda rng: (rng.standard_normal((8, 8)).astype(np.float32),),
    {"read": 256.0, "write": 256.0, "vector": 64.0},
)


@pytest.fixture
def measurer(tmp_path, monkeypatch):
    """Measures SOURCE, which is the gold solution and the only baseline as well."""
    # The clock has tests of its own; times of so small a call are noise. So has the comparison
    # with new inputs, whose visits are timed beside other tests.
    times = Times("eager", [3e-5, 2e-5, 1e-5], 4e-5)
    monkeypatch.setattr(Clock, "times", lambda *_: times)
    monkeypatch.setattr(fresh_inputs, "LEAST_SHARE", 0.0)
    lights = {"copy": 1e12, "read": 1e12, "bfloat16": 1e15, "float32": 1e14}
    monkeypatch.setattr(yardsticks, "_known", {"lights": lights, "runner": 0})
    for name in ("solution", "baselines/eager"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "solution.py").write_text(SOURCE)
    cases = SimpleNamespace(ENTRIES=ENTRIES, timed=lambda: [SHAPE])
    challenge = SimpleNamespace(
        id="double",
        digest="1",
        folder=tmp_path,
        solution=tmp_path / "solution",
        module=lambda _: cases,
    )
    limits = SandboxLimits(memory_mb=4096, processes=64, file_mb=256)
    config = SandboxConfig("landlock", limits, 30.0, ("torch",), device="cpu")
    with Rig("cpu") as rig, GpuSubmission(tmp_path / "solution", config, ENTRIES, rig) as answer:
        yield Measurer(challenge, answer)


@pytest.fixture
def orders(monkeypatch):
    """What runners are told: whose, what, and whether this cell has the GPU alone then."""
    entered, seen, tell = [], [], GpuSubmission.tell

    @contextmanager
    def alone(gpu):
        entered.append(gpu)
        yield
        entered.pop()

    def noted(submission, header, placed):
        seen.append((submission.folder.name, header["op"], bool(entered)))
        return tell(submission, header, placed)

    monkeypatch.setattr(turns, "alone", alone)
    monkeypatch.setattr(GpuSubmission, "tell", noted)
    return seen


def test_a_row_has_what_the_roofline_needs(measurer, orders):
    dimensions, raw = measurer.measure()
    (row,) = raw["shapes"]
    assert (row["bytes"], row["operations"]) == (512.0, 64.0)
    assert row["light"] == 512 / 1e12
    assert row["baseline name"] == "eager"
    assert row["seconds"] == row["gold"] == row["baseline"] == 2e-5
    assert (row["latency"], row["mode"], row["score"]) == (4e-5, "eager", 0.5)
    assert row["kernels"] == {}  # there is no GPU to profile
    assert dimensions["speed"].score == 50.0
    evidence = dimensions["memory"].evidence
    assert list(evidence["peak"]) == list(evidence["growth over all timed calls"]) == [SHAPE.name]
    # Only timings need the GPU alone: what compiles or profiles runs beside other cells' checks.
    assert {alone for _, op, alone in orders if op == "kernels"} == {False}
    assert next(alone for name, _, alone in orders if name == "eager") is False
    assert {alone for _, op, alone in orders if op == "burst"} == {True}


def test_a_time_below_the_speed_of_light_is_refused(measurer, monkeypatch):
    slow = {"copy": 1.0, "read": 1.0, "bfloat16": 1.0, "float32": 1.0}
    # The race with torch has its test above.
    race = {SHAPE.name: {"baseline": 2e-5, "baseline name": "eager", "gold": 2e-5}}
    yardsticks.recall({"lights": slow, measurer.challenge.digest: race})
    with pytest.raises(Violation, match="is the least that this GPU needs"):
        measurer.measure()


@pytest.mark.full
def test_the_profiled_process_leaves_nothing_for_the_timed_one(measurer, tmp_path):
    """It could write outputs beside the inputs, for the next process to find."""
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "solution.py").write_text(SOURCE + "    x.fill_(7)\n")
    gold = measurer.answer
    with GpuSubmission(changed, gold.config, ENTRIES, gold.rig) as answer:
        rings = yardsticks.learned(gold.rig, ENTRIES, [SHAPE], gold)
        Measurer(measurer.challenge, answer)._kernels(rings)
    for slot in rings[0].slots:
        assert np.array_equal(slot.read(slot.inputs[0]), slot.args[0])


@pytest.mark.full
def test_a_baseline_that_fails_takes_no_part(measurer):
    other = measurer.challenge.folder / "baselines/compiled"
    other.mkdir()
    (other / "solution.py").write_text("def double(x, y):\n    raise RuntimeError('no compiler')\n")
    _, raw = measurer.measure()
    assert raw["shapes"][0]["baseline name"] == "eager"


def test_shares_of_kernels_add_up_and_are_cut():
    assert shares({"gemm": 3.0, "copy": 1.0}) == {"gemm": 0.75, "copy": 0.25}
    many = shares({f"kernel {number}": 1.0 for number in range(50)})
    assert len(many) == measure.MOST_KERNELS
    (name,) = shares({"x" * 1000: 1.0})
    assert len(name) == measure.LONGEST_NAME


def test_what_is_no_time_gets_no_share():
    lies = {"nan": math.nan, "inf": math.inf, "text": "1", "none": None, "less": -1.0, "true": 2}
    assert shares(lies) == {"true": 1.0}
    assert shares({}) == {}


def test_values_of_bfloat16_keep_their_bits():
    exact = bfloat16(np.random.default_rng(1).standard_normal((4, 6)))
    exact[0, :3] = np.nan, np.inf, -np.inf
    bits = narrow(exact)
    assert np.array_equal(widen(bits), np.asarray(exact), equal_nan=True)
    between = np.asarray(exact) * np.float32(1 + 2.0**-20)
    assert np.array_equal(narrow(between), bits)
    assert narrow(np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [0x3F80, 0x3F82]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_scale_is_the_largest_finite_value(dtype):
    values = rounded(np.float32([0.5, -3.0, 2.0]), dtype)
    for extra in ([], [np.nan], [np.inf, -np.inf]):
        whole = np.append(np.asarray(values), np.float32(extra))
        stored = narrow(whole) if dtype == "bfloat16" else whole
        assert timing._scale(stored, dtype) == 3.0
    assert timing._scale(stored[:0], dtype) == 0.0


class Bursts(timing.Clock):
    """A clock whose bursts take what a call takes at that moment, and 1 ms once a burst."""

    def __init__(self, calls):
        self.ring, self.answer = SimpleNamespace(group=4), SimpleNamespace(ours=True)
        self.mode, self.calls = "graph", iter(calls)

    def burst(self, groups, patience=timing.LAG, *, whole=False):
        waiting = 20e-6 if patience == 1 else 0.0
        return 1e-3 + groups * (4 * next(self.calls) + waiting)


def test_a_time_that_was_disturbed_is_taken_again():
    """For a while calls take twice as long: the first seven rounds are slow, or some of them."""
    quiet, slow = [30e-6], [60e-6]
    for disturbed in (slow * 6 + quiet * 8, quiet * 8 + slow * 6, slow * 3 + quiet * 11):
        times = Bursts(quiet + disturbed + quiet * 60).times()
        assert times.best == pytest.approx(30e-6)
        assert times.latency == pytest.approx(50e-6)


def test_a_steady_time_is_taken_once():
    clock = Bursts([30e-6] * 17)
    assert clock.times().seconds == pytest.approx([30e-6] * 7)
    assert next(clock.calls, None) is None
