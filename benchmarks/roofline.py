"""The roofline of docs/benchmarks.md and the arithmetic behind it, for `page.py`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Datasheet, H200 SXM: float32 outside the tensor cores. The other roofs are measured.
VECTOR_FLOPS = 67e12


@dataclass(frozen=True)
class Elementwise:
    """Arithmetic an element (an addition, comparison or exponential counts one) and how often
    the element crosses the memory bus; the cases it is true of."""

    what: str
    pattern: str
    operations: int
    crossings: int


#: First match counts.
ELEMENTWISE = (
    # Sum; centre; square, sum; scale; weight; bias.
    Elementwise("layer norm forward", r"layer norm forward", 7, 2),
    # x_hat 2, g 1, two sums 3, dw and db 3, dx 4.
    Elementwise("layer norm backward", r"layer norm backward", 13, 3),
    Elementwise("RMS norm + residual forward", r"RMS norm \+ residual forward", 5, 4),
    Elementwise("RMS norm + residual backward", r"RMS norm \+ residual backward", 10, 4),
    Elementwise("RMS norm forward", r"RMS norm forward", 4, 2),
    Elementwise("RMS norm backward", r"RMS norm backward", 9, 3),
    # Group maximum, online maximum, difference, its scale, exponential, sum.
    Elementwise("softmax + top-k", r"×.*k\d+", 6, 1),
)


@dataclass(frozen=True)
class Point:
    """A case in the roofline: FLOP a byte, FLOP a second."""

    component: str
    intensity: float
    flops: float


def intensity_of(case: str, one: dict[str, Any]) -> float | None:
    """FLOP a byte of a case: as it was counted with its time, or from the formulas."""
    if one["tflop_per_s"]:
        return float(one["tflop_per_s"] * 1e3 / one["gb_per_s"])
    size = 4 if re.search(r"float32|fp32", case) else 2
    for kind in ELEMENTWISE:
        if re.search(kind.pattern, case):
            return kind.operations / (kind.crossings * size)
    return None


def draw(found: Sequence[Point], memory: float, matmul: float, path: Path) -> None:
    """Points under two roofs: the tensor cores', and that of plain float32."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "roofline"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    grid = sorted([0.125, matmul / memory, VECTOR_FLOPS / memory, 32768.0])
    for roof, name in ((matmul, "bf16 matrix product"), (VECTOR_FLOPS, "float32, datasheet")):
        axes.plot(grid, [min(x * memory, roof) for x in grid], label=name, linewidth=1)
    for title in dict.fromkeys(point.component for point in found):
        mine = [point for point in found if point.component == title]
        axes.scatter([p.intensity for p in mine], [p.flops for p in mine], label=title, s=14)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="FLOP a second")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def intensity_table() -> list[str]:
    head = "| | operations an element | FLOP a byte, float32 | bfloat16 |"
    lines = [head, "|---|---|---|---|"]
    for kind in ELEMENTWISE:
        full, half = (f"{kind.operations / (kind.crossings * size):.2f}" for size in (4, 2))
        lines.append(f"| {kind.what} | {kind.operations} | {full} | {half} |")
    return lines


def intensity_text(memory: float, matmul: float) -> list[str]:
    """The seeds' argument: softmax + top-k at 1.5 FLOP a byte is bound by memory."""
    ridge, plain = matmul / memory, VECTOR_FLOPS / memory
    topk = ELEMENTWISE[-1]
    full, half = (topk.operations / (topk.crossings * size) for size in (4, 2))
    budget = VECTOR_FLOPS / 2 / (memory / 4)
    return [
        "Arithmetic intensity of what is not a matrix product, from the formulas (one for each "
        "addition, multiplication, comparison or exponential; an element's bytes as often as it "
        "must cross the bus):",
        "",
        *intensity_table(),
        "",
        f"**The argument of 1.5 FLOP a byte.** Softmax + top-k spends about {topk.operations} "
        f"operations on a logit: {full:.1f} FLOP a byte in float32, {half:.1f} in bfloat16. An "
        "A100 balances at 9.6 (19.5 TFLOP/s of plain float32 over 2.04 TB/s), this chip at "
        f"{plain:.0f} ({VECTOR_FLOPS / 1e12:.0f} over the {memory / 1e12:.2f} TB/s measured), its "
        f"tensor cores at {ridge:.0f}: so it is bound by memory, and reading the logits once "
        "is the floor. That is right, and leaves two things out. An operation is not the only "
        f"instruction: at {memory / 1e12:.1f} TB/s a float32 logit has {budget:.0f} instructions "
        "of a thread to itself on its way through a multiprocessor, a bfloat16 logit half as "
        "many, loads, conversions and addresses included, and an exponential takes the room of "
        "eight additions. The distance between our bfloat16 and float32 shares of the bandwidth "
        "is that. And the selection after the read has no intensity worth the name: its time is "
        "latency and instructions, which is why short rows and large k are furthest from the "
        "roof.",
    ]
