"""What a run leaves to look at: its evaluations as a table and as a plot."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trapline.gold.atomic_write import write_file

COLUMNS = ("step", "train_loss", "valid_loss", "perplexity", "flipped")


def write_table(rows: Sequence[Any], path: str | Path) -> None:
    """Writes one line per evaluation."""
    write_file(path, lambda place: _write_lines(rows, place))


def _write_lines(rows: Sequence[Any], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, column) for column in COLUMNS] for row in rows)


def plot(runs: Mapping[str, Sequence[Any]], path: str | Path) -> None:
    """Held-out loss (full line), training loss (thin) and code flips of one or several runs.

    Raises ImportError where matplotlib is missing (the extra `report` brings it).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for number, (name, rows) in enumerate(runs.items()):
        steps, colour = [row.step for row in rows], f"C{number}"
        above.plot(steps, [row.valid_loss for row in rows], color=colour, label=name)
        above.plot(steps, [row.train_loss for row in rows], color=colour, linewidth=0.6, alpha=0.6)
        below.plot(steps, [row.flipped for row in rows], color=colour)
    above.set_ylabel("loss (nats a token)")
    above.legend(title="held out; thin: training")
    below.set_ylabel("codes flipped")
    below.set_xlabel("step")
    write_file(path, lambda place: figure.savefig(place, dpi=120))
