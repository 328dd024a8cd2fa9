"""The W2A16 kernels: interpreted against the oracle, compiled for sm_90, run where a GPU is."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trapline.gold.ternary import oracle

HERE = Path(__file__).parent
#: Rows of x, rows and columns of the matrix, group. Ones, few and many rows; odd widths.
PROBLEMS = [
    (1, 37, 256, 128),
    (3, 20, 1040, 128),
    (2, 5, 300, 128),
    (17, 70, 256, 128),
    (1, 16, 512, 256),
    (5, 33, 130, 128),
    (0, 9, 16, 128),
]
TOLERANCES = {"float32": 1e-6, "float16": 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_interpreted_kernels_agree_with_the_oracle(interpreted, number, dtype):
    with np.load(interpreted / f"{number}-{dtype}.npz") as kept:
        x, y, codes, scales = (kept[name] for name in ("x", "y", "codes", "scales"))
    weights = oracle.dequantize(codes, scales, PROBLEMS[number][3]).astype(np.float64)
    wanted = x.astype(np.float64) @ weights.T
    assert y.shape == wanted.shape
    assert y.dtype == x.dtype
    largest = np.abs(wanted).max(initial=1.0)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=TOLERANCES[dtype] * largest)


def compiled(which, problems, folder, run_script):
    (folder / "problems.json").write_text(json.dumps([which, problems]))
    run_script(HERE / "compile_kernels.py", folder, TRITON_INTERPRET="0")
    return json.loads((folder / "compiled.json").read_text())


def test_kernels_compile_for_hopper(tmp_path, run_script):
    """Few rows: no barrier but those of the last sum. Many: tensor cores."""
    names = [["gemv_kernel"], ["gemm_kernel"]]
    few, many = compiled("other", names, tmp_path, run_script)
    assert few["barriers"] <= 8, few
    assert many["tensor_cores"], many
    assert max(few["shared"], many["shared"]) <= 232448


def compiled_as_planned(problems, folder, run_script):
    """Checks tensor cores, shared memory, and that settled weights are loaded before x."""
    found = compiled("few", problems, folder, run_script)
    for (groups, rows, _, settled), made in zip(problems, found, strict=True):
        assert made["products"] >= 8 * -(-groups // 64), (groups, rows, made)
        assert made["programs"] * (made["shared"] + 1024) <= 228 * 1024, (groups, rows, made)
        assert made["asked before"] == settled, (groups, rows, made)


def test_five_rows_of_large_matrices_go_to_the_kernel_for_many(monkeypatch):
    import torch

    from trapline.gold.ternary.triton import packed_matmul as kernels

    for hopper, large, few in ((True, True, 4), (True, False, 8), (False, True, 8)):
        monkeypatch.setattr(kernels, "is_hopper", lambda _, answer=hopper: answer)
        weights = kernels.LARGE if large else kernels.LARGE - 1
        found = [kernels.is_few(rows, weights, torch.device("cuda")) for rows in range(1, 12)]
        assert found == [rows <= few for rows in range(1, 12)]


def test_few_rows_compile_for_hopper(tmp_path, run_script):
    problems = [(20, 1, "bf16", True), (3, 8, "fp16", False), (64, 1, "bf16", True)]
    compiled_as_planned(problems, tmp_path, run_script)


@pytest.mark.full
def test_every_plan_compiles_for_hopper(tmp_path, run_script):
    """Widths from one group to 28 672, every number of rows, both dtypes, both orders."""
    widths = (1, 3, 9, 20, 32, 40, 64, 108, 128, 224)
    problems = [(groups, rows, "bf16", True) for groups in widths for rows in (1, 2, 4, 8)]
    problems += [(groups, rows, "fp16", False) for groups in (20, 64, 128) for rows in (1, 2, 8)]
    compiled_as_planned(problems, tmp_path, run_script)


def compiled_as_cut(problems, folder, run_script):
    """Checks that codes reach the tensor cores in registers, shared memory, and who waits."""
    found = compiled("many", problems, folder, run_script)
    for (*_, settled), made in zip(problems, found, strict=True):
        assert made["products"] == made["from registers"] >= 16, made
        assert made["shared"] <= 227 * 1024, made
        assert made["whole"], made
        # Settled weights are asked for at once: only the warp that copies x waits, once.
        assert made["waits"] == (1 if settled else made["parts of a program"]), made
    return found


def test_many_rows_compile_for_hopper(tmp_path, run_script):
    problems = [(16, 13824, 20, "bf16", True), (100, 2560, 108, "fp16", False)]
    whole, shared = compiled_as_cut(problems, tmp_path, run_script)
    assert whole["split"] == 1
    assert shared["split"] > 1


@pytest.mark.full
def test_every_cut_compiles_for_hopper(tmp_path, run_script):
    """Blocks of every size, one group, prime numbers of groups, wide ones."""
    shapes = [(13824, 20), (2560, 108), (100, 1), (5000, 7), (28672, 64), (64, 13)]
    problems = [
        (rows, *shape, kind, rows % 2 == 0)
        for rows in (9, 17, 64, 128, 1000)
        for shape in shapes
        for kind in ("bf16", "fp16")
    ]
    compiled_as_cut(problems, tmp_path, run_script)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("problem", [*PROBLEMS, (1, 2560, 13824, 128), (64, 1000, 1024, 128)])
def test_kernels_on_a_gpu_agree_with_the_oracle(problem, dtype):
    from trapline.gold.ternary.packed_linear import packed_linear

    M, N, K, group = problem
    rng = np.random.default_rng(2)
    codes, scales = oracle.ternarize(rng.standard_normal((N, K)), group)
    plane, factors = (torch.from_numpy(a).cuda() for a in (oracle.pack(codes), scales))
    x = torch.from_numpy(rng.standard_normal((M, K))).to("cuda", dtype)
    y = packed_linear(x, plane, factors, group).double().cpu().numpy()
    wanted = x.double().cpu().numpy() @ oracle.dequantize(codes, scales, group).T.astype(np.float64)
    limit = 4 * torch.finfo(dtype).eps * np.abs(wanted).max(initial=1.0)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=limit)
