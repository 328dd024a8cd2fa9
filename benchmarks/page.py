"""Writes docs/benchmarks.md and its roofline from the committed results; nothing is typed by hand.

    python benchmarks/page.py

A table is a results file: a case a row, our time, what it means in bytes or operations, and how
many times faster we are than each peer of the same run (below 1 we lose). A test holds the page to
the files.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import goals
from roofline import Point, draw, intensity_of, intensity_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
PAGE = ROOT / "docs" / "benchmarks.md"
ROOFLINE = ROOT / "docs" / "benchmarks-roofline.svg"
OURS = ("trapline", "ours", "packed")
#: What is measured for scale, beside the peers.
SCALES = ("copy", "read", "smallest kernel", "matmul 8192³")
#: TFLOP/s from which on a kernel is judged by its arithmetic.
TENSOR_CORES = 100


@dataclass(frozen=True)
class Component:
    """A results file, and what its times are held against."""

    file: str
    title: str
    ceiling: str
    page: str


COMPONENTS = (
    Component("norms", "Norms", "copy", "layer_norm"),
    Component("softmax_topk", "Softmax + top-k", "read", "softmax_topk"),
    Component("paged_attention", "Paged attention", "read", "paged_attention"),
    Component("attention", "Flash attention", "matmul 8192³", "attention"),
    Component("ternary", "Products with packed ternary weights", "read", "ternary"),
)


def load(file: str) -> dict[str, Any] | None:
    path = RESULTS / f"{file}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def timed(file: str) -> dict[str, Any]:
    """The cases of a results file that are timings."""
    found = load(file) or {"results": {}}
    return {case: entry for case, entry in found["results"].items() if "times" in entry}


def split(times: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Ours, the peers, and what is measured for scale."""
    ours = [one for one in times if one["name"].startswith(OURS)]
    scales = {one["name"]: one for one in times if one["name"] in SCALES}
    peers = [one for one in times if one not in ours and one["name"] not in scales]
    return ours, peers, scales


def rate(one: dict[str, Any]) -> str:
    """Bytes a second where they are the limit, operations a second elsewhere."""
    if one["tflop_per_s"] and one["tflop_per_s"] > TENSOR_CORES:
        return f"{one['tflop_per_s']:.0f} TFLOP/s"
    return f"{one['gb_per_s']:.0f} GB/s" if one["gb_per_s"] else ""


def share(one: dict[str, Any], ceiling: dict[str, Any] | None) -> str:
    """Of what the machine did in the same run."""
    if ceiling is None:
        return ""
    name = "tflop_per_s" if ceiling["tflop_per_s"] else "gb_per_s"
    return f"{one[name] / ceiling[name]:.0%}" if one[name] and ceiling[name] else ""


def worst_error(errors: Any) -> float | None:
    """The largest relative error among an answer's parts."""
    if not isinstance(errors, dict):
        return float(errors) if isinstance(errors, int | float) else None
    if "relative" in errors:
        return float(errors["relative"])
    found = [error for part in errors.values() if (error := worst_error(part)) is not None]
    return max(found, default=None)


def error_cell(errors: dict[str, Any], ours: str, peers: Sequence[str]) -> str:
    mine = worst_error(errors.get(ours))
    theirs = [e for name in peers if (e := worst_error(errors.get(name))) is not None]
    said = [f"{e:.1e}" for e in (mine, max(theirs, default=None)) if e is not None]
    return " / ".join(said)


def tables(component: Component, results: dict[str, Any]) -> list[str]:
    """A table for every set of peers, then one for what was compared among ourselves."""
    groups: dict[tuple[str, ...], list[str]] = {}
    alone = []
    for case, found in results.items():
        ours, peers, _ = split(found["times"])
        if ours:
            groups.setdefault(tuple(one["name"] for one in peers), []).append(case)
        else:
            alone.append(case)
    lines = []
    for names, cases in groups.items():
        lines += [*beside(component, names, {case: results[case] for case in cases}), ""]
    if alone:
        lines += [*among(component, {case: results[case] for case in alone}), ""]
    return lines


