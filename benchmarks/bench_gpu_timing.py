"""The GPU track's clock against itself and against replayed CUDA graphs.

    PYTHONPATH=src python benchmarks/bench_gpu_timing.py
    … --trials 20: pairs of times a shape; --level landlock: isolation of the runners
    … --part agreement or --part pairs: only one part; the results of the other are kept

Three questions, all asked through the rig that grades answers:
- the same kernel in two runners: the ratio of their times, which should be 1;
- the kernel beside a copy of it that does 30 % of its rows twice: is the copy seen to be slower?
- the kernel in a runner, and in a process of ours that replays it from one CUDA graph between two
  events, over a ring of inputs of the same size: do the two times agree?
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import measured_before, write

from trapline.arena.challenge import Challenge, load
from trapline.arena.gpu.checks import noise
from trapline.arena.gpu.contract import Entry, Output, Timed, entries
from trapline.arena.gpu.opening import shared_rig
from trapline.arena.gpu.rig import GpuSubmission
from trapline.arena.gpu.timing import Clock, learn, make_ring, slots_of
from trapline.arena.gpu.yardsticks import LIGHTS
from trapline.arena.process.session import SandboxConfig

#: Runners are started anew after so many trials.
TRIALS_A_RUNNER = 20
BAND, SEEN, AGREEMENT, LONG_SECONDS = (0.98, 1.02), 1.15, 0.05, 20e-6
REPLAYS, REPLAY_SECONDS = 9, 0.02
SLOWER = """

_whole = softmax_topk


def softmax_topk(logits, k, probs, indices):
    _whole(logits, k, probs, indices)
    part = round(0.3 * len(logits))
    _whole(logits[:part], k, probs[:part], indices[:part])
"""


@dataclass(frozen=True)
class Subject:
    """A kernel on a shape."""

    folder: Path
    entries: Mapping[str, Entry]
    timed: Timed


def _softmax(rows: int, vocabulary: int, k: int) -> Timed:
    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        return noise(rng, (rows, vocabulary), "float32"), k

    return Timed(f"softmax_topk {rows}×{vocabulary}, k {k}", "softmax_topk", make, {})


def _norm(rows: int, width: int) -> Timed:
    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        x = noise(rng, (rows, width), "float32")
        return x, np.ones(width, np.float32), np.zeros(width, np.float32), 1e-5

    return Timed(f"layer_norm_forward {rows}×{width}", "layer_norm_forward", make, {})


def _copy(size: int) -> Timed:
    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        return (noise(rng, (size,), "float32"),)

    return Timed(f"copy of {size >> 20} Mi float32", "copy", make, {})


def subjects() -> list[Subject]:
    """From about 5 µs to about 1 ms a call."""
    softmax, norm = load("fused_softmax_topk", "gpu"), load("layer_norm_backward", "gpu")
    light = {"copy": Entry(lambda source: (Output(source.shape, "float32"),))}
    shapes = [(2048, 32000, 64), (256, 128256, 50), (32, 50257, 8), (16, 4096, 8)]
    return [
        *(_of(softmax, _softmax(*shape)) for shape in shapes),
        *(_of(norm, _norm(*shape)) for shape in ((8192, 4096), (2048, 4096), (256, 1024))),
        *(Subject(LIGHTS, light, _copy(1 << power)) for power in (25, 23, 20)),
    ]


def _of(challenge: Challenge, timed: Timed) -> Subject:
    return Subject(challenge.solution, entries(challenge.module("cases")), timed)


def compare(one: Subject, config: SandboxConfig, trials: int) -> dict[str, Any]:
    """Ratios of the same kernel in two runners, and of the slower copy to it."""
    rig, ratios, slower, order = shared_rig(config.device), [], [], np.random.default_rng(0)
    ring = make_ring(rig, one.entries, one.timed, np.random.default_rng(1))
    with tempfile.TemporaryDirectory(prefix="trapline-") as name:
        copy = Path(name)
        copy.chmod(0o755)
        (copy / "solution.py").write_text((one.folder / "solution.py").read_text() + SLOWER)
        for start in range(0, trials, TRIALS_A_RUNNER):
            with ExitStack() as stack:
                opened = [
                    stack.enter_context(GpuSubmission(folder, config, one.entries, rig))
                    for folder in (one.folder, one.folder, copy)
                ]
                if not ring.expected:
                    learn(ring, opened[0])
                for _ in range(start, min(trials, start + TRIALS_A_RUNNER)):
                    seconds = {
                        place: Clock(ring, opened[place]).times().best
                        for place in order.permutation(3)
                    }
                    ratios.append(seconds[1] / seconds[0])
                    slower.append(seconds[2] / seconds[0])
                    print(f"{one.timed.name}: {ratios[-1]:.4f} {slower[-1]:.4f}", flush=True)
    ring.release()
    inside = sum(BAND[0] <= ratio <= BAND[1] for ratio in ratios)
    seen = sum(ratio > SEEN for ratio in slower)
    return {
        "ratios": ratios,
        "within 0.98 to 1.02": f"{inside} of {trials}",
        "ratios of the slower copy": slower,
        "seen to be slower": f"{seen} of {trials}",
    }


def through_the_rig(config: SandboxConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Times of all subjects, those of one folder in one runner."""
    rig = shared_rig(config.device)
    for folder, members in groupby(subjects(), lambda one: one.folder):
        chosen = list(members)
        with GpuSubmission(folder, config, chosen[0].entries, rig) as answer:
            for one in chosen:
                ring = make_ring(rig, one.entries, one.timed, np.random.default_rng(1))
                try:
                    learn(ring, answer)
                    times = Clock(ring, answer).times()
                finally:
                    ring.release()
                yield (
                    one.timed.name,
                    {"seconds": times.best, "latency": times.latency, "mode": times.mode},
                )


