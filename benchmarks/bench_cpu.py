"""Norms, attention and top-k on a CPU beside torch's own functions, in one run and in turns.

    python benchmarks/bench_cpu.py              all cases, one thread
    … --threads 2                               as many threads
    … --quick                                   the smallest case of every function

With one thread the clock is the thread's CPU time, which other programs on the machine disturb
least; with more it is the wall clock. Ratios are between neighbouring bursts of the same run.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Call, Contender, Rules, Timing, compare, data_sets, errors, show, write
from torch import Tensor
from torch.nn import functional

from trapline.gold import flash_attention, layer_norm, rms_norm
from trapline.gold.attention import oracle as attention_oracle
from trapline.gold.norms import oracle as norms_oracle
from trapline.gold.softmax_topk.api import softmax_topk

#: (rows, width): B · T from 128 to 8192 rows.
ROWS = ((1, 768), (128, 768), (2048, 768), (2048, 4096))
#: (B, H, G, T, D)
HEADS = ((1, 8, 8, 128, 64), (1, 8, 2, 512, 64), (1, 8, 8, 2048, 64), (64, 8, 8, 128, 64))
#: (rows, vocabulary, k)
LOGITS = ((1, 32000, 50), (64, 8192, 8))
DTYPES = (torch.float32, torch.bfloat16)


class CpuClock:
    """The thread's CPU time, or the wall clock for several threads, around bursts of calls."""

    def __init__(self, threads: int) -> None:
        self.now = time.thread_time if threads == 1 else time.perf_counter

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        sets = [contender.make(number) for number in range(data_sets(contender, rules))]
        sets[0]()  # the first call imports and compiles: its time would make the bursts short
        started = self.now()
        sets[0]()
        calls = max(1, min(200, int(0.02 / max(self.now() - started, 1e-6))))

        def burst() -> float:
            started = self.now()
            for number in range(calls):
                sets[number % len(sets)]()
            return (self.now() - started) / calls

        return burst


def forward(function: Callable[..., Any], inputs: list[Tensor]) -> Call:
    """The call without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def both_passes(function: Callable[..., Any], inputs: list[Tensor]) -> Call:
    """Forward and backward."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    dy = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*leaves), leaves, dy)


Case = tuple[str, Callable[[], list[Tensor]], Callable[..., Any], Callable[..., Any], Any]


def norm_cases(quick: bool) -> Iterator[Case]:
    for rows, width in ROWS[: 1 if quick else None]:
        for dtype in DTYPES:
            name = f"{rows}×{width} {str(dtype).removeprefix('torch.')}"

            def draw(rows: int = rows, width: int = width, dtype: Any = dtype) -> list[Tensor]:
                return [torch.randn(rows, width).to(dtype), *torch.randn(2, width).to(dtype)]

            shape = (width,)
            theirs = partial(_torch_layer_norm, shape)
            yield f"layer norm {name}", draw, layer_norm, theirs, norms_oracle.layer_norm
            ours, theirs = _rms_norm, partial(_torch_rms_norm, shape)
            yield f"RMS norm {name}", partial(_first_two, draw), ours, theirs, norms_oracle.rms_norm


def _torch_layer_norm(shape: tuple[int, ...], x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.layer_norm(x, shape, w, b)


def _torch_rms_norm(shape: tuple[int, ...], x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x, shape, w, 1e-6)


def _rms_norm(x: Tensor, w: Tensor) -> Any:
    return rms_norm(x, w)


def _first_two(draw: Callable[[], list[Tensor]]) -> list[Tensor]:
    return draw()[:2]


def attention_cases(quick: bool) -> Iterator[Case]:
    for sizes in HEADS[: 1 if quick else None]:
        for dtype in DTYPES:
            B, H, G, T, D = sizes
            name = f"B{B} H{H} G{G} T{T} D{D} {str(dtype).removeprefix('torch.')}"

            def draw(sizes: tuple[int, ...] = sizes, dtype: Any = dtype) -> list[Tensor]:
                B, H, G, T, D = sizes
                k, v = torch.randn(2, B, G, T, D).to(dtype)
                return [torch.randn(B, H, T, D).to(dtype), k, v]

            ours = partial(flash_attention, causal=True)
            theirs = partial(_torch_attention, H != G)
            yield f"causal attention {name}", draw, ours, theirs, _exact_attention


def _torch_attention(grouped: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attend = functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=grouped)


def _exact_attention(q: Any, k: Any, v: Any) -> Any:
    return attention_oracle.attention(q, k, v, causal=True)[0]


def topk_cases(quick: bool) -> Iterator[Case]:
    for rows, vocabulary, k in LOGITS[: 1 if quick else None]:
        draw = partial(_logits, rows, vocabulary)
        ours, theirs = partial(_topk, k), partial(_torch_topk, k)
        yield f"softmax + top-{k} {rows}×{vocabulary} float32", draw, ours, theirs, None


def _logits(rows: int, vocabulary: int) -> list[Tensor]:
    return [torch.randn(rows, vocabulary)]


def _topk(k: int, logits: Tensor) -> Any:
    return softmax_topk(logits, k).values


def _torch_topk(k: int, logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1).topk(k, dim=-1).values


def measured(case: Case, way: Callable[..., Call], clock: CpuClock, rules: Rules) -> list[Timing]:
    _, draw, ours, theirs, _ = case
    inputs = draw()
    contenders = [
        Contender(name, lambda _, function=function: way(function, inputs))
        for name, function in (("trapline", ours), ("torch", theirs))
    ]
    return compare(contenders, "cpu", rules, clock=clock)


def errors_of(case: Case) -> dict[str, Any]:
    """Of the forward pass against float64, where an oracle of it is affordable."""
    _, draw, ours, theirs, exact = case
    inputs = draw()
    if exact is None or sum(x.numel() for x in inputs) > 1 << 21:
        return {}
    truth = exact(*(x.double().numpy() for x in inputs))
    return {
        name: errors(function(*inputs), np.asarray(truth))
        for name, function in (("trapline", ours), ("torch", theirs))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock, rules = CpuClock(options.threads), Rules(rounds=5, warm_up=0.05, drift=0.1, repeats=2)
    results: dict[str, Any] = {}
    for cases in (norm_cases, attention_cases, topk_cases):
        for case in cases(options.quick):
            ways: dict[str, Callable[..., Call]] = {"forward": forward}
            if cases is not topk_cases:
                ways["forward and backward"] = both_passes
            found = errors_of(case)
            for named, way in ways.items():
                times = measured(case, way, clock, rules)
                print(f"{case[0]}, {named}\n{show(times)}\n", flush=True)
                results[f"{case[0]}, {named}"] = {"times": times, "errors": found}
    print(write("cpu", "cpu", results))


if __name__ == "__main__":
    main()
