from pathlib import Path

import pytest

import trapline

PACKAGE = Path(trapline.__file__).parent


def test_nothing_breaks_the_import_rules(rules):
    assert rules(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "statement", "reason"),
    [
        ("gold/norms/oracle.py", "import trapline.arena.judge.expect", "nothing but gold"),
        ("gold/impl.py", "from trapline import arena", "nothing but gold"),
        ("gold/norms/api.py", "from trapline.challenges.x import y", "nothing but gold"),
        ("gold/norms/oracle.py", "import torch", "only in the fast paths"),
        ("gold/norms/triton/oracle.py", "import torch", "only in the fast paths"),
        ("gold/norms/api.py", "def f():\n    from torch import nn", "only in the fast paths"),
        ("gold/ternary/pack.py", "import triton.language as tl", "only in the fast paths"),
        ("arena/judge/grade.py", "from trapline.gold.norms import oracle", "neither gold"),
        ("arena/judge/grade.py", "from trapline import gold", "neither gold"),
        ("arena/report/site.py", "import trapline.challenges.dflash", "neither gold"),
        ("arena/judge/measure.py", "import torch", "torch belongs"),
        ("arena/process/worker.py", "import pydantic", "inside the sandbox"),
        ("arena/process/worker.py", "from trapline.arena import wire", "inside the sandbox"),
        ("arena/runs/store.py", "from trapline.cli.main import main", "only cli"),
        ("challenges/dflash/solution/solution.py", "import trapline", "nothing of trapline"),
        ("challenges/dflash/solution/cases.py", "from trapline import gold", "nothing of trapline"),
        ("challenges/dflash/alternates/a/b.py", "import trapline.gold", "nothing of trapline"),
        ("challenges/dflash/starter/solution.py", "import trapline.arena", "nothing of trapline"),
        (
            "challenges/dflash/__init__.py",
            "from trapline.arena import traps",
            "nothing of trapline",
        ),
        ("challenges/dflash/traps.py", "import torch", "torch belongs"),
        ("challenges/dflash/gpu/traps.py", "import torch", "torch belongs"),
        ("challenges/dflash/solution/solution.py", "import torch", "torch belongs"),
        ("challenges/dflash/gpu/solution/solution.py", "import trapline", "nothing of trapline"),
        ("gold/norms/api.py", "from . import oracle", "relative"),
    ],
)
def test_a_planted_violation_is_reported(rules, tmp_path, path, statement, reason):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(f"import numpy\n{statement}\n")
    (sentence,) = rules(tmp_path)
    assert sentence.startswith(path)
    assert reason in sentence


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("gold/norms/reference.py", "import torch"),
        ("challenges/dflash/gpu/cases.py", "from trapline.gold.norms import oracle"),
        ("challenges/dflash/gpu/solution/solution.py", "import triton"),
        ("arena/gpu/local.py", "import torch"),
        ("gold/attention/dense/triton/forward.py", "import triton"),
        ("gold/attention/hopper_bwd.py", "import triton"),
        ("gold/decoder/network.py", "from torch import nn"),
        ("gold/ternary/layers.py", "import torch"),
        ("gold/tree_decoding/drafter.py", "import torch"),
        ("gold/norms/api.py", "from trapline.gold import checks"),
        ("challenges/dflash/traps.py", "from trapline.gold.tree_decoding import oracle"),
        ("challenges/dflash/cases.py", "from trapline.arena import expect"),
        ("cli/memory.py", "from trapline.gold.kv_cache import memory"),
        ("__main__.py", "from trapline.cli.main import main"),
        ("arena/process/worker.py", "import socket, numpy"),
    ],
)
def test_what_is_permitted_is_not_reported(rules, tmp_path, path, statement):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{statement}\n")
    assert rules(tmp_path) == []


def test_the_library_needs_no_torch(loaded):
    modules = loaded(
        "import trapline.gold as gold\n"
        "from trapline.gold import layer_norm, softmax_topk\n"
        "import numpy as np\n"
        "layer_norm(np.ones((2, 3)), np.ones(3), np.zeros(3))\n"
        "softmax_topk(np.ones((2, 3)), 1)\n"
    )
    assert "trapline.gold.norms.oracle" in modules
    assert not {"torch", "triton", "vllm", "trapline.arena"} & modules


def test_torch_in_a_fresh_process_would_be_seen(loaded):
    pytest.importorskip("torch")
    assert "torch" in loaded("import trapline.gold.norms.reference")


def test_the_arena_needs_no_library(loaded):
    modules = loaded("import trapline.arena.certify.certify, trapline.arena.judge.grade")
    assert "trapline.arena.certify.certify" in modules
    assert not {"torch", "trapline.gold", "trapline.cli"} & modules
