"""GPU challenges: what can be certified without a GPU.

Torch and Triton run on CPU tensors; CUDA C++ is compiled, not run. The checks that need a GPU
(bfloat16, large launches and large offsets) are left out here.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trapline
from trapline.arena import challenge as challenges
from trapline.arena.process import local

HERE = Path(__file__).parent
HEADERS = Path(trapline.__file__).parent / "arena" / "gpu"
CHALLENGES = challenges.load_all("gpu")
LEAST_TRAPS = 12
SHARED_MEMORY = 232448
#: Calls whose kernels are compiled for sm_90; tensors as [dtype, shape].
CALLS = {
    "fused_softmax_topk": [
        ["softmax_topk", ["float32", [4096, 32000]], 64],
        ["softmax_topk", ["bfloat16", [256, 128256]], 50],
        ["softmax_topk", ["float16", [1, 1]], 1],
    ],
    "layer_norm_backward": [
        [
            "layer_norm_backward",
            *([["bfloat16", [16384, 4096]]] * 2),
            ["bfloat16", [4096]],
            *([["float32", [16384]]] * 2),
        ],
        [
            "layer_norm_forward",
            ["float32", [8, 16384]],
            *([["float32", [16384]]] * 2),
            1e-5,
        ],
        ["layer_norm_forward", ["float16", [1, 1]], *([["float16", [1]]] * 2), 1e-5],
    ],
    "flash_attention_forward": [
        ["flash_attention", *([["bfloat16", [2, 16, 4096, 128]]] * 3), True],
        ["flash_attention", *([["bfloat16", [32, 16, 512, 64]]] * 3), False],
        ["flash_attention", *([["float32", [1, 2, 100, 32]]] * 3), True],
        ["flash_attention", *([["float16", [1, 1, 1, 8]]] * 3), True],
    ],
    "flash_attention_backward": [
        [
            "flash_attention_backward",
            *([[dtype, shape]] * 5),
            ["float32", shape[:3]],
            causal,
        ]
        for dtype, shape, causal in (
            ("bfloat16", [2, 4, 300, 128], True),
            ("float32", [2, 4, 300, 32], False),
            ("float16", [1, 1, 1, 8], True),
        )
    ],
    "dflash": [
        [
            "tree_attention",
            [dtype, [2, 32, nodes, width]],
            *([[dtype, [2, 8, 100 + nodes, width]]] * 2),
            ["int32", [2, nodes]],
            100,
        ]
        for dtype, nodes, width in (
            ("bfloat16", 64, 128),
            ("float16", 1, 256),
            ("float32", 1024, 32),
        )
    ],
    "ternary_training": [
        [
            "ternary_matmul",
            ["uint8", [512, inputs // 4]],
            ["float16", [512, inputs // 128]],
            [dtype, [rows, inputs]],
        ]
        for dtype, rows, inputs in (
            ("bfloat16", 1, 16384),
            ("bfloat16", 1024, 8192),
            ("float32", 40, 256),
        )
    ],
    "beam_search": [
        ["beam_step", ["float32", [8, 8, 32000]], ["float32", [8, 8]], 2],
        ["beam_step", ["bfloat16", [1, 1, 1]], ["float32", [1, 1]], 1],
    ],
    "kv_cache": [
        [
            "paged_attention",
            [dtype, [4, 32, 128]],
            *([[dtype, [64, 16, 8, 128]]] * 2),
            ["int32", [4, 64]],
            ["int32", [4]],
        ]
        for dtype in ("bfloat16", "float32")
    ]
    + [
        [
            "paged_append",
            *([["bfloat16", [9, 8, 128]]] * 2),
            *([["bfloat16", [64, 16, 8, 128]]] * 2),
            ["int64", [9]],
        ]
    ],
}


def run(script, folder, wanted, **environment):
    (folder / "wanted.json").write_text(json.dumps(wanted))
    ours = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), **environment}
    command = [sys.executable, "-W", "ignore", str(HERE / script), str(folder)]
    done = subprocess.run(command, env=ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def certified(folder, names, *, quick):
    pytest.importorskip("triton")
    run("run_here.py", folder, {"challenges": names, "quick": quick}, TRITON_INTERPRET="1")
    found = json.loads((folder / "found.json").read_text())
    assert {one["challenge"] for one in found} == set(names)
    return [f"{one['challenge']} {one['subject']}: {one['problem']}" for one in found
            if one["problem"]]  # fmt: skip


def test_gold_passes_and_mutants_are_caught(tmp_path):
    assert certified(tmp_path, list(CHALLENGES), quick=True) == []


@pytest.mark.full
@pytest.mark.parametrize("name", CHALLENGES)
def test_challenge_is_certified_without_a_gpu(tmp_path, name):
    """Gold and alternates pass, mutants and worthless answers fail."""
    assert certified(tmp_path, [name], quick=False) == []


@pytest.mark.full
@pytest.mark.parametrize("name", CHALLENGES)
def test_triton_kernels_compile_for_hopper(tmp_path, name):
    pytest.importorskip("triton")
    run("compile_here.py", tmp_path, {name: CALLS[name]}, TRITON_INTERPRET="0")
    found = json.loads((tmp_path / "compiled.json").read_text())
    assert len(found) >= 2 * len(CALLS[name])
    assert all(one["shared"] <= SHARED_MEMORY for one in found), found


@pytest.mark.full
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(path, id=f"{name} {path.parent.parent.name}")
        for name, challenge in CHALLENGES.items()
        for path in sorted(challenge.folder.rglob("solution.cu"))
    ],
)
def test_cuda_compiles(tmp_path, source):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    command = ["nvcc", "-arch=sm_90", "-O3", "-shared", "-Xcompiler", "-fPIC", "-I", str(HEADERS)]
    command += ["-o", str(tmp_path / "solution.so"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", str(tmp_path / "solution.so")],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    entries = next(c for c in CHALLENGES.values() if source.is_relative_to(c.folder))
    assert set(entries.plan.entry_points) <= set(exported)


@pytest.mark.parametrize("name", CHALLENGES)
def test_challenge_is_complete(name):
    challenge = CHALLENGES[name]
    plan, gold = challenge.plan, challenge.solution_files()
    assert plan.tracks == ["gpu"]
    assert "gpu" in challenges.load(name).plan.tracks
    assert sum(plan.weights.values()) == pytest.approx(1.0)
    assert len(challenge.traps) >= LEAST_TRAPS
    for trap in challenge.traps:
        compile(trap.plant(gold)["solution.py"], trap.id, "exec")
    assert set(challenge.module("cases").ENTRIES) == set(plan.entry_points)
    assert all(f"`{entry}(" in challenge.prompt for entry in plan.entry_points)
    assert 2 <= len(challenge.module("cases").timed()) <= 4
    for place in (
        "alternates/cuda/solution.cu", "alternates/triton/solution.py",
        "alternates/torch/solution.py", "starter/triton/solution.py", "starter/cuda/solution.cu",
        "baselines/eager/solution.py", "baselines/compiled/solution.py",
    ):  # fmt: skip
        assert (challenge.folder / place).is_file(), place


@pytest.mark.full
def test_ternary_baseline_keeps_the_contract_in_bfloat16():
    """Scales that are rounded to bfloat16 are a bug that a trap names: no yardstick has it."""
    torch = pytest.importorskip("torch")
    challenge = CHALLENGES["ternary_training"]
    cases = challenge.module("cases")
    baseline = local.load(challenge.folder / "baselines" / "eager", compile_once=False)
    p = cases.problem(np.random.default_rng(0), 1, 4096, 100, "bfloat16")
    x = torch.from_numpy(np.array(p.x, np.float32)).to(torch.bfloat16)
    out = torch.empty((1, 100), dtype=torch.bfloat16)
    baseline.ternary_matmul(torch.from_numpy(p.packed), torch.from_numpy(p.scales), x, out)
    cases.check(out.float().numpy(), p)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 70, 130])
def test_large_ternary_products_match_float64(rows, dtype):
    """The gold solution's kernel for large products: checks are small, and timed outputs are
    compared with its own."""
    torch = pytest.importorskip("torch")
    challenge = CHALLENGES["ternary_training"]
    cases = challenge.module("cases")
    gold = local.load(challenge.solution, compile_once=False)
    p = cases.problem(np.random.default_rng(rows), rows, 2048, 2100, dtype)
    kind = getattr(torch, dtype)
    x = torch.from_numpy(np.array(p.x, np.float32)).cuda().to(kind)
    padded = torch.zeros((rows, 2048 + 24), dtype=kind, device="cuda")[:, :2048].copy_(x)
    packed, scales = torch.from_numpy(p.packed).cuda(), torch.from_numpy(p.scales).cuda()
    outs = [torch.full((rows, 2100), math.nan, dtype=kind, device="cuda") for _ in range(3)]
    for out, each in zip(outs, (x, x, padded), strict=True):
        gold.ternary_matmul(packed, scales, each, out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    got = outs[0].float() if dtype == "bfloat16" else outs[0]
    cases.check(got.cpu().numpy(), p)
