"""How every benchmark here measures: one protocol, peers in the same run, losses shown.

A benchmark builds contenders and hands them over:

    from harness import Contender, Rules, compare, errors, show, write

    def make(number):                     # data set `number`: inputs of its own, N(0, 1)
        x = torch.randn(rows, width, device=device)
        return lambda: layer_norm(x, weight, bias)

    times = compare([Contender("ours", make, bytes=2 * rows * width * 4), …], device, Rules())
    print(show(times))                    # ratios to the first contender
    write("norms", device, times)         # benchmarks/results/<device>/norms.json

*Device time* on a GPU is the replay of a CUDA graph of R calls that walk through as many data
sets as it takes to touch `touched` bytes before one comes again (so the L2 cache is cold), and of
2R calls: time = (replay of 2R − replay of R) / R, which removes what a launch costs. On a CPU the
same bursts run under `perf_counter`. Contenders take turns in every round, in an order that
changes; a round in which the first contender moved by more than `drift` is repeated. What is
reported is the median with its quartiles. Calls of a millisecond and more may be timed by
`SteadyClock` instead, which says why. Copy, read and the smallest kernel are contenders like
any other (`ceilings`), measured in the same rounds. `wall=True` is for calls that cannot be
captured (a whole generation): one call at a time, device synchronised.

A time is never asserted anywhere. Errors against float64 (`errors`) stand beside the times.
"""

import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """Something to time. `make(i)` builds the call on data set i, which it keeps alive."""

    name: str
    make: Callable[[int], Call]
    #: What one call must move and compute: for GB/s and TFLOP/s, and for how many sets there are.
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Rules:
    """The protocol's numbers."""

    rounds: int = 7
    calls: int = 20
    touched: int = 256 << 20
    #: A graph holds each set at least once; calls of less than a few hundred KB stay warm.
    most_sets: int = 1024
    warm_up: float = 0.5
    drift: float = 0.03
    #: How many rounds may be repeated in all before the spread has to speak for itself.
    repeats: int = 7


@dataclass(frozen=True)
class Timing:
    """What one contender took a call, in seconds."""

    name: str
    seconds: float
    low: float
    high: float
    raw: list[float] = field(repr=False)
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    repeated: int = 0


class Clock(Protocol):
    """Prepares a contender once, then says how long a call takes, as often as asked."""

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]: ...


def compare(
    contenders: Sequence[Contender],
    device: str,
    rules: Rules | None = None,
    *,
    wall: bool = False,
    clock: Clock | None = None,
) -> list[Timing]:
    """Times all contenders in turn; the first is the one whose drift repeats a round."""
    rules = rules or Rules()
    clock = clock or choose_clock(device, wall=wall)
    timers = [clock.prepare(contender, rules) for contender in contenders]
    _warm_up(timers, rules.warm_up)
    rows: list[list[float]] = [[] for _ in contenders]
    order, repeated = random.Random(0), 0
    while len(rows[0]) < rules.rounds:
        taken, moved = _round(timers, order)
        if moved > rules.drift and repeated < rules.repeats:
            repeated += 1
            continue
        for row, seconds in zip(rows, taken, strict=True):
            row.append(seconds)
    return [timing(c, row, repeated) for c, row in zip(contenders, rows, strict=True)]


def choose_clock(device: str, *, wall: bool) -> Clock:
    if wall:
        return WallClock(device)
    return GraphClock() if device.startswith("cuda") else BurstClock()


