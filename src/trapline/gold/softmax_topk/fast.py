"""Softmax fused with top-k in torch: one read of the logits in tiles, never an (N, V) temporary.

Every tile updates the running maximum m and sum l (rescaled by exp(m_old − m_new)) and is merged
into the k best so far. Extra memory: O(N·K + N·tile).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_TILE = 8192

_library: Any = torch.library  # its calls carry no types
_LIB = _library.Library("trapline_topk", "DEF")
_LIB.define(
    "softmax_topk(Tensor logits, int k, float temperature) -> (Tensor, Tensor, Tensor, Tensor)"
)


class Streamed(NamedTuple):
    """What one pass over the logits leaves; floats are float32, or float64 for float64 logits."""

    log_probs: Tensor  # (N, K)
    indices: Tensor  # (N, K)
    lse: Tensor  # (N,)
    row_max: Tensor  # (N,)


def softmax_topk(logits: Tensor, k: int, temperature: float) -> Streamed:
    """The k largest logits of each row as log-probabilities, best first. Not differentiable."""
    return Streamed(*torch.ops.trapline_topk.softmax_topk(logits, k, temperature))


def every_row_has_a_softmax(row_max: Tensor) -> bool:
    """The maximum is NaN, +inf or −inf exactly when the row has a NaN or a +inf, or only −inf."""
    return bool(torch.isfinite(row_max).all())


def _softmax_topk(
    logits: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    best = logits.new_full((rows, 0), 0.0, dtype=wide)  # (N, ≤K) descending
    indices = logits.new_full((rows, 0), 0, dtype=torch.int64)
    row_max = logits.new_full((rows, 1), -torch.inf, dtype=wide)
    total = logits.new_full((rows, 1), 0.0, dtype=wide)  # Σ exp((x − m) / temperature)
    for start in range(0, vocabulary, _TILE):
        tile = logits[:, start : start + _TILE].to(wide)
        row_max, total = _accumulate(row_max, total, tile, temperature)
        best, indices = _merge(best, indices, tile, start, k)
    log_total = torch.log(total)
    log_probs = (best - row_max) / temperature - log_total
    lse = row_max / temperature + log_total
    return log_probs, indices, lse[:, 0].clone(), row_max[:, 0].clone()


def _accumulate(
    row_max: Tensor, total: Tensor, tile: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    m_new = torch.maximum(row_max, tile.amax(dim=1, keepdim=True))
    # Until a finite logit came, m is −inf and −inf − (−inf) would be NaN; the sum is 0 anyway.
    safe = torch.where(m_new == -torch.inf, torch.zeros_like(m_new), m_new)
    rescaled = total * torch.exp((row_max - safe) / temperature)
    added = torch.exp((tile - safe) / temperature).sum(dim=1, keepdim=True)
    return m_new, rescaled + added


def _merge(
    best: Tensor, indices: Tensor, tile: Tensor, start: int, k: int
) -> tuple[Tensor, Tensor]:
    """The k best of what was kept and a tile. Kept ones come first: their indices are lower."""
    own = torch.arange(start, start + tile.shape[1], device=tile.device)
    values = torch.cat((best, tile), dim=1)
    places = torch.cat((indices, own.expand(tile.shape)), dim=1)
    # torch.topk leaves the order of ties open; a stable sort does not.
    ordered, order = torch.sort(values, dim=1, descending=True, stable=True)
    return ordered[:, :k], torch.gather(places, 1, order[:, :k])


_LIB.impl("softmax_topk", _softmax_topk, "CompositeExplicitAutograd")
