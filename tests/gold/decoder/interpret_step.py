"""Runs the short step in Triton's interpreter; test_kernels.py starts it and reads what it writes.

Logits, tokens and what is stored of a step, and whole beam searches, against the fused path.
"""

import json
import sys
from pathlib import Path

import torch
from conftest import random_decoder

from trapline.gold.beam_search.api import checked_rules
from trapline.gold.decoder import beams_device, fused_step, tile_config
from trapline.gold.decoder.beams_device import DeviceSearch
from trapline.gold.decoder.decode_step import DecodeStep, fused_decode_step
from trapline.gold.decoder.graphed_step import GraphedStep, StepRow
from trapline.gold.decoder.pool import Pool
from trapline.gold.decoder.triton import split_k_linear
from trapline.gold.softmax_topk.triton import work_partition

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [2], [7, 1, 8]]
WAYS = ("torch", "streamed", "held", "ranked")
#: Norms of heads, a window that slides, and heads that do not fill their block.
MODEL = {"head_dim": 18, "num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 5}
MODEL |= {"vocab_size": 400}  # large enough that candidates lie in groups


def main(folder: Path) -> None:
    decoder = random_decoder("qwen3", max_window_layers=0, **MODEL)
    assert fused_step.suits(decoder)
    assert decoder.config.window == 5
    found = {**step(decoder), **search(decoder)}
    (folder / "step.json").write_text(json.dumps(found))


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