def _warm_up(timers: Sequence[Callable[[], float]], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while True:
        for timer in timers:
            timer()
        if time.perf_counter() >= end:
            return


def _round(
    timers: Sequence[Callable[[], float]], order: random.Random
) -> tuple[list[float], float]:
    """Times every contender once, the first before and after the others; and its change."""
    places = list(range(1, len(timers)))
    order.shuffle(places)
    taken = [0.0] * len(timers)
    before = timers[0]()
    for place in places:
        taken[place] = timers[place]()
    after = timers[0]() if places else before
    taken[0] = (before + after) / 2
    return taken, abs(after - before) / min(before, after)


def timing(contender: Contender, raw: list[float], repeated: int = 0) -> Timing:
    """Median and quartiles, and what they mean in bytes and operations."""
    middle = median(raw)
    low, _, high = quantiles(raw, n=4, method="inclusive") if len(raw) > 1 else (middle,) * 3
    return Timing(
        contender.name,
        middle,
        low,
        high,
        raw,
        contender.bytes / middle / 1e9 if contender.bytes else None,
        contender.flops / middle / 1e12 if contender.flops else None,
        repeated,
    )


def data_sets(contender: Contender, rules: Rules) -> int:
    """How many sets it takes until `touched` bytes lie between two uses of one."""
    if not contender.bytes:
        return 1
    return max(1, min(-(-rules.touched // contender.bytes), rules.most_sets))


def slope(single: float, double: float, calls: int) -> float:
    """A call's time from bursts of `calls` and of twice as many; never below nothing."""
    return max(double - single, 1e-12) / calls


class BurstClock:
    """`perf_counter` around bursts of calls: for the CPU."""

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        sets = [contender.make(number) for number in range(data_sets(contender, rules))]
        at = 0

        def burst(calls: int) -> float:
            nonlocal at
            started = time.perf_counter()
            for number in range(at, at + calls):
                sets[number % len(sets)]()
            at += calls
            return time.perf_counter() - started

        return lambda: slope(burst(rules.calls), burst(2 * rules.calls), rules.calls)


class WallClock:
    """One call at a time, with the device idle before and after."""

    def __init__(self, device: str) -> None:
        self.device = device

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        del rules  # a call is long enough to be timed alone
        call = contender.make(0)

        def once() -> float:
            self._wait()
            started = time.perf_counter()
            call()
            self._wait()
            return time.perf_counter() - started

        return once

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


class GraphClock:
    """CUDA-graph replays between events."""

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        sets = [contender.make(number) for number in range(data_sets(contender, rules))]
        calls = max(rules.calls, len(sets))
        once, twice = (self._captured(sets, count) for count in (calls, 2 * calls))

        def timer(_alive: Any = sets) -> float:  # a graph holds addresses, not the tensors there
            return slope(self._replay(once), self._replay(twice), calls)

        return timer

    @staticmethod
    def _captured(sets: list[Call], calls: int) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in sets[:3]:
                call()  # compilation and workspaces, before anything is captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Outputs stay alive as long as inputs rotate, or each would reuse the one before it.
        kept: deque[Any] = deque(maxlen=len(sets))
        with torch.cuda.graph(graph):
            for number in range(calls):
                kept.append(sets[number % len(sets)]())
        return graph

    @staticmethod
    def _replay(graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class SteadyClock(GraphClock):
    """One graph of at least `burst` seconds, replayed before it is timed: for long calls.

    A GPU at its power limit changes clocks from kernel to kernel, within milliseconds. The first
    replay is spent on settling; the launch, which the slope of two graphs would remove, is a
    thousandth or two of the second one. The slope would multiply what is left of the change.
    """

    def __init__(self, burst: float = 6e-3) -> None:
        self.burst = burst

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        sets = [contender.make(number) for number in range(data_sets(contender, rules))]
        calls = max(len(sets), math.ceil(self.burst / self._once(sets[0])))
        graph = self._captured(sets, calls)

        def timer(_alive: Any = sets) -> float:
            self._replay(graph)
            return self._replay(graph) / calls

        return timer

    @staticmethod
    def _once(call: Call) -> float:
        """About how long a call takes; its second time, when all is compiled."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def ceilings(size: int, device: str) -> list[Contender]:
    """Copy and read of `size` bytes in all, and the smallest kernel: what the machine can do."""

    def copy(_number: int) -> Call:
        source = torch.randn(max(1, size // 8), device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def read(_number: int) -> Call:
        source = torch.randn(max(1, size // 4), device=device)
        return lambda: source.sum()

    def empty(_number: int) -> Call:
        one = torch.zeros(1, device=device)
        return lambda: one.zero_()

    return [
        Contender("copy", copy, bytes=size),
        Contender("read", read, bytes=size),
        Contender("smallest kernel", empty),
    ]


def eager_seconds(call: Call, device: str) -> float:
    """Wall time of a plain call: `do_bench` on a GPU, the median of ten on a CPU."""
    if device.startswith("cuda"):
        from triton.testing import do_bench

        return float(do_bench(call, return_mode="median")) / 1e3
    taken = []
    for _ in range(10):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)


def errors(got: Any, exact: Any) -> dict[str, float]:
    """Of an answer against float64: relative in the 2-norm, and the largest difference."""
    got, exact = (_float64(value) for value in (got, exact))
    scale = max(float(np.linalg.norm(exact)), 1e-300)
    difference = got - exact
    return {
        "relative": float(np.linalg.norm(difference)) / scale,
        "largest": float(np.max(np.abs(difference), initial=0.0)),
    }


def _float64(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64)


def show(times: Sequence[Timing], unit: str = "µs") -> str:
    """A table; the last column is how many times faster the first contender is."""
    scale = {"µs": 1e6, "ms": 1e3, "s": 1.0}[unit]
    wide = max(len(one.name) for one in times)
    head = f"{'':{wide}}  {unit:>10}  {'quartiles':>21}  {'GB/s':>8}  {'TFLOP/s':>8}  {'ratio':>6}"
    lines = [head]
    for one in times:
        spread = f"{one.low * scale:.4g} – {one.high * scale:.4g}"
        rates = [f"{x:8.1f}" if x else " " * 8 for x in (one.gb_per_s, one.tflop_per_s)]
        ratio = one.seconds / times[0].seconds
        lines.append(
            f"{one.name:{wide}}  {one.seconds * scale:10.4g}  {spread:>21}  {'  '.join(rates)}"
            f"  {ratio:6.2f}"
        )
    return "\n".join(lines)


def machine(device: str) -> dict[str, Any]:
    """Where and with what it was measured."""
    facts: dict[str, Any] = {
        "device": device_name(device),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }
    if device.startswith("cuda"):
        facts["cuda"] = torch.version.cuda
        facts["state"] = gpu_state()
    return facts


def device_name(device: str) -> str:
    """`NVIDIA H200` or `cpu-aarch64`."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"cpu-{platform.machine()}"


def gpu_state() -> dict[str, str]:
    """Clocks, power and temperature at this moment, if the driver's tool is there to say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    names = "clocks.sm,clocks.mem,power.draw,temperature.gpu,driver_version"
    command = [tool, f"--query-gpu={names}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    values = said.stdout.splitlines()[0].split(", ") if said.returncode == 0 else []
    return dict(zip(names.split(","), values, strict=False))


def results_file(component: str, device: str, folder: Path = RESULTS) -> Path:
    return folder / device_name(device).replace(" ", "-").lower() / f"{component}.json"


def write(
    component: str, device: str, results: Any, *, folder: Path = RESULTS, **more: Any
) -> Path:
    """`results/<device>/<component>.json`: the machine, the command, all figures with raw times."""
    path = results_file(component, device, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The command without folders: they say nothing about the figures.
    command = " ".join(Path(word).name if "/" in word else word for word in sys.argv)
    record = {"command": command, "machine": machine(device), **more, "results": plain(results)}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def measured_before(component: str, device: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The cases of a results file, to be kept by a run that adds others."""
    path = results_file(component, device, folder)
    return dict(json.loads(path.read_text())["results"]) if path.is_file() else {}


def plain(value: Any) -> Any:
    """Timings and containers of them as JSON has them."""
    if isinstance(value, Timing):
        return asdict(value)
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
