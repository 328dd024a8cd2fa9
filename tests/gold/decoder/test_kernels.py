"""The Triton kernels: right in the interpreter, compilable for a Hopper GPU. No GPU is needed."""

import json
from pathlib import Path

import pytest
import torch

from trapline.gold.decoder import step_ops
from trapline.gold.decoder.pool import StoredLayer
from trapline.gold.decoder.rope import Rope, angles, rotate
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.norms import oracle

pytest.importorskip("triton")

HERE = Path(__file__).parent
#: Both round to the dtype at the same places; sums may come in another order.
TOLERANCES = {"torch.float32": 2e-6, "torch.float16": 8e-3}


def test_interpreted_kernels_agree_with_torch(tmp_path, run_script):
    run_script(HERE / "interpret_step.py", tmp_path, TRITON_INTERPRET="1")
    errors, found = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("errors", "step"))
    assert len(errors) == 12
    for entry in errors:
        assert entry["error"] <= TOLERANCES[entry["dtype"]], entry
        if "untouched" in entry:  # a slot of −1 stores nothing, every other one row
            assert entry["untouched"] == 20 - (entry["rows"] - 1), entry
    assert found["error"] <= 2e-6
    assert found["same_tokens"]
    assert found["same_beams"]
    assert found["score_error"] <= 2e-5


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.full)])
def test_kernels_compile_for_hopper_with_every_tile_config(tmp_path, run_script, few):
    environment = {"FEW": "1"} if few else {}
    run_script(HERE / "compile_step.py", tmp_path, TRITON_INTERPRET="0", **environment)
    compiled, others = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("step", "elementwise")
    )
    assert len(compiled) >= (8 if few else 30)
    assert len(others) == 11
    assert all(entry["shared"] <= 232448 for entry in compiled + others), compiled + others


def test_rope_and_append_in_torch():
    """Against the norm's oracle and the plain rotation, head by head."""
    torch.manual_seed(0)
    rows, heads, groups, width = 3, 4, 2, 8
    qkv = torch.randn(rows, (heads + 2 * groups) * width)
    weights = torch.randn(2, width)
    positions, slots = torch.tensor([4, 0, 7]), torch.tensor([5, -1, 0])
    cosine, sine = angles(RopeConfig(), width, torch.arange(10), qkv)
    keys, values = torch.zeros(2, 6, groups, width)
    turn = Rope(cosine, sine, *weights, 1e-6)
    stored = StoredLayer(keys, values, None, None, width, page_size=2)
    q = step_ops.rope_and_append(qkv, turn, positions, slots, stored)
    parts = qkv.view(rows, -1, width)
    normed = [
        torch.from_numpy(oracle.rms_norm(part.numpy(), weight.numpy())).float()
        for part, weight in ((parts[:, :4], weights[0]), (parts[:, 4:6], weights[1]))
    ]
    turned = [rotate(part, cosine[positions], sine[positions]) for part in normed]
    torch.testing.assert_close(q, turned[0], rtol=1e-5, atol=1e-5)
    for row, slot in ((0, 5), (2, 0)):
        torch.testing.assert_close(keys[slot], turned[1][row], rtol=1e-5, atol=1e-5)
        assert torch.equal(values[slot], parts[row, 6:])
    assert not keys[1:5].any()
    assert not values[1:5].any()


def test_more_query_heads_than_a_tile_holds_run_in_torch(make):
    """Heads from the seventeenth on would keep what their memory held before."""
    from trapline.gold.decoder.fused_step import suits

    one_key = {"num_key_value_heads": 1, "head_dim": 16}
    assert suits(make("llama", num_attention_heads=16, **one_key))
    assert not suits(make("llama", num_attention_heads=32, **one_key))


def test_small_matrices_prefetch_a_whole_cache_line():
    from trapline.gold.decoder.tile_config import TileConfig, tile_constants

    same = {"even": True, "outputs": 32, "inputs": 32, "precision": "tf32", "early": True}
    assert tile_constants(TileConfig(16, 16, 16, 1, 4, 2), "residual_linear", **same)["AHEAD"] == 64
