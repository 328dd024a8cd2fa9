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
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
    yield module
    for name in (spec.name, "goals", "roofline"):
        del sys.modules[name]


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
    (row,) = (
        line for line in pages.page().splitlines() if line.startswith("| layer norm backward 8×8")
    )
    assert row == (
        "| layer norm backward 8×8 bfloat16 | 2.0 | 3000 GB/s | 75% | 0.50 | 2.0e-03 / 5.0e-03 |"
    )


def test_the_roofline_counts_operations_and_bytes(pages, results):
    (point,) = pages.points()
    assert point.intensity == pytest.approx(13 / 6)
    assert point.flops == pytest.approx(13 / 6 * 3e12)
    assert pages.ceilings() == (4e12, 0.0)


def test_a_goal_is_met_by_all_of_its_shapes_or_missed(pages):
    goals = pages.goals
    times = {"ours": 1e-5, "copy": 0.95e-5, "torch": 1.7e-5, "Liger": 2e-5}
    norms = {f"layer norm forward {shape} bfloat16": times for shape in goals.SHAPES}
    norms["layer norm forward 8192×4096 bfloat16"] = {**times, "torch": 1.5e-5}
    anchor = "anchor B8 H32 G8 D128 L1024 page 16 bf16"
    lines = goals.table({"norms": norms, "paged_attention": {anchor: {"ours": 1.31e-5}}})
    assert "| layer norm forward | ≥ 92.0% of copy | 95.0% of copy | 5 not measured |" in lines
    assert (
        "| layer norm forward, bf16 | ≥ 1.65 × torch | 1.50 – 1.70 × torch "
        "| missed at 8192×4096 bfloat16 (1.50) |"
    ) in lines
    assert "| paged decode, B8 H32 G8 D128 L1024 | ≤ 13.00 µs | 13.10 µs | missed |" in lines
    assert "| layer norm backward | ≥ 2.00 × torch |  | 10 not measured |" in lines


def test_every_goal_names_a_case_that_was_measured(pages):
    """A goal on a case that is called otherwise would stay unmeasured for ever."""
    for goal in pages.goals.goals():
        assert goal.cases
        if goal.file != "norms":
            assert set(goal.cases) <= set(pages.timed(goal.file))


def test_the_page_is_that_of_the_committed_results(pages):
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page(), "run benchmarks/page.py"


def test_generation_says_steps_calls_and_what_else_was_held(pages):
    ours = [timing("ours, 128 new", 0.05), timing("ours, 64 new", 0.03)]
    times = [*ours, timing("transformers, 128 new", 1.5), timing("transformers, 64 new", 0.8)]
    slopes = {"ours": [2.8e-4, 3e-4, 3.4e-4]}
    results = {
        "greedy": {
            "times": times,
            "slopes": slopes,
            "steps": {"ours": 3e-4, "transformers": 0.012},
        },
        "alone": {
            "times": ours,
            "slopes": slopes,
            "steps": {"ours": 3e-4},
            "left_out": {"times": times[2:3], "why": "it rained"},
        },
        "calls": {"times": [ours[0], times[2]], "note": "in another run"},
        "8B": {
            "times": ours,
            "slopes": slopes,
            "steps": {"ours": 4e-3},
            "ratio": 1.25,
            "reading_seconds": 3.5e-3,
            "captured": timing("captured step", 4.2e-3),
            "captured_ratio": 1.2,
        },
        "pages": {"times": ours, "cost": 0.004},
        "ids": {"share of equal tokens": {"batch 8": 1.0}},
        "logits": {"errors": {"ours": {"relative": 0.012}}},
        "long": {
            "times": times,
            "slopes": slopes,
            "steps": {"ours": 4e-4, "transformers": 4e-3},
            "peak_bytes": {"ours": 2**20, "transformers": 2**22},
        },
    }
    lines = pages.generation(results)
    assert "| greedy | 0.300 (0.290 – 0.320) | 40.0 | 50.0 | 30.0 |" in lines
    assert "| alone | 0.300 (0.290 – 0.320) |  | 50.0 |  |" in lines
    assert "| calls |  |  | 50.0 | 30.0 |" in lines
    assert [line for line in lines if line.startswith("- ")] == [
        "- alone: left out: transformers, 128 new, 1.50 s, it rained.",
        "- calls: in another run.",
        "- 8B: a step takes 1.250 times the 3.500 ms to read weights and cache, "
        "captured 4.200 ms, 1.200 times.",
        "- pages: 50.000 ms in order, permuted +0.4%.",
        "- ids: 100.0% of transformers' tokens (batch 8).",
        "- logits: relative error 0.0120 (ours).",
        "- long: 1 MiB above the weights, transformers 4.",
    ]
