"""Runs the short step in Triton's interpreter; test_kernels.py starts it and reads what it writes.

Logits, tokens and what is stored of a step, and whole beam searches, against the fused path.
"""

import json
import sys
from pathlib import Path

import torch
from conftest import random_decoder

from trapline.gold.beam_search.api import checked_rules
from trapline.gold.decoder import compact
from trapline.gold.decoder.beams_device import DeviceSearch
from trapline.gold.decoder.forward import Forward, compact_step
from trapline.gold.decoder.graphs import Running, StaticStep
from trapline.gold.decoder.pool import Pool

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [2], [7, 1, 8]]
#: Norms of heads, a window that slides, and heads that do not fill their block.
MODEL = {"head_dim": 18, "num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 5}


def main(folder: Path) -> None:
    decoder = random_decoder("qwen3", max_window_layers=0, **MODEL)
    assert compact.suits(decoder)
    assert decoder.config.window == 5
    found = {**step(decoder), **search(decoder)}
    (folder / "step.json").write_text(json.dumps(found))


def step(decoder) -> dict[str, object]:
    """Steps on two pools: one in torch, one in kernels."""
    answers = []
    for interpreted in (False, True):
        pool = Pool(decoder.config, 24, 4, torch.float32, decoder.device)
        rows = []
        for prompt in PROMPTS:
            rows.append(pool.open())
            rows[-1].reserve(len(prompt) + 4)
        decoder.step(PROMPTS, rows)
        static = StaticStep(decoder, pool, rows=3, pages=8)
        use(static._forward, interpreted)
        static.load([Running(row, 5 + i, 1) for i, row in enumerate(rows)])
        logits = static.logits().clone()
        tokens = [static._greedy().clone()]
        answers.append((logits, pool.keys, pool.values, *tokens, static._buffers.history))
    floats = [(a - b).abs().max().item() for a, b in list(zip(*answers, strict=True))[:3]]
    tokens = [bool((a == b).all()) for a, b in list(zip(*answers, strict=True))[3:]]
    return {"error": max(floats), "same_tokens": all(tokens)}


def search(decoder) -> dict[str, object]:
    rules, count = checked_rules(2, 4, [4, 11])
    found = []
    for interpreted in (False, True):
        one = DeviceSearch(decoder, [len(prompt) for prompt in PROMPTS[:2]], rules)
        use(one._forward, interpreted)
        found.append([[beam.tokens for beam in beams] for beams in one(PROMPTS[:2], count)])
    return {"same_beams": found[0] == found[1]}


def use(forward: Forward, interpreted: bool) -> None:
    forward.compact = compact_step(forward, 16) if interpreted else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
