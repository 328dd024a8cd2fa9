"""The tree kernel against `reference`, in the interpreter and on a GPU; compiled for Hopper."""

import json
from pathlib import Path

import pytest
import torch

from trapline.gold.tree_decoding import reference
from trapline.gold.tree_decoding.api import build_tree

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_interpreted_kernel_matches_the_reference(tmp_path, run_script):
    """Ties, impossible tokens, trees with fewer nodes than the budget, drafts without depths."""
    run_script(HERE / "interpret_tree_kernel.py", tmp_path, TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "trees.json").read_text())
    assert len(found) == 40
    for kernel, levels in found:
        assert kernel == levels


def test_kernel_compiles_for_hopper(tmp_path, run_script):
    run_script(HERE / "compile_tree_kernel.py", tmp_path, TRITON_INTERPRET="0")
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert [entry["slots"] for entry in compiled] == [2, 32, 128, 1024, 16, 64]
    assert all(entry["shared"] <= 232448 for entry in compiled)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("budget", [1, 16, 64, 500])
def test_kernel_on_a_gpu_matches_the_reference(budget):
    logits = torch.randn(4, 15, 5000, generator=torch.Generator().manual_seed(0)) * 3
    log_q = torch.log_softmax(logits, dim=-1)
    rounded = (log_q * 8).round() / 8
    for draft in (log_q, rounded):
        kernel = build_tree(draft.cuda(), budget)
        levels = reference.heaviest_prefixes(draft, budget)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(kernel, levels, strict=True))
