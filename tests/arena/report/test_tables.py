"""The table behind the report."""

import csv
import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from trapline.arena.report import tables


def test_csv_has_one_row_per_cell(small_run):
    rows = list(csv.DictReader(io.StringIO(tables.as_csv(small_run.cells))))
    assert len(rows) == len(small_run.cells)
    assert tuple(rows[0]) == tables.COLUMNS
    assert float(rows[0]["score"]) == small_run.cells[0].score
    assert rows[7]["score"] == ""
    assert rows[7]["state"] == "infra_error"


@pytest.mark.parametrize("name", ["=1+1", "-1+1", "+1", "@SUM(A1)"])
def test_formula_in_a_name_stays_text(cell_maker, name):
    cell = cell_maker(name, "rows", 0.9, np.random.default_rng(0))
    row = next(csv.DictReader(io.StringIO(tables.as_csv([cell]))))
    assert row["entrant"] == f"'{name}"


def test_json_is_strict(cell_maker):
    cell = cell_maker("a", "rows", 0.9, np.random.default_rng(0), seconds=float("inf"))
    data = json.loads(tables.as_json([cell]), parse_constant=pytest.fail)
    assert data["cells"][0]["seconds"] is None


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_each_form_is_written(small_run, tmp_path, form):
    path = tables.write_table(small_run.cells, tmp_path / "deep" / f"cells.{form}", form)
    assert path.stat().st_size > 500


def test_parquet_keeps_types_and_gaps(small_run, tmp_path):
    path = tables.write_table(small_run.cells, tmp_path / "cells.parquet", "parquet")
    rows = pq.read_table(path).to_pylist()
    assert rows[0]["score"] == small_run.cells[0].score
    assert rows[7]["score"] is None
    assert rows[0]["attempt"] == 1
