"""Products with packed ternary weights against torch's dense ones, in the same run.

    PYTHONPATH=src python benchmarks/bench_ternary.py --device cuda
    PYTHONPATH=src python benchmarks/bench_ternary.py --device cpu --threads 2
    … --quick is a look that says little

One call walks a chain of different matrices, as a model does: on a GPU each is long gone from the
cache when it comes again. The weights are settled: they do not wait for the kernel before. A time
is that of one matrix. Errors are against float64 on the stored
codes and scales; torch's dense weights are the same values, rounded to its dtype.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import (
    RESULTS,
    Contender,
    Rules,
    Timing,
    ceilings,
    compare,
    errors,
    show,
    timing,
    write,
)

from trapline.gold.ternary import packed_linear as fast

GROUP = 128
Stored = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Problem:
    """x (rows, K) times matrices (N, K), `chain` of them one after the other."""

    n: int
    k: int
    chain: int
    rows: int = 1

    @property
    def name(self) -> str:
        return f"{self.n} × {self.k}, {self.rows} rows, chain of {self.chain}"

    @property
    def packed_bytes(self) -> int:
        return self.n * (self.k // 4 + 2 * (self.k // GROUP))


WIDE, LARGE, LONG = (13824, 2560), (28672, 8192), (2560, 13824)
GPU = [
    Problem(*WIDE, 32),
    Problem(*LARGE, 8),
    *(Problem(*WIDE, 32, rows=rows) for rows in (16, 64, 256, 2, 4, 8, 32, 128)),
    *(Problem(*LARGE, 8, rows=rows) for rows in (16, 64, 2, 4, 8, 256, 32, 128)),
    *(Problem(*LONG, 32, rows=rows) for rows in (1, 16, 64, 256, 32, 128)),
]
CPU = [
    Problem(n, k, chain, rows=rows)
    for rows in (1, 2, 8)
    for n, k, chain in ((4096, 4096, 4), (*WIDE, 2), (*LONG, 2))
]


def planes(problem: Problem, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales; every byte is a legal one."""
    source = torch.Generator(device).manual_seed(seed)
    fields = torch.randint(
        0, 3, (4, problem.n, problem.k // 4), generator=source, device=device, dtype=torch.uint8
    )
    plane = fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6
    scales = torch.rand((problem.n, problem.k // GROUP), generator=source, device=device)
    return plane, (0.01 + 0.02 * scales).half()


@cache
def matrices(n: int, k: int, chain: int, device: str) -> Stored:
    """Those of a chain."""
    return [planes(Problem(n, k, chain), device, seed) for seed in range(chain)]


@cache
def dense_matrices(
    n: int, k: int, chain: int, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    return [dense(*one, k, dtype) for one in matrices(n, k, chain, device)]


def dense(plane: torch.Tensor, scales: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    return fast.unpacked(plane, scales, k, GROUP).to(dtype)


def chained(product: Callable[[Any], Any], matrices: Sequence[Any]) -> Callable[[], Any]:
    return lambda: [product(matrix) for matrix in matrices]


def packed(
    problem: Problem, device: str, stored: Stored, dtype: torch.dtype, *, settled: bool = True
) -> Callable[[int], Callable[[], Any]]:
    def make(number: int) -> Callable[[], Any]:
        x = inputs(problem, device, dtype, number)
        return chained(lambda one: fast.packed_linear(x, *one, settled=settled), stored)

    return make


def by_torch(
    problem: Problem, device: str, dtype: torch.dtype
) -> Callable[[int], Callable[[], Any]]:
    def make(number: int) -> Callable[[], Any]:
        x = inputs(problem, device, dtype, number)
        weights = dense_matrices(problem.n, problem.k, problem.chain, device, dtype)
        return chained(lambda one: torch.nn.functional.linear(x, one), weights)

    return make


def contenders(problem: Problem, device: str, stored: Stored) -> list[Contender]:
    """Ours first, then torch on the same values; for one row on a GPU ours in other ways too."""
    on_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    flops = 2 * problem.rows * problem.n * problem.k * problem.chain
    small, large = problem.packed_bytes, problem.n * problem.k * dtype.itemsize

    def named(name: str, make: Callable[[int], Callable[[], Any]], size: int) -> Contender:
        return Contender(name, make, bytes=size * problem.chain, flops=flops)

    made = [
        named("packed", packed(problem, device, stored, dtype), small),
        named(f"torch {plain(dtype)}", by_torch(problem, device, dtype), large),
    ]
    if on_gpu and problem.rows == 1:
        later = packed(problem, device, stored, dtype, settled=False)
        made.append(named("packed, not settled", later, small))
        half = packed(problem, device, stored, torch.float16)
        made.append(named("packed float16", half, small))
    return made


def plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def slow_peer(problem: Problem) -> tuple[Timing, torch.Tensor]:
    """torch's bfloat16 on a CPU, and its answer: a call or three with one matrix, for seconds."""
    flops = 2 * problem.rows * problem.n * problem.k
    make = by_torch(replace(problem, chain=1), "cpu", torch.bfloat16)
    peer = Contender("torch bfloat16", make, bytes=2 * problem.n * problem.k, flops=flops)
    call, taken = peer.make(0), []
    for _ in range(3 if problem.rows == 1 else 1):
        started = time.perf_counter()
        (answer,) = call()
        taken.append(time.perf_counter() - started)
    return timing(peer, taken), answer


def inputs(problem: Problem, device: str, dtype: torch.dtype, number: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(number)
    return torch.randn(problem.rows, problem.k, generator=source).to(device, dtype)


def accuracy(answers: dict[str, torch.Tensor], problem: Problem, device: str) -> Any:
    """Products with the first matrix against float64, on the activations each was given."""
    stored = matrices(problem.n, problem.k, problem.chain, device)
    weights = dense(*stored[0], problem.k, torch.float64)
    found = {}
    for name, got in answers.items():
        exact = inputs(problem, device, got.dtype, 0).double() @ weights.T
        found[name] = errors(got, exact)
    return found


def per_matrix(times: Sequence[Timing], problem: Problem) -> list[Timing]:
    share = 1.0 / problem.chain
    return [
        replace(t, seconds=t.seconds * share, low=t.low * share, high=t.high * share,
                raw=[one * share for one in t.raw]) for t in times
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=75.0, help="start nothing after these")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    on_gpu = given.device.startswith("cuda")
    # A chain touches what the protocol asks for by itself: one data set and few calls are enough.
    rounds = 3 if given.quick else 7
    rules = Rules(calls=20 if on_gpu else 2, rounds=rounds, warm_up=0.2, repeats=rounds)
    more = {} if on_gpu else {"path": fast.backend()}
    results: dict[str, Any] = {}
    started = time.monotonic()
    for problem in GPU if on_gpu else CPU:
        if time.monotonic() - started > given.seconds:
            print("out of time")
            break
        several = not on_gpu and problem.rows > 1  # torch takes ten times as long then
        results[problem.name] = measured(
            problem, given.device, replace(rules, calls=1, repeats=2) if several else rules
        )
        path = write("ternary", given.device, results, folder=given.out, **more)
    print(path)


def measured(problem: Problem, device: str, rules: Rules) -> dict[str, Any]:
    print(problem.name)
    # One set of matrices serves all data sets: a call walks the whole chain anyway.
    stored = matrices(problem.n, problem.k, problem.chain, device)
    made = contenders(problem, device, stored)
    limits = ceilings(problem.packed_bytes * problem.chain, device)
    times = per_matrix(compare([*made, *limits], device, rules), problem)
    answers = {one.name: one.make(0)()[0] for one in made}
    if not device.startswith("cuda"):
        taken, answers["torch bfloat16"] = slow_peer(problem)
        times.append(taken)
    print(show(times), flush=True)
    wrong = accuracy(answers, problem, device)
    for name, error in wrong.items():
        print(f"  {name}: relative error {error['relative']:.2e}")
    return {"times": times, "errors": wrong}


if __name__ == "__main__":
    main()
