"""New tokens of many sequences as one pass: where they stand, and where their rows are kept.

Sequences lie one after the other without padding. Those of one pool store and read their rows all
at once: a layer of a pass over eight prompts is two copies to start, not sixteen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from trapline.gold.decoder.pool import Pool, PooledSequence


class Cache(Protocol):
    """Where one sequence's keys and values are kept."""

    @property
    def length(self) -> int: ...
    def advance(self, count: int) -> None: ...


class OwnCache(Cache, Protocol):
    """One that keeps them apart from all others."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class LayerKV(NamedTuple):
    """Keys and values of one layer, old and new, (S, G, D) each, and how many each sequence has."""

    keys: Tensor
    values: Tensor
    lengths: list[int]

    def each(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of one sequence after the other; nothing is copied."""
        return zip(*(torch.split(side, self.lengths) for side in self[:2]), strict=True)


def joined(parts: Sequence[LayerKV]) -> LayerKV:
    """All sequences of all stores, one after the other."""
    if len(parts) == 1:
        return parts[0]
    keys, values, lengths = zip(*parts, strict=True)
    return LayerKV(torch.cat(keys), torch.cat(values), list(chain(*lengths)))


class OwnRows:
    """The rows of a cache of its own."""

    def __init__(self, cache: OwnCache, count: int) -> None:
        self._cache, self.count = cache, count

    def append(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """Stores new rows; all of that layer that the cache still has."""
        keys, values = self._cache.append(layer, k, v)
        return LayerKV(keys, values, [len(keys)])


class PooledRows:
    """The rows of a pool that a pass fills and reads, of all its sequences there."""

    def __init__(self, sequences: Sequence[PooledSequence], counts: Sequence[int]) -> None:
        self._pool, self.count = sequences[0].pool, sum(counts)
        spans = [
            (one, one.length, one.length + n) for one, n in zip(sequences, counts, strict=True)
        ]
        self._reserve(spans)
        device = self._pool.keys.device
        self._new = torch.cat([one.slots(start, end) for one, start, end in spans]).to(device)
        self._all = torch.cat([one.slots(0, end) for one, _, end in spans]).to(device)
        self._lengths = [end for _, _, end in spans]

    def _reserve(self, spans: Sequence[tuple[PooledSequence, int, int]]) -> None:
        """Room for all of them; or MemoryError, and none has a page more than before."""
        before = [len(one.table) for one, _, _ in spans]
        try:
            for one, start, end in spans:
                self._pool.reserve(one.seq, start, end - start)
        except MemoryError:
            for (one, _, _), pages in zip(spans, before, strict=True):
                self._pool.book.shrink(one.seq, pages * self._pool.page_size)
            raise

    def append(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """Stores new rows; all of that layer."""
        stored = self._pool.layer(layer)
        stored.put(self._new, k, v)
        if len(self._new) == len(self._all) and stored.scales is None:
            return LayerKV(k, v, self._lengths)  # what would be read back is what was stored
        return LayerKV(*stored.get(self._all, k.dtype), self._lengths)


@dataclass(frozen=True)
class Packing:
    """Where the new tokens of each sequence lie, and where they stand in it."""

    counts: list[int]
    #: Who keeps their rows, in their order.
    stores: list[OwnRows | PooledRows]
    positions: Tensor
    #: Cosine and sine of the rotary angles, (N, D/2) each; None for learned positions.
    angles: tuple[Tensor, ...] | None
    #: For each sequence, (new, cached + new), True where a new token sees; None is causal.
    masks: Sequence[Tensor] | None = None
    _boundaries: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def append(self, layer: int, k: Tensor, v: Tensor) -> list[LayerKV]:
        """Stores new rows of one layer; all of that layer, store by store."""
        sizes = [store.count for store in self.stores]
        new = zip(self.stores, torch.split(k, sizes), torch.split(v, sizes), strict=True)
        return [store.append(layer, *rows) for store, *rows in new]

    def boundaries(self, lengths: Sequence[int]) -> Tensor:
        """Where pieces of these lengths begin and end, int32; copied to the device once a pass."""
        key = tuple(lengths)
        if key not in self._boundaries:
            ends, device = [0, *accumulate(key)], self.positions.device
            self._boundaries[key] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._boundaries[key]


def stores(caches: Sequence[Cache], counts: Sequence[int]) -> Iterator[OwnRows | PooledRows]:
    """Who keeps the new rows: neighbours of one pool together, every other sequence by itself."""
    for pool, members in groupby(zip(caches, counts, strict=True), key=lambda one: _pool(one[0])):
        group = list(members)
        if pool is None:
            yield from (OwnRows(cast(OwnCache, cache), count) for cache, count in group)
        else:
            sequences = [cast(PooledSequence, cache) for cache, _ in group]
            yield PooledRows(sequences, [count for _, count in group])


def _pool(cache: Cache) -> Pool | None:
    return cache.pool if isinstance(cache, PooledSequence) else None
