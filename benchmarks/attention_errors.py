"""Errors of attention's gradients beside cuDNN's, over many draws: on one GPU, nothing is timed.

    PYTHONPATH=src python benchmarks/attention_errors.py [--draws 16]

One draw says little. Under a causal mask the first few rows hold most of a gradient's norm, and
with outliers a few numbers do: how those happen to round moves any error by some percent.
So: the ratio of each error to cuDNN's on the same inputs, its geometric mean over draws,
and by how much that mean is uncertain (one standard error).
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from attention_cases import PARTS, Case, problem
from attention_peers import Method, methods
from harness import RESULTS, write

DEVICE = "cuda"
LENGTH = 4096
PEER = "cuDNN"


def compared(case: Case, found: list[Method], draws: int) -> dict[str, Any]:
    """For each method and part: mean error, ratio to cuDNN's, its standard error, its extremes."""
    parts = PARTS[case.way]
    seen: dict[str, dict[str, list[float]]] = {m.name: {p: [] for p in parts} for m in found}
    for number in range(draws):
        answers = {m.name: case.first_head(case.call(m, number)()) for m in found}
        for name, wrong in case.errors(answers, number).items():
            for part in parts:
                seen[name][part].append(wrong[part]["relative"])
        case.drawn.clear()
    return {
        name: {part: ratio(errors, seen[PEER][part]) for part, errors in by_part.items()}
        for name, by_part in seen.items()
    }


def ratio(errors: list[float], peers: list[float]) -> dict[str, float]:
    logs = [math.log(ours / theirs) for ours, theirs in zip(errors, peers, strict=True)]
    middle = math.exp(fmean(logs))
    return {
        "error": fmean(errors),
        "ratio": middle,
        "standard_error": middle * stdev(logs) / math.sqrt(len(logs)),
        "lowest": math.exp(min(logs)),
        "highest": math.exp(max(logs)),
    }


def shown(name: str, result: dict[str, Any]) -> str:
    lines = [name]
    for method, parts in result.items():
        figures = "   ".join(
            f"{part} {x['error']:.3e} {x['ratio']:.4f} ± {x['standard_error']:.4f}"
            f" [{x['lowest']:.3f}, {x['highest']:.3f}]"
            for part, x in parts.items()
        )
        lines.append(f"  {method:32} {figures}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    known = [m for m in methods(None) if m.name.startswith(("ours", PEER, "FlashAttention"))]
    results: dict[str, Any] = {}
    for outliers in (False, True):
        for width in (128, 64):
            for causal in (True, False):
                for way in ("backward", "forward"):
                    one = replace(problem(LENGTH, width, causal), batch=1)
                    case = Case(way, one, DEVICE, outliers=outliers)
                    found = [m for m in known if getattr(m, way) and m.takes(way, one)]
                    results[case.name] = compared(case, found, given.draws)
                    print(shown(case.name, results[case.name]), flush=True)
                write("attention_errors", DEVICE, results, folder=given.folder, draws=given.draws)


if __name__ == "__main__":
    main()
