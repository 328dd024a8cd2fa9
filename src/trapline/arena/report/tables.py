"""The table behind the report: one row per cell, as CSV, JSON or Parquet."""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trapline.arena.errors import MissingError
from trapline.arena.record import DIMENSIONS, Cell

COLUMNS = (
    "entrant", "challenge", "track", "attempt", "harness", "model", "state", "score", "letter",
    *DIMENSIONS,
    "traps_set", "traps_fallen", "fallen", "flaw", "isolation", "full", "seed", "seconds",
    "started", "submission_digest", "challenge_digest", "trap_set", "bundle", "reason",
)  # fmt: skip


def row(cell: Cell) -> dict[str, Any]:
    """A cell as one flat row; None for what was not measured."""
    asked = [trap for trap in cell.traps if trap.was_asked]
    flat = {name: getattr(cell, name) for name in COLUMNS if name in Cell.model_fields}
    flat |= {
        name: cell.dimensions[name].score if name in cell.dimensions else None
        for name in DIMENSIONS
    }
    flat |= {
        "traps_set": len(asked),
        "traps_fallen": len(cell.fallen()),
        "fallen": " ".join(cell.fallen()),
        "started": cell.started.isoformat(),
        "trap_set": str(cell.trap_set) if cell.trap_set else "",
    }
    return {name: flat[name] for name in COLUMNS}


def as_csv(cells: Sequence[Cell]) -> str:
    """CSV with a header; an apostrophe keeps spreadsheets from running text as a formula."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        writer.writerow({name: _inert(value) for name, value in row(cell).items()})
    return buffer.getvalue()


def _inert(value: Any) -> Any:
    return (
        f"'{value}"
        if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
        else value
    )


def as_json(cells: Sequence[Cell]) -> str:
    rows = [{name: _finite(value) for name, value in row(cell).items()} for cell in cells]
    return json.dumps({"columns": COLUMNS, "cells": rows}, indent=1, ensure_ascii=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_parquet(cells: Sequence[Cell], path: Path) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingError("Parquet needs pyarrow: pip install 'trapline[report]'") from None
    kinds = {
        "attempt": pa.int64(), "seed": pa.uint64(), "full": pa.bool_(),
        "traps_set": pa.int64(), "traps_fallen": pa.int64(),
        **{name: pa.float64() for name in ("score", "seconds", *DIMENSIONS)},
    }  # fmt: skip
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
    pq.write_table(pa.Table.from_pylist([row(cell) for cell in cells], schema=schema), path)


def write_table(cells: Sequence[Cell], path: Path, form: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        write_parquet(cells, path)
    else:
        path.write_text(
            as_csv(cells) if form == "csv" else as_json(cells), encoding="utf-8", errors="replace"
        )
    return path
