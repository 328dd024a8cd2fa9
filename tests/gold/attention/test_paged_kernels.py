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
    assert len(found) == 10
    for name, differences in found.items():
        assert differences["appended"] == 0.0, name
        assert differences["attended"] < (1e-5 if name.endswith("float32") else 6e-3), name


@pytest.mark.parametrize(
    ("which", "count"), [("some", 14), pytest.param("all", 392, marks=pytest.mark.full)]
)
def test_kernels_compile_for_hopper(which, count, tmp_path, run_script):
    """For sm_90, within its shared memory, with keys and values copied ahead of their use."""
    run_script(
        HERE / "compile_paged.py", tmp_path, TRITON_INTERPRET="0", PAGED_CONFIGURATIONS=which
    )
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert len(compiled) == count
    assert all(entry["shared"] <= 232448 for entry in compiled), compiled
    for entry in compiled:
        assert entry["copies"] > 0 or entry["kernel"] == "append_kernel", entry
