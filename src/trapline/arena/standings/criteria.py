"""What two answers are compared by: dimensions, findings, named measures, anatomy, cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trapline.arena.record import DIMENSIONS, Cell
from trapline.arena.standings.anatomy import Anatomy
from trapline.arena.standings.board import dimension, mean
from trapline.arena.standings.costs import total_cost
from trapline.arena.standings.margin import Margin, margin

Better = Literal["higher", "lower", "neither"]
Anatomies = Mapping[str, Anatomy]
#: Value of the attempts at one challenge, None where it is unknown.
Value = Callable[[Sequence[Cell], Anatomies], float | None]
#: For measures: the larger divided by the smaller; below the first, a tie.
TIE_RATIO, NARROW_RATIO, DECISIVE_RATIO = 1.05, 1.25, 2.0
#: For numbers of findings.
NARROW_COUNT, DECISIVE_COUNT = 2, 4
RATIO_RULE = (
    f"measures: under {TIE_RATIO:g} times a tie, under {NARROW_RATIO:g} narrow, "
    f"under {DECISIVE_RATIO:g} moderate, from {DECISIVE_RATIO:g} times decisive"
)


@dataclass(frozen=True)
class Criterion:
    name: str
    value: Value
    unit: str = "points"
    better: Better = "higher"
    #: Whether a mean over different challenges says anything.
    summable: bool = True

    def margin(self, best: float, next_best: float) -> Margin:
        """The word for the distance of the two best values."""
        if self.unit == "points":
            return margin(best - next_best)
        if self.unit == "findings":
            return _count_margin(abs(best - next_best))
        low, high = sorted((abs(best), abs(next_best)))
        return _ratio_margin(high / low if low > 0 else math.inf if high > 0 else 1.0)

    def text(self, value: float) -> str:
        """A value with its unit, for example 95.0, 3 findings, 12.5 ms."""
        if self.unit == "points":
            return f"{value:.1f}"
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        unit = self.unit.removesuffix("s") if value == 1 else self.unit
        return f"{shown} {unit}".rstrip()


def _count_margin(difference: float) -> Margin:
    if difference < 1:
        return "tie"
    if difference < NARROW_COUNT:
        return "narrow"
    return "moderate" if difference < DECISIVE_COUNT else "decisive"


def _ratio_margin(ratio: float) -> Margin:
    if ratio < TIE_RATIO:
        return "tie"
    if ratio < NARROW_RATIO:
        return "narrow"
    return "moderate" if ratio < DECISIVE_RATIO else "decisive"


def _dimension(name: str) -> Value:
    return lambda cells, _: dimension(cells, name)


def _findings(cells: Sequence[Cell], _: Anatomies) -> float | None:
    examined = [cell for cell in cells if any(trap.was_asked for trap in cell.traps)]
    return (
        mean([float(len(cell.findings or cell.fallen())) for cell in examined])
        if examined
        else None
    )


def _measure(dimension_name: str, read: Callable[[Mapping[str, Any]], object]) -> Value:
    """The mean over attempts of a figure in a dimension's evidence."""

    def value(cells: Sequence[Cell], _: Anatomies) -> float | None:
        found = [
            read(cell.dimensions[dimension_name].evidence)
            for cell in cells
            if dimension_name in cell.dimensions
        ]
        known = [float(x) for x in found if isinstance(x, int | float) and math.isfinite(x)]
        return mean(known) if known else None

    return value


def _largest_error(evidence: Mapping[str, Any]) -> object:
    return max(evidence.get("ratios") or [None], key=lambda ratio: ratio or 0.0)


def _peak(evidence: Mapping[str, Any]) -> object:
    peaks = evidence.get("extra_bytes") or []
    return max(peaks) / 2**20 if peaks else None


def _relative_time(evidence: Mapping[str, Any]) -> object:
    """Time over that of the reference, which was timed in turns with it; 1 within the noise.

    Milliseconds of two cells depend on how busy the machine was.
    """
    ratio = evidence.get("ratio")
    if not ratio:
        return None
    return 1.0 if abs(math.log(ratio)) <= evidence.get("noise", 0.0) else 1.0 / ratio


