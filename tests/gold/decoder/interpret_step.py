"""Runs kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes.

Logits, tokens and what is stored of a fused step, whole beam searches, and the small kernels of the
step in torch, against torch.
"""

import json
import sys
from pathlib import Path

import torch
from conftest import random_decoder

from trapline.gold.beam_search.api import checked_rules
from trapline.gold.decoder import beams_device, fused_step, step_ops, tile_config
from trapline.gold.decoder.beams_device import DeviceSearch
from trapline.gold.decoder.decode_step import DecodeStep, fused_decode_step
from trapline.gold.decoder.graphed_step import GraphedStep, StepRow
from trapline.gold.decoder.pool import Pool, StoredLayer
from trapline.gold.decoder.rope import Rope, angles
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.decoder.triton import split_k_linear, step_elementwise
from trapline.gold.softmax_topk.triton import work_partition

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [2], [7, 1, 8]]
WAYS = ("torch", "streamed", "held", "ranked")
#: Norms of heads, a window that slides, and heads that do not fill their block.
MODEL = {"head_dim": 18, "num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 5}
MODEL |= {"vocab_size": 400}  # large enough that candidates lie in groups
#: Rows, query heads, key heads, width, whether queries and keys are normed and turned.
PROBLEMS = [(3, 4, 2, 16, False, True), (2, 3, 1, 6, True, True), (4, 2, 2, 10, False, False)]
DTYPES = (torch.float32, torch.float16)


def main(folder: Path) -> None:
    decoder = random_decoder("qwen3", max_window_layers=0, **MODEL)
    assert fused_step.suits(decoder)
    assert decoder.config.window == 5
    found = {**step(decoder), **search(decoder)}
    (folder / "step.json").write_text(json.dumps(found))
    errors = [turned(dtype, *problem) for dtype in DTYPES for problem in PROBLEMS]
    errors += [gated(dtype, *shape) for dtype in DTYPES for shape in ((3, 40), (2, 1500), (0, 8))]
    (folder / "errors.json").write_text(json.dumps(errors))


def step(decoder) -> dict[str, object]:
    """Steps on three pools: in torch, in kernels, and in kernels that hold their weights."""
    answers = []
    for way in WAYS:
        pool = Pool(decoder.config, 24, 4, torch.float32, decoder.device)
        rows = []
        for prompt in PROMPTS:
            rows.append(pool.open())
            rows[-1].reserve(len(prompt) + 4)
        decoder.step(PROMPTS, rows)
        static = GraphedStep(decoder, pool, rows=3, pages=8)
        use(static._step, way)
        static.load([StepRow(row, 5 + i, 1) for i, row in enumerate(rows)])
        logits = static.logits().clone()
        tokens = [static._greedy().clone()]
        answers.append((logits, pool.keys, pool.values, *tokens, static._buffers.history))
    columns = [(one[0], other) for one in zip(*answers, strict=True) for other in one[1:]]
    floats = [(a - b).abs().max().item() for a, b in columns if a.is_floating_point()]
    tokens = [bool((a == b).all()) for a, b in columns if not a.is_floating_point()]
    return {"error": max(floats), "same_tokens": all(tokens)}


def search(decoder) -> dict[str, object]:
    rules, count = checked_rules(3, 5, [4, 11])
    beams_device.SHORT_TAIL = 2  # one step with short tails, one with long ones, or more
    found = []
    for way in WAYS:
        one = DeviceSearch(decoder, [len(prompt) for prompt in PROMPTS[:2]], rules)
        use(one._decode, way)
        found.append([beam for beams in one(PROMPTS[:2], count) for beam in beams])
    tokens = [[beam.tokens for beam in one] for one in found]
    far = max(abs(a.score - b.score) for one in found for a, b in zip(one, found[0], strict=True))
    return {"same_beams": all(one == tokens[0] for one in tokens), "score_error": far}


def use(forward: DecodeStep, way: str) -> None:
    """SplitKLinear ones with parts so small that every product is several of them."""
    split_k_linear.uses_split_k = lambda *_: way == "held"
    work_partition.SHORT = 16 if way == "ranked" else 1 << 14  # candidates from the head's maxima
    split_k_linear.SPLIT_K_BLOCK_N = split_k_linear.SPLIT_K_BLOCK_K = (
        tile_config.SPLIT_K_BLOCK_K
    ) = split_k_linear.REDUCE_BLOCK = 8
    forward.fused = fused_decode_step(forward, 16) if way != "torch" else None


def turned(dtype, rows, heads, groups, width, normed, rotated) -> dict[str, object]:
    torch.manual_seed(rows)
    # Rows of a wider matrix, as a slice of something larger would be.
    qkv = torch.randn(rows, (heads + 2 * groups) * width + 5).to(dtype)[:, :-5]
    cosine, sine = angles(RopeConfig(theta=100.0), width, torch.arange(50), qkv)
    weights = torch.randn(2, width).to(dtype) if normed else (None, None)
    turn = Rope(*((cosine, sine) if rotated else (None, None)), *weights, 1e-5)
    positions = torch.randint(0, 50, (rows,))
    slots = torch.randperm(20)[:rows]
    slots[0] = -1
    pools = [torch.full((20, groups, width), 7.0, dtype=dtype) for _ in range(4)]
    ours = step_elementwise.rope_and_append(qkv, turn, positions, slots, *pools[:2])
    stored = StoredLayer(*pools[2:], scales=None, bits=None, width=width, page_size=4)
    theirs = step_ops.rope_and_append(qkv, turn, positions, slots, stored)
    pairs = [(ours, theirs), (pools[0], pools[2]), (pools[1], pools[3])]
    untouched = int((pools[0] == 7.0).all(dim=(1, 2)).sum())
    return entry("rope_and_append", dtype, pairs) | {"untouched": untouched, "rows": rows}


def gated(dtype, rows, hidden) -> dict[str, object]:
    torch.manual_seed(1)
    both = torch.randn(rows, 2 * hidden + 3).to(dtype)[:, :-3]
    return entry("swiglu", dtype, [(step_elementwise.swiglu(both), step_ops.swiglu(both))])


def entry(kernel, dtype, pairs) -> dict[str, object]:
    worst = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
    return {"kernel": kernel, "dtype": str(dtype), "error": worst}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
