"""docs/scale.md says what the committed measurement says, and its sums are right."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def result():
    one = {
        "cells": 2,
        "mean_seconds": 9.0,
        "median_seconds": 9.0,
        "largest_seconds": 9.0,
        "rig_seconds": 3.0,
        "bundle_bytes": 20_000,
        "bundle_blocks": 20_480,
        "bundle_compressed": 5_000,
        "record_bytes": 10_000,
    }
    return {
        "device": "cpu-test",
        "cores": 2,
        "load_before": 0.1,
        "level": "bubblewrap",
        "full": False,
        "entrants": ["gold"],
        "cells": 4,
        "challenges": {"one": one, "two": {**one, "mean_seconds": 27.0}},
        "store": {"read_ms": 0.5, "save_ms": 5.0},
    }


def test_the_page_is_the_one_that_the_results_give(scale):
    written = (ROOT / "docs" / "scale.md").read_text()
    pages = [
        scale.page(json.loads(path.read_text()))
        for path in (ROOT / "benchmarks" / "results").glob("*/scale.json")
    ]
    assert written in pages


def test_the_sums(scale, result):
    page = scale.page(result)
    assert "**10,000 cells**" in page
    # 5,000 × (9 + 27) s
    assert "**50 machine hours**" in page
    # (180,000 s / 10 + 6 s) / 0.8
    assert "| 10 | 6.3 | 0.26 |" in page
    assert "| evidence bundles, their bytes | 0.20 |" in page
    assert "| machines | 62 paid hours × 0.10 | 6.25 |" in page
    assert "12,000 cells a minute" in page
    assert "busy" not in page


def test_busy_machine_is_reported(scale, result):
    assert "The machine was busy" in scale.page({**result, "load_before": 5.0})
