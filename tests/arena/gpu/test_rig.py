"""The rig with host memory in place of a GPU: buffers, poison, borders, bursts."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from trapline.arena.errors import SubmissionDied, SubmissionRaised, Violation
from trapline.arena.gpu import memory
from trapline.arena.gpu.contract import POISON, Entry, Output, Timed, bfloat16, poison
from trapline.arena.gpu.measure import score
from trapline.arena.gpu.memory import FORCE_IPC, HostMemory
from trapline.arena.gpu.rig import GpuSubmission, Rig, pieces
from trapline.arena.gpu.timing import Clock, learn, make_ring
from trapline.arena.process.isolation.spec import SandboxLimits
from trapline.arena.process.session import SandboxConfig

ENTRIES = {"double": Entry(lambda x: (Output(x.shape, "float32"),))}
RIGHT = "def double(x, y):\n    y.copy_(2 * x)\n"
#: Everything that a wrong answer of these tests does, chosen by the first element of x.
WRONG = """
import ctypes

seen = []

def double(x, y):
    what = int(x.reshape(-1)[0])
    if what == 1:
        return 2 * x
    y.copy_(2 * x)
    if what == 2:
        ctypes.memset(y.data_ptr() - 8, 0, 4)
    if what == 3:
        ctypes.string_at(y.data_ptr() + y.numel() * 4 + 16, 1)
    if what == 4:
        x.add_(1)
    if what == 5:
        raise ValueError("not today")
"""
CACHED = """
first = []

def double(x, y):
    if not first:
        first.append(2 * x.clone())
    y.copy_(first[0])
