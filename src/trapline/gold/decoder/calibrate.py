"""Calibrates a 4-bit KV cache with a decoder's own keys, values and queries."""

from collections.abc import Sequence

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
    if decoder.config.local_rope is not None:
        raise RangeError(
            "calibrate needs one set of rotary positions; this model has others in windowed layers"
        )
    # Modules whose outputs are queries, keys and values before RoPE.
    names = ("q_norm", "k_norm", "v") if decoder.config.qk_norm else ("q", "k", "v")
    seen: dict[nn.Module, list[Tensor]] = {
        layer.get_submodule(f"attention.{name}"): [] for layer in decoder.layers for name in names
    }
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
    rows = []  # (positions, heads, width) of all texts
    for found in seen.values():
        outputs = torch.cat([out.reshape(len(out), -1, config.head_dim) for out in found])
        rows.append(outputs.float().cpu().numpy())
    stretch = 1.0 if rope is None else rope.attention_factor
    turns = None if rope is None else frequencies(rope, config.head_dim).double().numpy()
    queries, keys = ([stretch * x for x in rows[i::3]] for i in (0, 1))
    return calibrate_rows(queries, keys, rows[2::3], turns=turns)
