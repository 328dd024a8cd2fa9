"""Every configuration of the kernels on a GPU, against float64. Skipped where there is none."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.needs_gpu
def test_kernels_on_a_gpu_agree_with_float64(tmp_path, run_script):
    run_script(HERE / "check_gpu.py", tmp_path)
    found = json.loads((tmp_path / "norms-0.json").read_text())
    assert found["cases"] > 200
    assert len(found["checks"]) == 6
    assert found["failed"] == []
