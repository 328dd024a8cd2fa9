"""Attention, forward and backward, against cuDNN and others, all in the same run on a GPU.

    PYTHONPATH=src python benchmarks/bench_attention.py --peers FOLDER
    … --only forward --quick        the lengths that matter most, three rounds
    … --cases "D128 N4096|GQA"      those whose names match
    … --without FlexAttention       not these, by name
    … --seconds 120                 starts no case after that; says what was left out
    … --compile D128-causal         compiles what a part of the cases needs, and times nothing

FOLDER may hold Triton's tutorial 06 as `triton_tutorial_attention.py` (it is fp16 only and runs
on the same values in fp16). Everybody else computes in bfloat16 on N(0, 1): H·D = 2048 and 16 384
tokens in all (32 768 at the longest). TFLOP/s count 4·B·H·T²·D a forward pass, half of it if
causal, and 2.5 times as much a backward pass, whoever computes more or less than that. Errors are
against float64 on the first key/value head of the very tensors that are timed; `outliers` are
problems of their own. Calls are long and the GPU is at its power limit: `harness.SteadyClock`.
"""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_memory import memory
from attention_peers import Call, Method, Problem, methods
from harness import (
    RESULTS,
    BurstClock,
    Clock,
    Contender,
    Rules,
    SteadyClock,
    Timing,
    compare,
    eager_seconds,
    errors,
    plain,
    write,
)
from torch import Tensor

DEVICE = "cuda"
WIDTH_IN_ALL = 2048
TOKENS = 16384
#: Where plain calls are timed too, launch and all.
EAGER = ("D128 N512 causal", "D128 N4096 causal")
#: Quartiles this far apart, relative to the median, are not the card's own doing.
UNSTEADY = 0.2
#: Where a backward pass is asked twenty times for the same bits.
REPEATED = ("D128 N4096 causal", "D128 N4096 full", "D64 N4096 causal")
PARTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