"""


@pytest.fixture(scope="module")
def rig():
    with Rig("cpu") as made:
        yield made


@pytest.fixture(scope="module")
def answer_of(rig, tmp_path_factory):
    opened = []

    def make(source, name="solution.py", level="landlock"):
        folder = tmp_path_factory.mktemp("answer")
        (folder / name).write_text(source)
        limits = SandboxLimits(memory_mb=4096, processes=64, file_mb=256)
        config = SandboxConfig(level, limits, 30.0, ("torch",), device="cpu")
        opened.append(GpuSubmission(Path(folder), config, ENTRIES, rig))
        return opened[-1]

    yield make
    for submission in opened:
        submission.close()


@pytest.fixture(scope="module")
def right(answer_of):
    return answer_of(RIGHT)


@pytest.fixture(scope="module")
def wrong(answer_of):
    return answer_of(WRONG)


def ones(what):
    return np.full((2, 4), what, np.float32)


def test_the_judge_survives_an_interrupt_of_its_group(rig):
    os.kill(rig.judge._process.pid, signal.SIGINT)
    assert rig.judge.ask("free_bytes") > 0


def test_an_answer_reads_inputs_and_writes_outputs(right):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(right.double(x), 2 * x)


@pytest.mark.parametrize("level", ["process", "bubblewrap"])
def test_an_answer_runs_at_the_other_levels(answer_of, level):
    assert np.array_equal(answer_of(RIGHT, level=level).double(ones(3)), ones(6))


def test_inputs_can_come_during_the_call(right):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(right.late_inputs("double", x), 2 * x)


def test_strides_of_padded_rows_are_kept(right):
    x = np.arange(24, dtype=np.float32).reshape(3, 8)[:, :5]
    assert np.array_equal(right.double(x), 2 * x)


def test_bfloat16_travels_as_bfloat16(right):
    x = bfloat16(np.array([[1.0, 2.0**-9, 3.14159]]))
    assert np.array_equal(right.double(x), 2 * np.asarray(x))


def test_missing_entry_points_are_named(right):
    assert right.fresh().start(["double", "triple"]) == ["triple"]


def test_an_answer_that_returns_is_told_that_nothing_was_written(wrong):
    with pytest.raises(Violation, match="did not write its output 0; it returned a Tensor instead"):
        wrong.double(ones(1))


def test_writing_before_an_output_is_seen(wrong):
    with pytest.raises(Violation, match="wrote outside its output 0"):
        wrong.double(ones(2))


def test_reading_beyond_a_buffer_ends_the_runner_and_the_next_call_is_right(wrong):
    with pytest.raises(SubmissionDied, match="SIGSEGV"):
        wrong.double(ones(3))
    assert np.array_equal(wrong.double(ones(7)), ones(14))


@pytest.fixture
def margin_rig(monkeypatch):
    """Buffers as with CUDA IPC: behind a tensor lies poison instead of an unmapped page."""
    monkeypatch.setattr(HostMemory, "margin", 4096)
    with Rig("cpu", local=True) as made:
        yield made


def test_writing_behind_an_output_is_seen_where_memory_follows(margin_rig, tmp_path):
    text = "import ctypes\n\ndef double(x, y):\n    y.copy_(2 * x)\n"
    text += "    ctypes.memset(y.data_ptr() + y.nbytes + int(x[0, 0]), 0, 1)\n"
    (tmp_path / "solution.py").write_text(text)
    limits = SandboxLimits(memory_mb=4096, processes=64, file_mb=256)
    config = SandboxConfig("landlock", limits, 30.0, ("torch",), device="cpu")
    with GpuSubmission(tmp_path, config, ENTRIES, margin_rig) as answer:
        assert np.array_equal(answer.double(ones(-1)), [[-2, -2, -2, -2], [-2, -2, -2, 0]])
        for distance in (0, 4000):
            with pytest.raises(Violation, match="wrote outside its output 0, behind its end"):
                answer.double(ones(distance))


class FakeDriver:
    """Calls of the CUDA driver, with the address of an allocation as its IPC handle."""

    def __init__(self, shares_descriptors):
        self.shares_descriptors, self.open = shares_descriptors, []

    def __getattr__(self, name):
        return lambda *args: 0

    def cuDeviceGetAttribute(self, value, which, device):
        value._obj.value = self.shares_descriptors
        return 0

    def cuMemAlloc_v2(self, place, size):
        place._obj.value = 1 << 40
        return 0

    def cuIpcGetMemHandle(self, handle, place):
        handle._obj.name[:8] = place.value.to_bytes(8, "little")
        return 0

    def cuIpcOpenMemHandle_v2(self, place, handle, flags):
        place._obj.value = int.from_bytes(bytes(handle.name)[:8], "little") + 7
        return 0


@pytest.mark.parametrize(
    ("shares", "forced", "sharing"),
    [(1, "", "descriptors"), (0, "", "CUDA IPC"), (1, "1", "CUDA IPC")],
)
def test_memory_is_shared_by_ipc_where_the_driver_has_no_descriptors(
    monkeypatch, shares, forced, sharing
):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: FakeDriver(shares))
    monkeypatch.setenv(FORCE_IPC, forced)
    assert memory.judges_memory("cuda").sharing == sharing


def test_an_ipc_handle_travels_in_a_descriptor(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: FakeDriver(0))
    judge, runner = memory.judges_memory("cuda"), memory.memory("cuda", "CUDA IPC")
    made, descriptor = judge.create(judge.granule)
    assert judge.map(made, judge.granule) == 1 << 40
    assert runner.map(runner.take(descriptor), judge.granule) == (1 << 40) + 7
    os.close(descriptor)


def test_a_changed_input_is_observed(wrong):
    _, (left,) = wrong.observe("double", ones(4))
    assert np.array_equal(left, ones(5))


def test_an_exception_carries_its_place(wrong):
    with pytest.raises(SubmissionRaised, match="not today") as raised:
        wrong.double(ones(5))
    assert "solution.py" in raised.value.where


def test_a_cuda_answer_that_does_not_compile_shows_the_first_error(answer_of):
    broken = answer_of("int main( {", "solution.cu")
    with pytest.raises(SubmissionRaised, match="CompileError"):
        broken.start(["double"])


@pytest.fixture(scope="module")
def ring(rig, right):
    timed = Timed("small", "double", lambda rng: (rng.standard_normal((64, 32)).astype("f"),), {})
    made = make_ring(rig, ENTRIES, timed, np.random.default_rng(3))
    learn(made, right)
    yield made
    made.release()


def test_a_right_answer_has_a_time(ring, right):
    times = Clock(ring, right).times(2)
    assert times.mode == "eager"
    assert all(seconds >= 0 for seconds in times.seconds)


def test_an_answer_that_remembers_takes_a_wrong_path(ring, answer_of):
    clock = Clock(ring, answer_of(CACHED))
    # Twenty decisions at least: by chance it would go the right way once in a million times.
    with pytest.raises(Violation, match="timed call"):
        clock.burst(24)


def test_two_threads_ask_the_judge_at_once(rig):
    """As when GPU memory is watched during a call."""
    number, descriptor = rig.judge.create(1 << 16)
    os.close(descriptor)
    stop, free = threading.Event(), []

    def watch():
        while not stop.is_set():
            free.append(rig.judge.ask("free_bytes"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for turn in range(200):
            data = bytes([turn]) * (1 << 16)
            rig.judge.write(number, 0, data)
            assert rig.judge.read(number, 0, 1 << 16) == data
    finally:
        stop.set()
        watcher.join(10)
    assert not watcher.is_alive()
    assert all(type(count) is int and count > 1 << 20 for count in free)


def test_the_size_of_a_buffer_is_sealed(rig):
    _, descriptor = rig.judge.create(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_rows_far_apart_are_written_one_by_one():
    wide = np.zeros((2, 1000), np.float32)
    found = dict(pieces(wide[:, :3]))
    assert {offset: len(data) for offset, data in found.items()} == {0: 12, 4000: 12}


def test_poison_is_no_plausible_answer():
    assert poison((2,), "float32")[0] > 1e38
    assert np.isnan(poison((2,), "float16")).all()
    assert poison((4,), "uint8").tolist() == [POISON] * 4


@pytest.mark.parametrize(
    ("seconds", "light", "baseline", "expected"),
    [(1.0, 1.0, 2.0, 1.0), (2.0, 1.0, 2.0, 0.5), (1.5, 1.0, 2.0, 0.75), (4.0, 1.0, 2.0, 0.25)],
)
def test_the_score_of_a_time(seconds, light, baseline, expected):
    assert score(seconds, light, baseline) == pytest.approx(expected)