def _teraflops(evidence: Mapping[str, Any]) -> object:
    """Operations of a timed call over its time, where the challenge counts them."""
    milliseconds = (evidence.get("milliseconds") or {}).get("submission")
    operations = evidence.get("operations")
    return operations / milliseconds / 1e9 if milliseconds and operations else None


def _gpu_teraflops(evidence: Mapping[str, Any]) -> object:
    """The most operations a second on any timed shape of a GPU answer."""
    rates = [
        row["operations"] / row["seconds"] / 1e12
        for row in evidence.get("shapes", [])
        if row.get("operations") and row.get("seconds")
    ]
    return max(rates, default=None)


def _gpu_time(evidence: Mapping[str, Any]) -> object:
    """Time over that of torch's best, the geometric mean over the timed shapes."""
    ratios = [
        row["seconds"] / row["baseline"]
        for row in evidence.get("shapes", [])
        if row.get("seconds") and row.get("baseline")
    ]
    return math.exp(mean([math.log(ratio) for ratio in ratios])) if ratios else None


def _named(name: str) -> Value:
    """The mean over attempts of a figure that the challenge names."""

    def value(cells: Sequence[Cell], _: Anatomies) -> float | None:
        known = [cell.measures[name] for cell in cells if name in cell.measures]
        return mean(known) if known else None

    return value


def _anatomy(name: str) -> Value:
    def value(cells: Sequence[Cell], anatomies: Anatomies) -> float | None:
        known = [anatomies[cell.bundle] for cell in cells if cell.bundle in anatomies]
        return mean([float(getattr(one, name)) for one in known]) if known else None

    return value


def _usd(cells: Sequence[Cell], _: Anatomies) -> float | None:
    spent = total_cost(cells)
    return spent.usd if spent else None


def _tokens(cells: Sequence[Cell], _: Anatomies) -> float | None:
    spent = total_cost(cells)
    return float(spent.input_tokens + spent.output_tokens) or None if spent else None


CRITERIA = (
    *(Criterion(name, _dimension(name)) for name in DIMENSIONS),
    Criterion("findings", _findings, "findings", "lower"),
    Criterion("largest error", _measure("precision", _largest_error), "× careful", "lower", False),
    Criterion("peak memory", _measure("memory", _peak), "MiB", "lower", False),
    Criterion("time per call", _measure("speed", _relative_time), "× reference", "lower", False),
    # The machine's load is in it: the edge is that of the time beside the reference.
    Criterion("throughput", _measure("speed", _teraflops), "TFLOP/s", "neither", False),
    Criterion("GPU time per call", _measure("speed", _gpu_time), "× torch's best", "lower", False),
    Criterion("GPU throughput", _measure("speed", _gpu_teraflops), "TFLOP/s", "higher", False),
    Criterion("perplexity", _named("perplexity"), "", "lower", False),
    Criterion("cache bytes per token", _named("cache bytes per token"), "bytes", "lower", False),
    Criterion("calls of the model", _named("calls of the model"), "calls", "lower", False),
    Criterion("accepted length", _named("accepted length"), "tokens a pass", "higher", False),
    Criterion("lines of code", _anatomy("lines"), "lines", "lower"),
    Criterion("files", _anatomy("files"), "files", "neither"),
    Criterion("functions", _anatomy("functions"), "functions", "neither"),
    Criterion("own tests", _anatomy("tests"), "tests", "higher"),
    Criterion("assertions", _anatomy("assertions"), "assertions", "higher"),
    Criterion("documentation", _anatomy("prose_words"), "words", "higher"),
    Criterion("cost", _usd, "USD", "lower"),
    Criterion("tokens", _tokens, "tokens", "lower"),
)
BY_NAME = {criterion.name: criterion for criterion in CRITERIA}