def problem(length: int, width: int, causal: bool, share: int = 1) -> Problem:
    heads = WIDTH_IN_ALL // width
    return Problem(max(1, TOKENS // length), heads, heads // share, length, width, causal)


def cases(only: str | None, quick: bool) -> list[tuple[str, Problem]]:
    """The most important first."""

    def some(ways: Sequence[str], lengths: Sequence[int], width: int) -> list[tuple[str, Problem]]:
        masks = (True, False)
        return [(w, problem(n, width, c)) for n in lengths for w in ways for c in masks]

    both = ["forward", "backward"]
    grouped = [(way, problem(8192, 128, True, share=8)) for way in both]
    listed = some(both, [16384, 4096], 128) + some(both, [16384], 64) + grouped
    if not quick:
        listed += some(both, [4096], 64) + some(both, [8192], 128) + some(["forward"], [8192], 64)
        listed += some(["forward"], [32768], 128) + some(both, [512, 2048, 1024], 128)
        listed += some(["forward"], [512, 2048, 32768, 1024], 64)
        listed += some(["backward"], [8192, 512, 2048, 1024], 64)
        listed += some(["backward"], [32768], 128) + some(["backward"], [32768], 64)
    return [(way, one) for way, one in listed if only in (None, way)]


class Case:
    """One problem and one direction, with data that its contenders share."""

    def __init__(self, way: str, one: Problem, *, outliers: bool = False) -> None:
        self.way, self.problem, self.outliers = way, one, outliers
        self.name = f"{way} {one.name}{' outliers' if outliers else ''}"
        self.flops = one.flops if way == "forward" else one.flops * 5 // 2
        self.drawn: dict[int, tuple[Tensor, ...]] = {}

    def call(self, method: Method, number: int) -> Call:
        if number not in self.drawn:
            self.drawn[number] = self.problem.draw(number, DEVICE, outliers=self.outliers)
        q, k, v, dout = self.drawn[number]
        made = getattr(method, self.way)
        given = (q, k, v) if self.way == "forward" else (q, k, v, dout)
        call: Call = made(self.problem, *given)
        return call

    def able(
        self, found: Sequence[Method], longest_exact: int = TOKENS
    ) -> tuple[list[Method], dict[str, str], dict[str, Any]]:
        """Who takes part, why others do not, and how wrong each is."""
        candidates = [m for m in found if getattr(m, self.way) and m.takes(self.way, self.problem)]
        taking, refused, answers = [], {}, {}
        for method in candidates:
            try:
                answers[method.name] = self._first_head(self.call(method, 0)())
                taking.append(method)
            except Exception as error:  # a peer's limits are many, and each is worth a line
                refused[method.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if self.problem.length > longest_exact or not answers:
            return taking, refused, {}
        return taking, refused, self._errors(answers)

    def _errors(self, answers: dict[str, list[Tensor]]) -> dict[str, Any]:
        exact = self._first_head(exactly(self.problem, self.way, *self.drawn[0]))
        return {
            name: {
                part: errors(got, want)
                for part, got, want in zip(PARTS[self.way], answer, exact, strict=True)
            }
            for name, answer in answers.items()
        }

    def _first_head(self, answer: Any) -> list[Tensor]:
        """The answer's parts for the first sequence and the first key/value head."""
        parts = [answer] if isinstance(answer, Tensor) else list(answer)
        parts = parts[: len(PARTS[self.way])]
        share = self.problem.heads // self.problem.groups
        widths = {"out": share, "dq": share, "dk": 1, "dv": 1}
        return [
            part[0, : widths[name]].detach().clone()
            for name, part in zip(PARTS[self.way], parts, strict=True)
        ]


def exactly(one: Problem, way: str, *drawn: Tensor) -> list[Tensor]:
    """Float64, with the whole score matrix, of one sequence and one key/value head."""
    share = one.heads // one.groups
    q, k, v, dout = (x[:1, :n].double() for x, n in zip(drawn, (share, 1, 1, share), strict=True))
    scores = (q @ k.mT).mul_(one.scale)
    if one.causal:
        index = torch.arange(one.length, device=DEVICE)
        scores.masked_fill_(index > index[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    out = weights @ v
    if way == "forward":
        return [out]
    dscores = dout @ v.mT
    dscores = dscores.sub_((dout * out).sum(-1, keepdim=True)).mul_(weights)
    dk = (dscores.mT @ q).sum(1, keepdim=True) * one.scale
    return [dscores @ k * one.scale, dk, (weights.mT @ dout).sum(1, keepdim=True)]


def ceiling() -> Contender:
    """A product of 8192 × 8192 matrices: what the tensor cores give on this machine, today."""

    def make(number: int) -> Call:
        torch.manual_seed(number)
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        return lambda: a @ b

    return Contender("matmul 8192³", make, bytes=3 * 8192 * 8192 * 2, flops=2 * 8192**3)


def measured(case: Case, found: Sequence[Method], quick: bool) -> dict[str, Any]:
    taking, refused, wrong = case.able(found)

    def contender(method: Method) -> Contender:
        size = case.problem.bytes * (1 if case.way == "forward" else 2)
        return Contender(method.name, lambda n: case.call(method, n), bytes=size, flops=case.flops)

    rules = Rules(rounds=3 if quick else 7, warm_up=0.03, drift=0.05, repeats=2)
    contenders = [*map(contender, taking), ceiling()]
    times = compare(contenders, DEVICE, rules, clock=clock())
    disturbed = _unsteady(times)
    if disturbed:
        times = compare(contenders, DEVICE, rules, clock=clock())
    eager = {}
    if case.problem.name in EAGER and not quick:
        told = [m for m in taking if m.name.startswith(("ours", "cuDNN"))]
        eager = {m.name: eager_seconds(case.call(m, 0), DEVICE) for m in told}
    found_again = {}
    if case.problem.name in REPEATED and case.way == "backward":
        found_again = {m.name: repeats(case.call(m, 0)) for m in taking}
    torch.cuda.empty_cache()
    return {
        "times": times,
        "share_of_matmul": _shares(times),
        "errors": wrong,
        "left_out": refused,
        "eager_seconds": eager,
        "equal_of_20": found_again,
        "measured_again": disturbed,
    }


def _unsteady(times: Sequence[Timing]) -> bool:
    """Power moves a time by a tenth at most; half of them moving by more means company."""
    wide = [(one.high - one.low) / one.seconds > UNSTEADY for one in times]
    return 2 * sum(wide) > len(wide)


def repeats(call: Call, times: int = 20) -> int:
    """How many of so many answers have the bits of the first."""
    first = [part.clone() for part in call()]
    equal = 1
    for _ in range(times - 1):
        equal += all(torch.equal(a, b) for a, b in zip(first, call(), strict=False))
    return equal


def clock() -> Clock:
    return SteadyClock(burst=4e-3) if DEVICE == "cuda" else BurstClock()


def heat(seconds: float = 0.5) -> None:
    """Brings the card to its working clocks: cases follow each other without a rest."""
    call, end = ceiling().make(0), time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()


def _shares(times: Sequence[Timing]) -> dict[str, float]:
    *others, product = times
    most = product.tflop_per_s or float("inf")
    return {one.name: (one.tflop_per_s or 0.0) / most for one in others}


def shown(name: str, result: dict[str, Any]) -> str:
    """A line a contender: time, rate, ratio to cuDNN's speed, share of the ceiling, errors."""
    lines = [name]
    first = result["times"][0].seconds
    for one in result["times"]:
        parts = result["errors"].get(one.name, {}).values()
        wrong = " ".join(f"{part['relative']:.1e}" for part in parts)
        share = result["share_of_matmul"].get(one.name, 1.0)
        spread = (one.high - one.low) / one.seconds
        lines.append(
            f"  {one.name:34} {one.seconds * 1e6:9.1f} µs ±{spread:5.1%} {one.tflop_per_s:6.0f}"
            f" TFLOP/s  {first / one.seconds:5.2f}x  {share:4.0%}  {wrong}"
        )
    lines += [f"  {name}: left out: {why}" for name, why in result["left_out"].items()]
    if result["equal_of_20"]:
        lines.append(f"  the same bits, of 20: {result['equal_of_20']}")
    return "\n".join(lines)


# --- the run ------------------------------------------------------------------------------------


def compiled(which: str, found: Sequence[Method], given: argparse.Namespace) -> None:
    """Runs the cases that `which` names (like D128-causal) once each, and times nothing."""
    width, mask = which.split("-")
    for way, one in cases(given.only, given.quick):
        if one.name.startswith(f"{width} ") and one.causal == (mask == "causal"):
            case = Case(way, one)
            taking, refused, _ = case.able(found, longest_exact=0)
            print(case.name, [method.name for method in taking], refused, flush=True)
            torch.cuda.empty_cache()


def remembered(lengths: Sequence[int]) -> dict[str, Any]:
    """One sequence of each length: what doubles with it, and what would quadruple."""
    made = {}
    for length in lengths:
        one = replace(problem(length, 128, True), batch=1)
        peaks = made[f"memory {one.name}, one sequence"] = {"peak_bytes": memory(one)}
        said = {name: {k: f"{b / 2**20:.1f}" for k, b in p.items()}
                for name, p in peaks["peak_bytes"].items()}  # fmt: skip
        print(f"memory {one.name}, MiB: {said}", flush=True)
    return made


def outlying(found: Sequence[Method]) -> dict[str, Any]:
    """Errors of ours and of SDPA's where one element in a thousand is ten times as large."""
    made = {}
    found = [m for m in found if m.name.startswith(("ours", "cuDNN", "FlashAttention"))]
    for width in (128, 64):
        for causal in (True, False):
            for way in ("forward", "backward"):
                case = Case(way, problem(4096, width, causal), outliers=True)
                _, refused, wrong = case.able(found)
                made[case.name] = {"errors": wrong, "left_out": refused}
                print(case.name)
                for name, parts in wrong.items():
                    figures = {part: f"{x['relative']:.2e}" for part, x in parts.items()}
                    print("  ", name, figures, flush=True)
                torch.cuda.empty_cache()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--only", choices=["forward", "backward"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cases", default="")
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--compile")
    given = parser.parse_args()
    started = time.perf_counter()
    found = [method for method in methods(given.peers) if method.name not in given.without]
    if given.compile:
        compiled(given.compile, found, given)
    else:
        sweep(found, given, started)


def rounded(results: Any) -> Any:
    """Six digits of every figure: more than the card repeats."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {key: short(one) for key, one in value.items()}
        return [short(one) for one in value] if isinstance(value, list) else value

    return short(plain(results))


def sweep(found: Sequence[Method], given: argparse.Namespace, started: float) -> None:
    """All cases until the time is up; what is there is written as it comes."""
    results: dict[str, Any] = {}
    left = []
    listed = [Case(way, one) for way, one in cases(given.only, given.quick)]
    heat()
    for number, case in enumerate(case for case in listed if re.search(given.cases, case.name)):
        if time.perf_counter() - started > given.seconds:
            left.append(case.name)
            continue
        results[case.name] = measured(case, found, given.quick)
        case.drawn.clear()
        print(shown(case.name, results[case.name]), flush=True)
        print(f"  {time.perf_counter() - started:.0f} s so far", flush=True)
        if number == 3:
            results |= outlying(found) | remembered([4096, 8192, 16384, 32768])
        if number % 4 == 3:
            write("attention", DEVICE, rounded(results), folder=given.folder)
    path = write("attention", DEVICE, rounded(results), folder=given.folder, not_measured=left)
    print(path, f"{time.perf_counter() - started:.0f} s; not measured: {left}")


if __name__ == "__main__":
    main()
