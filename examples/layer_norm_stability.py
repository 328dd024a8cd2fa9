"""Why layer norm centres before it squares: two formulas for the variance, at growing offsets.

The row −2, −1, 0, 1, 2 has the variance 2, wherever it lies. `E[x²] − E[x]²` loses it.

    python examples/layer_norm_stability.py --out stability.png
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trapline.gold import layer_norm

ROW = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
OFFSETS = [0.0, *(10.0**power for power in range(2, 14))]


class Line(NamedTuple):
    """What both formulas give at one offset."""

    offset: float
    naive: float
    stable: float
    #: Largest error of the normalised row, for each variance.
    naive_error: float
    stable_error: float


def measure(offset: float) -> Line:
    """Both variances of the row at this offset, and what they do to the normalised row."""
    x = ROW + offset
    naive = float(np.mean(x * x) - np.mean(x) ** 2)
    centred = x - np.mean(x)
    stable = float(np.mean(centred * centred))
    truth = ROW / np.sqrt(2.0 + 1e-5)
    with np.errstate(invalid="ignore"):
        from_naive = centred / np.sqrt(naive + 1e-5)
    ours = layer_norm(x, np.ones(5), np.zeros(5))
    return Line(offset, naive, stable, _error(from_naive, truth), _error(ours, truth))


def _error(got: np.ndarray, truth: np.ndarray) -> float:
    return float(np.max(np.abs(got - truth)))  # NaN where the naive variance is negative


def table(lines: list[Line]) -> str:
    """The measurements as text."""
    head = f"{'offset':>8}  {'naive variance':>18}  {'stable':>7}  {'error of y':>10}  {'ours':>8}"
    rows = [
        f"{line.offset:8.0e}  {line.naive:18.3f}  {line.stable:7.3f}  {line.naive_error:10.1e}"
        f"  {line.stable_error:8.1e}"
        for line in lines
    ]
    return "\n".join([head, *rows])


def plot(lines: list[Line], out: Path) -> None:
    """Both variances against the offset."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    offsets = [line.offset for line in lines[1:]]
    axes.semilogx(offsets, [line.naive for line in lines[1:]], "o--", label="E[x²] − E[x]²")
    axes.semilogx(offsets, [line.stable for line in lines[1:]], "s-", label="mean of (x − mean)²")
    axes.set(xlabel="offset of the row", ylabel="variance (2 is right)", ylim=(-6, 6))
    axes.set_title("Variance of −2, −1, 0, 1, 2 in float64, moved by an offset")
    axes.legend()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Variance at growing offsets, two ways.")
    parser.add_argument("--out", type=Path, help="write the plot to this file")
    out = parser.parse_args().out
    lines = [measure(offset) for offset in OFFSETS]
    print(table(lines))
    if out is not None:
        plot(lines, out)
        print(f"\nplot: {out}")


if __name__ == "__main__":
    main()
