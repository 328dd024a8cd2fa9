"""The script that trains a pair from scratch, and the benchmark on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script, *args, **environment):
    command = [sys.executable, str(ROOT / script), *map(str, args)]
    ours = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUTF8": "1", **environment}
    done = subprocess.run(
        command, env=ours, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_replayed_round_accepts_what_the_trace_says(tmp_path):
    """The kernel against torch and against verification, over chains and random trees."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpret_replay.py")
    run(script, tmp_path, TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    found = json.loads((tmp_path / "replay.json").read_text())
    assert len(found) == 5
    assert all(all(one) for one in found), found


@pytest.mark.full
def test_pair_is_trained_and_measured(tmp_path):
    pair = tmp_path / "pair"
    run("scripts/train_dflash_pair.py", "--out", pair, "--size", "toy", "--check", 3)
    facts = json.loads((pair / "pair.json").read_text())
    assert facts["held_out"]["same answers at 0"]
    assert facts["held_out"]["same answers at 1"]
    assert facts["held_out"]["tree at 0"]["tau"] >= 1.0
    assert (pair / "drafter" / "drafter.safetensors").is_file()
    options = ["--pair", pair, "--device", "cpu", "--quick", "--batches", 1, "--out", tmp_path]
    said = run("benchmarks/bench_dflash.py", *options)
    (written,) = tmp_path.glob("*/dflash.json")
    results = json.loads(written.read_text())["results"]
    for table in results["trained pair"]:
        contenders = table["contenders"]
        assert contenders["decoder's engine"]["tau"] == 1.0
        assert contenders["chain"]["tau"] >= 1.0
        assert contenders["tree of 16"]["served_by"] == "readable loop"
        assert contenders["tree of 16"]["speed_up"] > 0.0
    assert "τ" in said
