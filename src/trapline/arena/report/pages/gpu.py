"""What GPU cells add to the pages: times by shape, the roofline, kernels, the compiler's log."""

import math
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from trapline.arena.record import Bundle, Cell
from trapline.arena.report import plots

Figure = tuple[str, str, Markup]
_NEEDED = ("seconds", "light", "baseline", "gold")


def shapes(cell: Cell) -> list[dict[str, Any]]:
    """The timed shapes of a cell of the GPU track; none where nothing was timed."""
    if cell.track != "gpu" or "speed" not in cell.dimensions:
        return []
    rows = cell.dimensions["speed"].evidence.get("shapes", [])
    return [row for row in rows if all(_positive(row.get(name)) for name in _NEEDED)]


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def microseconds(seconds: float) -> str:
    """Three significant digits, from 1.23 to 45,600."""
    value = seconds * 1e6
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{digits}f}"


def context(cell: Cell, bundle: Bundle | None) -> dict[str, Any]:
    """For the page of one cell."""
    rows = shapes(cell)
    log = str(bundle.raw.get("compile log", "")) if bundle else ""
    if not rows and not log:
        return {}
    return {
        "rows": [(row, row["light"] / row["seconds"]) for row in rows],
        "kernels": [(row["shape"], _by_name(row["kernels"])) for row in rows if row.get("kernels")],
        "lights": _lights(cell),
        "clocks": _clocks(next((row["clocks"] for row in rows if row.get("clocks")), {})),
        "log": log,
        "roofline": roofline([cell]),
    }


def _by_name(kernels: dict[str, float]) -> dict[str, float]:
    """Shares by the kernels' names without return types and arguments."""
    found: dict[str, float] = {}
    for signature, share in kernels.items():
        name = signature.removeprefix("void ").replace("(anonymous namespace)::", "")
        name = re.sub(r"\(.*", "", name) or signature
        found[name] = found.get(name, 0.0) + share
    return found


def _clocks(state: dict[str, int]) -> list[str]:
    units = {"sm MHz": "SM clock {} MHz", "memory MHz": "memory clock {} MHz", "celsius": "{} °C"}
    return [text.format(state[name]) for name, text in units.items() if name in state]


def _lights(cell: Cell) -> list[tuple[str, str]]:
    """What the GPU reached that day, in words."""
    rates = cell.dimensions["speed"].evidence.get("lights", {}) if shapes(cell) else {}
    names = {"copy": "TB/s", "read": "TB/s", "bfloat16": "TFLOP/s", "float32": "TFLOP/s"}
    return [(n, f"{rates[n] / 1e12:.3g} {unit}") for n, unit in names.items() if n in rates]


def by_shape(cells: Sequence[Cell]) -> dict[str, Any]:
    """For the page of a challenge: entrants in rows, shapes in columns, microseconds.

    The first rows are what the GPU could do, torch's best and the gold solution.
    """
    timed = [(cell, {row["shape"]: row for row in shapes(cell)}) for cell in cells]
    timed = [(cell, rows) for cell, rows in timed if rows]
    if not timed:
        return {}
    _, first = timed[0]
    names = list(first)
    marks = [
        (title, [first[name][key] for name in names])
        for title, key in (
            ("speed of light", "light"),
            ("torch's best", "baseline"),
            ("gold solution", "gold"),
        )
    ]
    return {"names": names, "marks": marks, "cells": timed}


def roofline(cells: Sequence[Cell]) -> Figure | None:
    """Answers, the gold solution and torch's best under the roofs of the day."""
    rows = [(cell, row) for cell in cells for row in shapes(cell)]
    placed = [at for at in rows if all(_positive(at[1].get(of)) for of in ("bytes", "operations"))]
    rates = next((c.dimensions["speed"].evidence.get("lights") for c, _ in placed), None)
    if not placed or not rates:
        return None
    answers = [(cell.entrant, *_point(row, "seconds")) for cell, row in placed]
    first = {(cell.challenge, row["shape"]): row for cell, row in reversed(placed)}
    marks = {
        "gold": [_point(row, "gold") for row in first.values()],
        "torch": [_point(row, "baseline") for row in first.values()],
    }
    note = (
        "Operations a second over operations a byte, of the least work that a shape needs. Lines "
        "are that day's copy and matrix products. Dots are answers, diamonds the gold solution, "
        "crosses torch's best."
    )
    label = f"Roofline of {len(answers)} times on {len(first)} shapes"
    return "Roofline", note, plots.roofline(answers, marks, rates, label)


def _point(row: dict[str, Any], of: str) -> tuple[float, float]:
    """Operations a byte, and 10¹² operations a second."""
    return row["operations"] / row["bytes"], row["operations"] / row[of] / 1e12