def replayed(one: Subject, l2: int) -> float:
    """Seconds a call, between two events around replays of one graph over the ring."""
    import torch

    sys.path.insert(0, str(one.folder))
    sys.modules.pop("solution", None)
    entry = getattr(__import__("solution"), one.timed.entry)
    sys.path.pop(0)
    rng = np.random.default_rng(1)
    first = one.timed.make(rng)
    calls = []
    for number in range(slots_of(first, l2)):
        args = one.timed.make(rng) if number else first
        wanted = one.entries[one.timed.entry].outputs(*args)
        kinds = [getattr(torch, output.dtype) for output in wanted]
        outputs = [
            torch.empty(output.shape, dtype=kind, device="cuda")
            for output, kind in zip(wanted, kinds, strict=True)
        ]
        calls.append([*map(_tensor, args), *outputs])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            entry(*call)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            entry(*call)
    graph.replay()
    once = _between_events(torch, graph, 3)
    many = max(3, round(REPLAY_SECONDS / once))
    return median(_between_events(torch, graph, many) for _ in range(REPLAYS)) / len(calls)


def _between_events(torch: Any, graph: Any, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def _tensor(value: Any) -> Any:
    import torch

    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value).cuda()


def agreement(config: SandboxConfig) -> dict[str, Any]:
    """Times of the rig beside those of replayed graphs, which another process measures."""
    l2 = shared_rig(config.device).judge.facts["l2"]
    command = [sys.executable, __file__, "--replay", str(l2)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    graphs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    rows = {}
    for name, found in through_the_rig(config):
        off = found["seconds"] / graphs[name] - 1
        rows[name] = {**found, "graph replay": graphs[name], "error": off}
        print(
            f"{name}: {found['seconds'] * 1e6:.2f} µs, graph {graphs[name] * 1e6:.2f} µs "
            f"({off:+.1%}), latency {found['latency'] * 1e6:.1f} µs",
            flush=True,
        )
    return rows


def summary_of(results: dict[str, Any]) -> dict[str, Any]:
    rows, pairs = results.get("agreement", {}), results.get("pairs", {})
    long = [row for row in rows.values() if row["graph replay"] >= LONG_SECONDS]
    agree = sum(abs(row["error"]) <= AGREEMENT for row in long)
    short = [row["error"] for row in rows.values() if row["graph replay"] < LONG_SECONDS]
    return {
        "same kernel, ratio within 0.98 to 1.02": {
            name: pair["within 0.98 to 1.02"] for name, pair in pairs.items()
        },
        "slower copy seen": {name: pair["seen to be slower"] for name, pair in pairs.items()},
        "within 5 % of graph replay, 20 µs and longer": f"{agree} of {len(long)}",
        "largest error of shorter ones": f"{max(map(abs, short), default=0.0):.1%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--level", default="landlock")
    parser.add_argument("--part", choices=("agreement", "pairs"))
    parser.add_argument("--replay", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.replay:
        print(json.dumps({one.timed.name: replayed(one, asked.replay) for one in subjects()}))
        return
    config = load("fused_softmax_topk", "gpu").sandbox_config(asked.level)
    results = measured_before("gpu_timing", "cuda")
    if asked.part != "pairs":
        results["agreement"] = agreement(config)
    if asked.part != "agreement":
        chosen = (subjects()[1], subjects()[2])
        results["pairs"] = {one.timed.name: compare(one, config, asked.trials) for one in chosen}
    summary = summary_of(results)
    print(write("gpu_timing", "cuda", results, summary=summary))
    print(json.dumps(summary, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
