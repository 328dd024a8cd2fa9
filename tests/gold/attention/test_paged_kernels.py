"""The paged kernels: right in the interpreter, compilable for a Hopper GPU. No GPU is needed."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_interpreted_kernels_agree_with_the_torch_path(tmp_path, run_script):
    run_script(HERE / "interpret_paged.py", tmp_path, TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "differences.json").read_text())
    assert len(found) == 16
    for name, differences in found.items():
        assert differences["appended"] == 0.0, name
        assert differences["attended"] < (1e-5 if name.endswith("float32") else 6e-3), name


def test_kernels_compile_for_hopper(tmp_path, run_script):
    """Plain pages, 8-bit integers and floats, 4-bit codes, for sm_90, within its shared memory."""
    run_script(HERE / "compile_paged.py", tmp_path, TRITON_INTERPRET="0")
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert len(compiled) == 9
    assert all(entry["shared"] <= 232448 for entry in compiled), compiled