def beside(component: Component, names: Sequence[str], results: dict[str, Any]) -> list[str]:
    """One row for each case and each of our ways; how many times faster we are than each peer."""
    head = ["case", "µs", "rate", f"of {component.ceiling}", *(f"× {n}" for n in names), "error"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for case, found in results.items():
        ours, peers, scales = split(found["times"])
        for one in ours:
            title = case if len(ours) == 1 else f"{case}, {one['name'].removeprefix('ours ')}"
            cells = [title, f"{one['seconds'] * 1e6:.1f}", rate(one)]
            cells.append(share(one, scales.get(component.ceiling)))
            cells += [f"{peer['seconds'] / one['seconds']:.2f}" for peer in peers]
            cells.append(error_cell(found.get("errors", {}), one["name"], names))
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def among(component: Component, results: dict[str, Any]) -> list[str]:
    """Our own ways against each other: times as often as the first of the case is fast."""
    lines = [f"| case | way | µs | rate | of {component.ceiling} | × first |", "|---" * 6 + "|"]
    for case, found in results.items():
        _, ways, scales = split(found["times"])
        for one in ways:
            gain = f"{ways[0]['seconds'] / one['seconds']:.2f}"
            cells = [case, one["name"], f"{one['seconds'] * 1e6:.1f}", rate(one)]
            cells += [share(one, scales.get(component.ceiling)), gain]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def generation(results: dict[str, Any]) -> list[str]:
    """Whole calls beside transformers', then what was held against something else."""
    head = ["case", "step, ms (quartiles)", "× transformers", "call, ms", "× transformers"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    said = []
    for case, found in results.items():
        if "times" in found and "cost" not in found:
            steps = [seconds * 1e3 for seconds in found.get("steps", {}).values()]
            calls = [one["seconds"] * 1e3 for one in found["times"][:: 2 if steps else 1]]
            step = f"{steps[0]:.3f} ({_spread(found)})" if steps else ""
            cells = [case, step, _times_as_long(steps), f"{calls[0]:.1f}", _times_as_long(calls)]
            lines.append("| " + " | ".join(cells) + " |")
        if "left_out" in found:
            (one,) = found["left_out"]["times"]
            said.append(
                f"- {case}: left out: {one['name']}, {one['seconds']:.2f} s, "
                f"{found['left_out']['why']}."
            )
        if "note" in found:
            said.append(f"- {case}: {found['note']}.")
        said += _held(case, found)
    return [*lines, "", *said]


def _held(case: str, found: dict[str, Any]) -> Iterator[str]:
    """The figures of a case other than its times."""
    if "ratio" in found:
        reading = f"the {found['reading_seconds'] * 1e3:.3f} ms to read weights and cache"
        yield f"- {case}: a step takes {found['ratio']:.3f} times {reading}, {_replayed(found)}."
    if "peak_bytes" in found:
        mine, theirs = (value / 2**20 for value in found["peak_bytes"].values())
        yield f"- {case}: {mine:.0f} MiB above the weights, transformers {theirs:.0f}."
    if "cost" in found:
        step = found["times"][0]["seconds"] * 1e3
        yield f"- {case}: {step:.3f} ms in order, permuted {found['cost']:+.1%}."
    for job, equal in found.get("share of equal tokens", {}).items():
        yield f"- {case}: {equal:.1%} of transformers' tokens ({job})."
    for name, error in found.get("errors", {}).items():
        yield f"- {case}: relative error {error['relative']:.4f} ({name})."


def _replayed(found: dict[str, Any]) -> str:
    """The same step without the host."""
    captured = found["captured"]["seconds"] * 1e3
    return f"captured {captured:.3f} ms, {found['captured_ratio']:.3f} times"


def _spread(found: dict[str, Any]) -> str:
    """Quartiles of the rounds' slopes."""
    low, _, high = quantiles(next(iter(found["slopes"].values())), n=4, method="inclusive")
    return f"{1e3 * low:.3f} – {1e3 * high:.3f}"


def _times_as_long(values: Sequence[float]) -> str:
    return f"{values[1] / values[0]:.1f}" if len(values) > 1 else ""


def cpu_lines() -> Iterator[str]:
    """Every CPU that was measured: ours beside torch's own functions."""
    for path in sorted(RESULTS.parent.glob("cpu-*/cpu.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = found["machine"]
        versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        yield from (
            "## On a CPU, beside torch",
            "",
            f"`{found['command']}`; {machine['device']}, threads: {machine['threads']}, "
            f"{versions}. With one thread, times are CPU time. Goal: at most 1.1 × torch's time, "
            "and at most 60 µs more for small calls.",
            "",
            "| case | µs | torch, µs | time / torch's | µs more | error |",
            "|---|---|---|---|---|---|",
        )
        for case, entry in found["results"].items():
            ours, torch = entry["times"]
            mine, theirs = ours["seconds"] * 1e6, torch["seconds"] * 1e6
            # Between neighbouring bursts, which meet the same state of the machine.
            share = median(a / b for a, b in zip(ours["raw"], torch["raw"], strict=True))
            cells = [case, f"{mine:.1f}", f"{theirs:.1f}", f"{share:.2f}"]
            cells += [f"{mine - theirs:.0f}"]
            cells += [error_cell(entry["errors"], ours["name"], [torch["name"]])]
            yield "| " + " | ".join(cells) + " |"
        yield ""


def occupancy_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = (
        "| case | kernel | warps | registers | spilt | shared memory | blocks | limit | threads |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['case']} | `{row['kernel']}` | {row['warps']} | {row['registers']} "
            f"| {row['spills']} | {row['shared'] / 1024:.0f} KB | {row['blocks']} "
            f"| {row['limit']} | {row['occupancy']:.0%} |"
        )
    return lines


def points() -> Iterator[Point]:
    """The fastest of ours in every case whose arithmetic and traffic are both known."""
    for component in COMPONENTS:
        for case, entry in timed(component.file).items():
            ours = [one for one in split(entry["times"])[0] if one["gb_per_s"]]
            if ours:
                best = min(ours, key=lambda one: float(one["seconds"]))
                intensity = intensity_of(case, best)
                if intensity:
                    yield Point(component.title, intensity, intensity * best["gb_per_s"] * 1e9)


def ceilings() -> tuple[float, float]:
    """Bytes a second of the best read or copy, FLOP a second of the best matmul, of all runs."""
    memory, matmul = 0.0, 0.0
    for component in COMPONENTS:
        for entry in timed(component.file).values():
            scales = split(entry["times"])[2]
            for name in ("copy", "read"):
                memory = max(memory, (scales.get(name, {}).get("gb_per_s") or 0.0) * 1e9)
            product = scales.get("matmul 8192³", {})
            matmul = max(matmul, (product.get("tflop_per_s") or 0.0) * 1e12)
    return memory, matmul


def goal_lines() -> list[str]:
    """What was asked of the memory-bound kernels, and what they reach."""
    results = {
        component.file: {
            case: goals.times_of(entry, OURS) for case, entry in timed(component.file).items()
        }
        for component in COMPONENTS[:3]
    }
    return [
        "## Goals and what is reached",
        "",
        "What was asked of the memory-bound kernels (`benchmarks/goals.py`), and the worst and the "
        "best that their shapes reach. Shares are of a plain copy or read of the same bytes in the "
        "same run. Why something is missed is said on the component's own page.",
        "",
        *goals.table(results),
        "",
    ]


def page() -> str:
    memory, matmul = ceilings()
    lines = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/page.py` from `benchmarks/results/nvidia-h200/`; nothing "
        "is typed by hand. Protocol: `benchmarks/harness.py`. Every ratio is between times of the "
        "same run: **× peer** is the peer's time over ours, below 1 we lose. The error is relative "
        "to float64, ours / the largest of the peers'.",
        "",
        f"Ceilings measured: {memory / 1e12:.2f} TB/s, {matmul / 1e12:.0f} TFLOP/s (bf16 matrix "
        "product, 8192³).",
        "",
        *goal_lines(),
    ]
    for component in COMPONENTS:
        found = load(component.file)
        if found is None:
            continue
        versions = ", ".join(f"{k} {v}" for k, v in found["machine"]["versions"].items())
        lines += [
            f"## {component.title}",
            "",
            f"`{found['command']}`; {found['machine']['device']}, {versions}. "
            f"[How it works](components/{component.page}.md).",
            "",
            *tables(component, timed(component.file)),
        ]
    generated = load("generate")
    if generated is not None:
        lines += [
            "## Generation",
            "",
            f"`bench_generate.py`: {', '.join(generated['sections'])}. A step is the slope "
            "between neighbouring calls of two lengths, the host included, the median of several; "
            "quartiles in brackets. "
            "[How it works](components/decoder.md).",
            "",
            *generation(generated["results"]),
            "",
        ]
    lines += cpu_lines()
    lines += ["## Roofline", "", f"![Roofline]({ROOFLINE.name})", ""]
    lines += [*intensity_text(memory, matmul), ""]
    resident = load("occupancy")
    if resident is not None:
        lines += [
            "## Occupancy",
            "",
            f"What Triton compiled for the main shapes (`{resident['command']}`; "
            f"{resident['machine']['device']}, Triton {resident['machine']['versions']['triton']}):"
            " blocks that fit on a multiprocessor, which resource ends first, and the share of its "
            "threads they fill. A low share is fine where one block already keeps the "
            "memory busy.",
            "",
            *occupancy_table(resident["results"]),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    found = [p for p in points() if math.isfinite(p.flops)]
    draw(found, *ceilings(), ROOFLINE)
    print(f"{PAGE.name} and {ROOFLINE.name}: {len(found)} cases in the roofline")


if __name__ == "__main__":
    main()
