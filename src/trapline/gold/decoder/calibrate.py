"""Calibrates a 4-bit KV cache with a decoder's own keys, values and queries."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trapline.gold.decoder.network import Network
from trapline.gold.decoder.rope import frequencies
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.calibrate import calibrate as calibrate_rows
from trapline.gold.kv_cache.calibrated_codec import Calibration


@torch.no_grad()
def calibrate(decoder: Network, texts: Sequence[Sequence[int]]) -> Calibration:
    """Runs these sequences of token ids; the result is for `KVCache(…, bits=4, calibration=…)`.

    A few thousand tokens of typical input are enough. Leave out text that evaluates the cache.
    """
    if len(texts) == 0:
        raise RangeError("calibrate needs at least one text")
    seen: dict[nn.Module, list[Tensor]] = {part: [] for part in _parts(decoder)}
    hooks = [
        part.register_forward_hook(lambda part, _, out: seen[part].append(out)) for part in seen
    ]
    try:
        for text in texts:
            decoder.run([list(text)], [decoder.new_cache()])
    finally:
        for hook in hooks:
            hook.remove()
    config, rope = decoder.config, decoder.config.rope
    rows = [_heads(found, config.head_dim) for found in seen.values()]
    stretch = 1.0 if rope is None else rope.attention_factor
    turns = None if rope is None else frequencies(rope, config.head_dim).double().numpy()
    queries, keys = ([stretch * x for x in rows[i::3]] for i in (0, 1))
    return calibrate_rows(queries, keys, rows[2::3], turns=turns)


def _parts(decoder: Network) -> list[nn.Module]:
    """Modules of every layer whose outputs are queries, keys and values before RoPE."""
    names = ("q_norm", "k_norm", "v") if decoder.config.qk_norm else ("q", "k", "v")
    return [layer.get_submodule(f"attention.{name}") for layer in decoder.layers for name in names]


def _heads(found: list[Tensor], width: int) -> np.ndarray:
    """(positions, heads, width), of all texts."""
    rows = torch.cat([out.reshape(out.shape[0], -1, width) for out in found])
    return rows.float().cpu().numpy()
