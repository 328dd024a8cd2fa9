"""docs/benchmarks.md says what the committed results say, and says losses as plainly as wins."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def timing(name, seconds, gigabytes=None, teraflops=None):
    return {"name": name, "seconds": seconds, "gb_per_s": gigabytes, "tflop_per_s": teraflops}


@pytest.fixture
def results(pages, tmp_path, monkeypatch):
    times = [
        timing("trapline", 2e-6, 3000.0),
        timing("torch", 1e-6, 6000.0),
        timing("copy", 1e-6, 4000.0),
    ]
    errors = {"trapline": {"dx": {"relative": 1e-3, "largest": 9.0}, "dw": {"relative": 2e-3}}}
    errors["torch"] = {"dx": {"relative": 5e-3}}
    machine = {"device": "a GPU", "versions": {"torch": "2"}}
    found = {"layer norm backward 8×8 bfloat16": {"times": times, "errors": errors}, "notes": {}}
    record = {"command": "bench_norms.py", "machine": machine, "results": found}
    (tmp_path / "norms.json").write_text(json.dumps(record))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)


def test_a_loss_is_a_ratio_below_one(pages, results):
    (row,) = (line for line in pages.page().splitlines() if line.startswith("| layer norm"))
    assert row == (
        "| layer norm backward 8×8 bfloat16 | 2.0 | 3000 GB/s | 75% | 0.50 | 2.0e-03 / 5.0e-03 |"
    )


def test_the_roofline_counts_operations_and_bytes(pages, results):
    (point,) = pages.points()
    assert point.intensity == pytest.approx(17 / 6)
    assert point.flops == pytest.approx(17 / 6 * 3e12)
    assert pages.ceilings() == (4e12, 0.0)


def test_the_page_is_that_of_the_committed_results(pages):
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page(), "run benchmarks/page.py"
