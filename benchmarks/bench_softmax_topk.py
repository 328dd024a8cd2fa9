"""Softmax with top-k against torch's ways to get the same answer, in the same run.

    PYTHONPATH=src python benchmarks/bench_softmax_topk.py
    … --device cpu: what a CPU does, at 64×151936
    … --quick: one shape; --warm compiles everything and times nothing; --only TEXT
    … --more: times what the results file does not have yet, and keeps what it has

Peers: torch's softmax followed by topk; topk of the logits with logsumexp, its best formulation;
torch.compile of that. None of them promises an order of ties. Bytes are one read of the logits.
Errors are against float64: of probabilities, relative in the 2-norm; `lse` where there is one;
and how many of the indices differ.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from harness import Contender, Rules, ceilings, compare, errors, measured_before, show, write
from torch import Tensor

from trapline.gold import softmax_topk

SMALL = [(1, 131072, 64), (64, 8192, 8), (32, 16384, 32), (16, 12000, 16), (128, 4096, 1)]
LARGE = [(512, 128256, 64), (512, 128256, 256), (512, 128256, 1024), (64, 151936, 64)]
LARGE += [(4096, 32000, 64), (64, 1000000, 256)]
#: About 256 MB of float32 each.
SWEEP = [(6400, 10000), (1280, 50257), (512, 128000), (128, 500000), (64, 1000000)]
SWEEP_K = (64, 1024, 8, 256)
BATCHES = (1, 8, 64, 256, 2048)
#: From this many bytes on a call takes so long that fewer of them are a burst.
LONG_CALL, FEWER_CALLS = 1 << 24, 8
#: Seconds: a killed run keeps what is older.
KEPT_EVERY = 4.0
Call = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    rows: int
    vocabulary: int
    k: int
    dtype: torch.dtype
    #: A sweep has no time for it.
    compiles: bool = True

    @property
    def name(self) -> str:
        return f"{self.rows}×{self.vocabulary} k{self.k} {str(self.dtype)[6:]}"

    @property
    def bytes(self) -> int:
        return self.rows * self.vocabulary * self.dtype.itemsize

    def logits(self, number: int, device: str) -> Tensor:
        source = torch.Generator(device).manual_seed(number)
        shape = self.rows, self.vocabulary
        return torch.randn(shape, generator=source, device=device).to(self.dtype)


def ours(x: Tensor, k: int) -> tuple[Tensor, ...]:
    return tuple(softmax_topk(x, k, check=False))


def softmax_then_topk(x: Tensor, k: int) -> tuple[Tensor, ...]:
    return tuple(torch.topk(torch.softmax(x, dim=1), k, dim=1))


def topk_and_logsumexp(x: Tensor, k: int) -> tuple[Tensor, ...]:
    best, indices = torch.topk(x, k, dim=1)
    lse = torch.logsumexp(x.float(), dim=1)
    return (best.float() - lse[:, None]).exp().to(x.dtype), indices, lse


@cache
def compiled(_problem: Problem) -> Callable[[Tensor, int], tuple[Tensor, ...]]:
    torch._dynamo.reset()  # every shape is compiled for itself
    return torch.compile(topk_and_logsumexp, dynamic=False)


def peers(problem: Problem) -> dict[str, Callable[[Tensor, int], tuple[Tensor, ...]]]:
    found = {"trapline": ours, "torch topk, logsumexp": topk_and_logsumexp}
    found["torch softmax, topk"] = softmax_then_topk
    if problem.compiles and torch.cuda.is_available():
        found["torch.compile of topk"] = lambda x, k: compiled(problem)(x, k)
    return found


def contenders(problem: Problem, device: str) -> list[Contender]:
    shared: dict[int, Tensor] = {}

    def made(call: Callable[[Tensor, int], Any], number: int) -> Call:
        if number not in shared:
            shared[number] = problem.logits(number, device)
        return partial(call, shared[number], problem.k)

    return [
        Contender(name, partial(made, call), bytes=problem.bytes)
        for name, call in peers(problem).items()
    ]


def exact(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Float64: probabilities, indices with ties to the lower, and lse."""
    wide = x.double()
    best, indices = (part[:, :k] for part in torch.sort(wide, dim=1, descending=True, stable=True))
    lse = torch.logsumexp(wide, dim=1)
    return (best - lse[:, None]).exp(), indices, lse


