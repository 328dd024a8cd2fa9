"""The Triton kernels: right in the interpreter, compilable for a Hopper GPU. No GPU is needed."""

import json
from pathlib import Path

import numpy as np
import pytest

from trapline.gold.softmax_topk import oracle

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent
#: Short and long rows; more rows than processors and fewer; ties; tails; winners in one group.
#: For the interpreter's sake a row is long from 513 logits on, and cut into tiles of 256.
PROBLEMS = [
    ((3, 1), 1, "normal"),
    ((2, 97), 97, "coarse"),
    ((0, 50), 3, "normal"),
    ((1, 500), 1, "zeros"),
    ((5, 1000), 17, "coarse"),
    ((2, 2000), 20, "masked"),
    ((1, 3001), 8, "constant"),
    ((1, 2000), 200, "rising"),
    ((1, 50257), 100, "normal"),
]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory, run_script):
    folder = tmp_path_factory.mktemp("interpreted")
    (folder / "problems.json").write_text(json.dumps(PROBLEMS))
    run_script(HERE / "interpret_kernels.py", folder, TRITON_INTERPRET="1")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_interpreted_kernels_agree_with_the_oracle(interpreted, number, dtype):
    with np.load(interpreted / f"{number}-{dtype}.npz") as kept:
        found = {name: kept[name] for name in kept.files}
    _, k, _ = PROBLEMS[number]
    want = oracle.softmax_topk(found["x"], k, found["each"])
    assert np.array_equal(found["indices"], want.indices)
    np.testing.assert_allclose(found["log_probs"], want.log_probs, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found["lse"], want.lse, rtol=1e-6, atol=1e-4)
    assert np.array_equal(found["row_max"], found["x"].max(axis=1, initial=-np.inf))


@pytest.mark.parametrize(
    "k", [64, pytest.param(1024, marks=pytest.mark.full)], ids=lambda k: f"k{k}"
)
def test_kernels_compile_for_hopper(tmp_path, run_script, k):
    """16 and 32 bits, for sm_90, within its shared memory."""
    configurations = [("bf16", 16, k), ("fp32", 0, k)]
    (tmp_path / "configurations.json").write_text(json.dumps(configurations))
    run_script(HERE / "compile_kernels.py", tmp_path, TRITON_INTERPRET="0")
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert len(compiled) == 6
    assert all(entry["shared"] <= 232448 for entry in compiled), compiled
