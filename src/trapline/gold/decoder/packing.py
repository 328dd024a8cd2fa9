"""New tokens of many sequences packed into one pass: their caches, and attention to these.

Sequences lie one after another without padding. Sequences of one pool store and read their rows
together: a layer of a pass over eight prompts launches two copies, not sixteen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from trapline.gold.attention.api import flash_attention_varlen
from trapline.gold.decoder.config import AttentionRules
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.decoder.rope import rotate
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.decoder.step_ops import masked_attention


class Cache(Protocol):
    """Keys and values of one sequence."""

    @property
    def length(self) -> int: ...
    def advance(self, count: int) -> None: ...


class OwnCache(Cache, Protocol):
    """A cache with storage of its own."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class LayerKV(NamedTuple):
    """Keys and values of one layer (S, G, D), and the length of each sequence."""

    keys: Tensor
    values: Tensor
    lengths: list[int]

    def each(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each sequence as views."""
        return zip(*(torch.split(side, self.lengths) for side in self[:2]), strict=True)


def joined(parts: Sequence[LayerKV]) -> LayerKV:
    """All sequences of all stores, one after another."""
    if len(parts) == 1:
        return parts[0]
    keys, values, lengths = zip(*parts, strict=True)
    return LayerKV(torch.cat(keys), torch.cat(values), list(chain(*lengths)))


class OwnRows:
    """New rows for a cache with storage of its own."""

    def __init__(self, cache: OwnCache, count: int) -> None:
        self._cache, self.count = cache, count

    def append(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """Stores new rows; returns all rows of that layer."""
        keys, values = self._cache.append(layer, k, v)
        return LayerKV(keys, values, [len(keys)])


class PooledRows:
    """New rows of all sequences that share a pool."""

    def __init__(self, sequences: Sequence[PooledSequence], counts: Sequence[int]) -> None:
        self._pool, self.count = sequences[0].pool, sum(counts)
        spans = [
            (one, one.length, one.length + n) for one, n in zip(sequences, counts, strict=True)
        ]
        before = [len(one.table) for one in sequences]
        try:
            for one, start, end in spans:
                self._pool.reserve(one.seq, start, end - start)
        except MemoryError:  # none keeps more than before
            for one, pages in zip(sequences, before, strict=True):
                self._pool.book.shrink(one.seq, pages * self._pool.page_size)
            raise
        device = self._pool.keys.device
        self._new = torch.cat([one.slots(start, end) for one, start, end in spans]).to(device)
        self._all = torch.cat([one.slots(0, end) for one, _, end in spans]).to(device)
        self._lengths = [end for _, _, end in spans]

    def append(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """Stores new rows; returns all rows of that layer."""
        stored = self._pool.layer(layer)
        stored.put(self._new, k, v)
        if len(self._new) == len(self._all) and stored.scales is None:
            return LayerKV(k, v, self._lengths)  # nothing was cached before
        return LayerKV(*stored.get(self._all, k.dtype), self._lengths)


@dataclass(frozen=True)
class Packing:
    """New tokens of each sequence: counts, positions, caches."""

    counts: list[int]
    #: Caches of the sequences, in order.
    stores: list[OwnRows | PooledRows]
    positions: Tensor
    #: Cosine and sine of the rotary angles, (N, D/2) each; empty for learned positions.
    angles: Mapping[RopeConfig, tuple[Tensor, ...]]
    #: For each sequence, (new, cached + new), True where a new token sees; None is causal.
    masks: Sequence[Tensor] | None = None
    _boundaries: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def attend(self, layer: int, rules: AttentionRules, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotates queries and keys (N, heads, D), stores the new rows, attends to all of them."""
        if rules.rope is not None:
            angles = self.angles[rules.rope]
            q, k = rotate(q, *angles), rotate(k, *angles)
        attend = self._causal if self.masks is None else self._masked
        return attend(rules, q, self._append(layer, k, v))

    def _append(self, layer: int, k: Tensor, v: Tensor) -> list[LayerKV]:
        """Stores new rows of one layer; returns all rows of that layer, store by store."""
        sizes = [store.count for store in self.stores]
        new = zip(self.stores, torch.split(k, sizes), torch.split(v, sizes), strict=True)
        return [store.append(layer, *rows) for store, *rows in new]

    def _causal(self, rules: AttentionRules, q: Tensor, parts: list[LayerKV]) -> Tensor:
        """New queries of each sequence over its whole cache, aligned at the end."""
        rows = joined(parts)
        mixed = flash_attention_varlen(
            *(q, rows.keys, rows.values),
            *(self.boundaries(self.counts), self.boundaries(rows.lengths)),
            *(max(self.counts), max(rows.lengths)),
            causal=True,
            window=rules.window,
            softcap=rules.softcap,
            scale=rules.scale,
        )
        assert isinstance(mixed, Tensor)
        return mixed

    def _masked(self, rules: AttentionRules, q: Tensor, parts: list[LayerKV]) -> Tensor:
        """Attention under given masks, as for the nodes of a draft tree."""
        assert self.masks is not None
        places = torch.split(self.positions, self.counts)
        masks = [_inside(rules.window, *one) for one in zip(self.masks, places, strict=True)]
        stored = (one for part in parts for one in part.each())
        sequences = zip(torch.split(q, self.counts), stored, masks, strict=True)
        return torch.cat(
            [_masked_attention(rules, one, *rows, mask) for one, rows, mask in sequences]
        )

    def boundaries(self, lengths: Sequence[int]) -> Tensor:
        """Cumulative lengths, int32; copied to the device once a pass."""
        key = tuple(lengths)
        if key not in self._boundaries:
            ends, device = [0, *accumulate(key)], self.positions.device
            self._boundaries[key] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._boundaries[key]


def _inside(window: int | None, mask: Tensor, place: Tensor) -> Tensor:
    """Applies a window to a mask by position: a tree has several nodes at one position."""
    if window is None:
        return mask
    before = torch.arange(mask.shape[1] - len(place), device=place.device)
    distance = place[:, None] - torch.cat((before, place))
    return mask & (distance < window)


def _masked_attention(
    rules: AttentionRules, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    """q (n, H, D) over keys and values (S, G, D) where mask (n, S) is True.

    A weight of 0 times NaN is NaN. So new positions that are not finite count as zeros, and queries
    that see one of them give NaN: a bad node of a tree affects its own branch only.
    """
    new, before = len(mask), len(keys) - len(mask)
    sound = (keys[-new:].isfinite() & values[-new:].isfinite()).flatten(1).all(dim=1)
    finite = torch.cat((sound.new_ones(before), sound))
    if keys.is_cuda or not bool(sound.all()):
        keys, values = (torch.where(finite[:, None, None], x, 0.0) for x in (keys, values))
    q, keys, values = (x.transpose(0, 1) for x in (q, keys, values))
    seen = masked_attention(q[None], keys[None], values[None], mask, rules)
    spoilt = (mask & ~finite).any(dim=1)
    return seen[0].transpose(0, 1).masked_fill(spoilt[:, None, None], torch.nan)


def stores(caches: Sequence[Cache], counts: Sequence[int]) -> Iterator[OwnRows | PooledRows]:
    """Groups adjacent sequences of one pool; every other sequence is alone."""
    for pool, members in groupby(zip(caches, counts, strict=True), key=lambda one: _pool(one[0])):
        group = list(members)
        if pool is None:
            yield from (OwnRows(cast(OwnCache, cache), count) for cache, count in group)
        else:
            sequences = [cast(PooledSequence, cache) for cache, _ in group]
            yield PooledRows(sequences, [count for _, count in group])


def _pool(cache: Cache) -> Pool | None:
    return cache.pool if isinstance(cache, PooledSequence) else None