def accuracy(problem: Problem, device: str) -> dict[str, Any]:
    """Of the first rows: sorting all of them in float64 would take longer than the benchmark."""
    rows = max(1, min(problem.rows, (1 << 24) // problem.vocabulary))
    x = problem.logits(0, device)[:rows]
    probs, indices, lse = exact(x, problem.k)
    found: dict[str, Any] = {}
    for name, call in peers(problem).items():
        got = call(x, problem.k) if "compile" not in name else None
        if got is None:  # compiled for all rows, and the same arithmetic
            continue
        found[name] = {
            "probabilities": errors(got[0], probs),
            "indices that differ": int((got[1] != indices).sum()),
        }
        if len(got) == 3:
            found[name]["lse"] = errors(got[2], lse)
    return found


def problems(quick: bool, device: str) -> list[Problem]:
    """The goals' shapes first; what a run that ends early can do without last."""
    full, half = torch.float32, torch.bfloat16
    if device == "cpu":
        sizes = (64,) if quick else (8, 64, 256, 1024)
        return [Problem(64, 151936, k, dtype) for dtype in (full, half) for k in sizes]
    if quick:
        return [Problem(512, 128256, 64, full)]
    goals = [Problem(*shape, full) for shape in [*SMALL, *LARGE[:3]]]
    goals.insert(6, Problem(*LARGE[0], half))
    more = [Problem(*shape, full) for shape in LARGE[3:]]
    more += [Problem(*shape, half, False) for shape in LARGE[1:]]
    swept = itertools.product(SWEEP_K, (full, half), SWEEP)
    sweep = [Problem(*shape, k, dtype, False) for k, dtype, shape in swept]
    batch = [Problem(rows, 128256, 64, full, False) for rows in BATCHES]
    every = {one.name: one for one in [*sweep, *batch, *more, *goals]}  # the last has all peers
    order = [*goals, *sweep[:15], *more, *batch, *sweep[15:]]
    return [every[name] for name in dict.fromkeys(one.name for one in order)]


def measured(problem: Problem, device: str, rules: Rules) -> dict[str, Any]:
    if problem.bytes >= LONG_CALL:
        rules = replace(rules, calls=min(rules.calls, FEWER_CALLS))
    limits = ceilings(problem.bytes, device)[1:]
    times = compare([*contenders(problem, device), *limits], device, rules)
    by_name = {one.name: one.seconds for one in times}
    of_read = by_name["read"] / by_name["trapline"]
    best = min(seconds for name, seconds in by_name.items() if name.startswith("torch"))
    print(f"{problem.name}: {100 * of_read:.1f} % of read, {best / by_name['trapline']:.1f}× torch")
    print(show(times), flush=True)
    wrong = accuracy(problem, device)
    for name, each in wrong.items():
        print(f"  {name}: {each['probabilities']['relative']:.1e}", end="")
        print(f", {each['indices that differ']} indices differ")
    if device != "cpu":
        torch.cuda.empty_cache()
    return {"times": times, "errors": wrong, "of_read": of_read}


def warmed(problem: Problem, device: str) -> None:
    """Compiles what the problem needs, so that a timed run finds it in the caches."""
    x = problem.logits(0, device)
    for name, call in peers(problem).items():
        call(x, problem.k)
        print(problem.name, name, flush=True)
    if device != "cpu":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--only", default="", help="problems whose name has this in it")
    parser.add_argument("--part", default="0/1", help="every N-th of them, from the I-th: I/N")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing after these")
    parser.add_argument("--more", action="store_true", help="only what has no result yet")
    asked = parser.parse_args()
    part, of = (int(word) for word in asked.part.split("/"))
    chosen = [one for one in problems(asked.quick, asked.device) if asked.only in one.name]
    results = measured_before("softmax_topk", asked.device) if asked.more else {}
    chosen = [one for one in chosen if one.name not in results][part::of]
    if asked.warm:
        for problem in chosen:
            warmed(problem, asked.device)
        return
    kept = asked.more or not (asked.quick or asked.only)
    few = {"calls": 2, "touched": 1} if asked.device == "cpu" else {}
    rules = Rules(rounds=3 if asked.quick else asked.rounds, repeats=2, **few)
    started = written = time.monotonic()
    for problem in chosen:
        if time.monotonic() - started > asked.seconds:
            break
        results[problem.name] = measured(problem, asked.device, rules)
        rules = replace(rules, warm_up=0.05)  # it is warm now
        if time.monotonic() - written > KEPT_EVERY and kept:
            write("softmax_topk", asked.device, results)
            written = time.monotonic()
    if results and kept:
        write("softmax_topk", asked.device, results)


if __name__ == "__main__":
    main()
