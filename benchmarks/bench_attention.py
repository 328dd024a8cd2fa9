"""Attention, forward and backward, against cuDNN and others, all in the same run on a GPU.

    PYTHONPATH=src python benchmarks/bench_attention.py --peers FOLDER
    … --only forward --quick        the lengths that matter most, three rounds
    … --cases "D128 N4096|GQA"      those whose names match
    … --without FlexAttention       not these, by name
    … --seconds 120                 starts no case after that; says what was left out
    … --more                        only what the results file does not hold yet, added to it
    … --compile D128-causal         compiles what a part of the cases needs, and times nothing

FOLDER may hold Triton's tutorial 06 as `triton_tutorial_attention.py` (it is fp16 only and runs
on the same values in fp16). All others compute in bfloat16 on N(0, 1): H·D = 2048 and 16 384
tokens in all (32 768 at the longest). TFLOP/s count 4·B·H·T²·D a forward pass, half of it if
causal, and 2.5 times as much a backward pass, by definition. Errors are against float64 on the
first key/value head of the tensors that are timed; `outliers` are problems of their own. Calls
are long and the GPU is at its power limit: `harness.SteadyClock`.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_cases import TOKENS, Case, cases, problem
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
    plain,
    results_file,
    write,
)

DEVICE = "cuda"
#: Where plain calls are timed too, launch and all.
EAGER = ("D128 N512 causal", "D128 N4096 causal")
#: Quartiles this far apart, relative to the median, are not the card's own doing.
UNSTEADY = 0.2
#: Where a backward pass is asked twenty times for the same bits.
REPEATED = ("D128 N4096 causal", "D128 N4096 full", "D64 N4096 causal")


def ceiling() -> Contender:
    """A product of 8192 × 8192 matrices: what the tensor cores give on this machine, today."""

    def make(number: int) -> Call:
        torch.manual_seed(number)
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        return lambda: a @ b

    return Contender("matmul 8192³", make, bytes=3 * 8192 * 8192 * 2, flops=2 * 8192**3)


def rounds(one: Problem, quick: bool) -> int:
    """Most where goals are; few at the longest, where a round takes a second."""
    if quick or one.length > TOKENS:
        return 3
    return 7 if one.length >= 4096 else 5


def measured(case: Case, found: Sequence[Method], quick: bool) -> dict[str, Any]:
    taking, refused, wrong = case.able(found)

    def contender(method: Method) -> Contender:
        size = case.problem.bytes * (1 if case.way == "forward" else 2)
        return Contender(method.name, lambda n: case.call(method, n), bytes=size, flops=case.flops)

    rules = Rules(rounds=rounds(case.problem, quick), warm_up=0.03, drift=0.05, repeats=2)
    contenders = [*map(contender, taking), ceiling()]
    times = compare(contenders, DEVICE, rules, clock=clock())
    disturbed = _unsteady(times)
    if disturbed:
        times = compare(contenders, DEVICE, rules, clock=clock())
    eager = {}
    if case.problem.name in EAGER and not quick:
        listed = [m for m in taking if m.name.startswith(("ours", "cuDNN"))]
        eager = {m.name: eager_seconds(case.call(m, 0), DEVICE) for m in listed}
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
    """How many of `times` answers are bitwise equal to the first."""
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
            case = Case(way, one, DEVICE)
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
                case = Case(way, problem(4096, width, causal), DEVICE, outliers=True)
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
    parser.add_argument("--more", action="store_true")
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


def earlier(folder: Path) -> dict[str, Any]:
    """The cases of the results file."""
    path = results_file("attention", DEVICE, folder)
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return found


def sweep(found: Sequence[Method], given: argparse.Namespace, started: float) -> None:
    """All cases until the time is up; what is there is written as it comes.

    All contenders of a case are measured in one go, in turn. A second run may add cases
    (`--more`); each says in which run it was measured.
    """
    results = earlier(given.folder) if given.more else {}
    run = 1 + max((one.get("run", 0) for one in results.values()), default=0)
    left = []
    listed = [Case(way, one, DEVICE) for way, one in cases(given.only, given.quick)]
    listed = [one for one in listed if one.name not in results and re.search(given.cases, one.name)]
    heat()
    for number, case in enumerate(listed):
        if time.perf_counter() - started > given.seconds:
            left.append(case.name)
            continue
        results[case.name] = measured(case, found, given.quick) | {"run": run}
        case.drawn.clear()
        print(shown(case.name, results[case.name]), flush=True)
        print(f"  {time.perf_counter() - started:.0f} s so far", flush=True)
        if number == 3 and not given.more:
            results |= outlying(found) | remembered([4096, 8192, 16384, 32768])
        if number % 4 == 3:
            write("attention", DEVICE, rounded(results), folder=given.folder)
    path = write("attention", DEVICE, rounded(results), folder=given.folder, not_measured=left)
    print(path, f"{time.perf_counter() - started:.0f} s; not measured: {left}")


if __name__ == "__main__":
    main()
