"""What the memory-bound kernels were asked to reach on one H200, held against the results.

Every figure is computed from the times of one run: `share` is the time of a plain copy or read of
the same bytes over ours, `faster` a peer's time over ours, `microseconds` our own. A goal that
several shapes must reach counts as reached when the worst of them does. `page.py` prints the table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

Times = dict[str, float]  # seconds by contender, ours as "ours"
Results = dict[str, dict[str, Times]]  # by file, then by case
Figure = Callable[[Times], float]

SHAPES = ("16384×1024", "8192×4096", "8192×8192", "4096×16384", "65536×768")
DTYPES = ("bfloat16", "float32")
TOPK, TOPK_TORCH = "512×128256 k", ("torch softmax, topk", "torch topk, logsumexp")
FIVE = ("1×131072 k64", "64×8192 k8", "32×16384 k32", "16×12000 k16", "128×4096 k1")
PAGED = ("B8 H32 G8 D128 L1024", "B32 H32 G8 D128 L2048", "B4 H64 G8 D128 L4096")
PAGED += ("B16 H32 G8 D128 L1535", "B8 H16 G4 D64 L2000")


@dataclass(frozen=True)
class Goal:
    """A limit that each of these cases has to keep."""

    what: str
    limit: float
    unit: str  # of copy, of read, × torch, …, µs
    file: str
    cases: Sequence[str]
    figure: Figure

    @property
    def at_most(self) -> bool:
        return self.unit == "µs"

    def number(self, value: float) -> str:
        return f"{value:.1%}" if self.unit.startswith("of") else f"{value:.2f}"

    def said(self, values: Iterable[float]) -> str:
        """The worst and the best of several, with their unit."""
        numbers = sorted(values)
        ends = dict.fromkeys(self.number(value) for value in (numbers[0], numbers[-1]))
        return f"{' – '.join(ends)} {self.unit}"

    def met(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


def share(of: str, times: Times) -> float:
    return times[of] / times["ours"]


def faster(than: Sequence[str], times: Times) -> float:
    """Than the fastest of these."""
    return min(times[name] for name in than) / times["ours"]


def than_bf16(kind: str, times: Times) -> float:
    return times["bf16"] / times[kind]


def microseconds(times: Times) -> float:
    return times["ours"] * 1e6


def goals() -> Iterable[Goal]:
    """The table of the norms, of top-k and of paged attention."""
    yield from _norms()
    yield from _topk()
    yield from _paged()


def _norms() -> Iterable[Goal]:
    of_copy = partial(share, "copy")

    def cases(kind: str, shapes: Sequence[str], dtypes: Sequence[str]) -> list[str]:
        return [f"{kind} {shape} {dtype}" for dtype, shape in product(dtypes, shapes)]

    def norm(what: str, limit: float, unit: str, over: list[str], figure: Figure) -> Goal:
        return Goal(what, limit, unit, "norms", over, figure)

    torch, liger = partial(faster, ["torch"]), partial(faster, ["Liger"])
    for kind in ("layer norm forward", "RMS norm forward"):
        yield norm(kind, 0.92, "of copy", cases(kind, SHAPES, DTYPES), of_copy)
        yield norm(f"{kind}, bf16", 1.65, "× torch", cases(kind, SHAPES, DTYPES[:1]), torch)
        yield norm(f"{kind}, fp32", 1.4, "× torch", cases(kind, SHAPES, DTYPES[1:]), torch)
    kind = "layer norm backward"
    narrow = [shape for shape in SHAPES if not shape.endswith("16384")]
    yield norm(f"{kind} to D 8192", 0.85, "of copy", cases(kind, narrow, DTYPES), of_copy)
    yield norm(f"{kind}, D 16384", 0.75, "of copy", cases(kind, [SHAPES[3]], DTYPES), of_copy)
    yield norm(kind, 2.0, "× torch", cases(kind, SHAPES, DTYPES), torch)
    yield norm(kind, 1.3, "× Liger", cases(kind, SHAPES, DTYPES), liger)


def _topk() -> Iterable[Goal]:
    of_read, file = partial(share, "read"), "softmax_topk"
    for k, dtype, limit in (
        *((64, "float32", 0.8), (64, "bfloat16", 0.7)),
        *((256, "float32", 0.65), (1024, "float32", 0.45)),
    ):
        what = f"softmax + top-{k}, 512×128256, {dtype}"
        yield Goal(what, limit, "of read", file, [f"{TOPK}{k} {dtype}"], of_read)
    both = [f"{TOPK}64 {dtype}" for dtype in DTYPES]
    torch = partial(faster, TOPK_TORCH)
    yield Goal("softmax + top-64, 512×128256", 12.0, "× torch", file, both, torch)
    for case, limit in zip(FIVE, (7.9, 4.6, 6.0, 5.1, 2.6), strict=True):
        what = f"softmax + top-k, fp32, {case}"
        yield Goal(what, limit, "µs", file, [f"{case} float32"], microseconds)


def _paged() -> Iterable[Goal]:
    file, end = "paged_attention", " page 16 bf16"
    goal = f"goal B32 H32 G8 D128 L4096{end}"
    yield Goal("paged decode, B32 L4096", 0.92, "of read", file, [goal], partial(share, "read"))
    for case, limit in zip(PAGED, (13.0, 65.0, 21.0, 28.0, 9.0), strict=True):
        cases = [f"anchor {case}{end}"]
        yield Goal(f"paged decode, {case}", limit, "µs", file, cases, microseconds)
    kinds = [f"kinds B32 H32 G8 D128 L8192{end}"]
    for kind, limit in (("int8", 1.8), ("fp8", 1.8), ("int4", 2.6)):
        what = f"paged decode, {kind} pages, B32 L8192"
        yield Goal(what, limit, "× bf16", file, kinds, partial(than_bf16, kind))


def table(results: Results) -> list[str]:
    """A row for each goal: what was asked, the worst and the best of its cases, and the misses."""
    lines = ["| goal | asked | reached | |", "|---|---|---|---|"]
    for goal in goals():
        timed = results.get(goal.file, {})
        found = {case: goal.figure(timed[case]) for case in goal.cases if case in timed}
        asked = f"{'≤' if goal.at_most else '≥'} {goal.said([goal.limit])}"
        reached = goal.said(found.values()) if found else ""
        lines.append(f"| {goal.what} | {asked} | {reached} | {verdict(goal, found)} |")
    return lines


def verdict(goal: Goal, found: dict[str, float]) -> str:
    """Met by all cases, or where not; what was not measured does not count as met."""
    below = [
        f"{shape_of(case)} ({goal.number(value)})"
        for case, value in found.items()
        if not goal.met(value)
    ]
    absent = len(goal.cases) - len(found)
    words = []
    if below:
        words.append("missed" if len(goal.cases) == 1 else f"missed at {', '.join(below)}")
    if absent:
        words.append(f"{absent} not measured")
    return "; ".join(words) or "met"


def shape_of(case: str) -> str:
    """A case without what the goal's own name says."""
    for kind in ("layer norm", "RMS norm"):
        for way in ("forward", "backward"):
            case = case.removeprefix(f"{kind} {way} ")
    return case


def times_of(entry: dict[str, Any], ours: tuple[str, ...]) -> Times:
    """Seconds by contender; ours, whatever it is called there, as "ours"."""
    return {
        "ours" if one["name"] in ours else one["name"]: one["seconds"] for one in entry["times"]
    }
