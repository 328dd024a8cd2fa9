"""Why layer norm subtracts the mean before it squares: two formulas for the variance.

The row −2, −1, 0, 1, 2 has variance 2 at every offset. In float64, `E[x²] − E[x]²` loses it.

    python examples/layer_norm_stability.py --out stability.png
"""

import argparse
from pathlib import Path

import numpy as np

from trapline.gold import layer_norm

ROW = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
OFFSETS = [0.0, *(10.0**power for power in range(2, 14))]
TRUTH = ROW / np.sqrt(2.0 + 1e-5)


def variances(offset: float) -> tuple[float, float]:
    """By the naive formula, and of the centred row."""
    x = ROW + offset
    return float(np.mean(x * x) - np.mean(x) ** 2), float(np.mean((x - np.mean(x)) ** 2))


def plot(out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    naive, centred = zip(*map(variances, OFFSETS[1:]), strict=True)
    axes.semilogx(OFFSETS[1:], naive, "o--", label="E[x²] − E[x]²")
    axes.semilogx(OFFSETS[1:], centred, "s-", label="mean of (x − mean)²")
    axes.set(xlabel="offset of the row", ylabel="variance (2 is right)", ylim=(-6, 6))
    axes.legend()
    figure.savefig(out, dpi=120)
    print(f"\nplot: {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Variance at growing offsets, two ways.")
    parser.add_argument("--out", type=Path, help="write a plot to this file")
    out = parser.parse_args().out
    print(f"{'offset':>8}  {'naive':>14}  {'centred':>7}  {'error of y':>10}  {'layer_norm':>10}")
    for offset in OFFSETS:
        naive, centred = variances(offset)
        with np.errstate(invalid="ignore"):  # the naive variance can be negative
            wrong = np.abs(ROW / np.sqrt(naive + 1e-5) - TRUTH).max()
        error = np.abs(layer_norm(ROW + offset, np.ones(5), np.zeros(5)) - TRUTH).max()
        print(f"{offset:8.0e}  {naive:14.3f}  {centred:7.3f}  {wrong:10.1e}  {error:10.1e}")
    if out is not None:
        plot(out)


if __name__ == "__main__":
    main()
