"""Keys and values of one growing sequence: dense storage that doubles, or a `KVCache`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.api import KVCache


class SequenceCache:
    """One sequence's keys and values, (layers, capacity, G, D) each."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.layers, 0, config.kv_heads, config.head_dim)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new rows of one layer; returns all rows of that layer."""
        end = self.length + len(k)
        if end > self._keys.shape[1]:
            capacity = max(end, 2 * self._keys.shape[1], 16)
            for name in ("_keys", "_values"):
                old = getattr(self, name)
                new = old.new_empty((old.shape[0], capacity, *old.shape[2:]))
                new[:, : self.length] = old[:, : self.length]
                setattr(self, name, new)
        self._keys[layer, self.length : end] = k
        self._values[layer, self.length : end] = v
        return self._keys[layer, :end], self._values[layer, :end]

    def advance(self, count: int) -> None:
        """Call after every layer has stored its rows."""
        self.length += count

    def fork(self) -> "SequenceCache":
        """An independent copy."""
        twin = object.__new__(SequenceCache)
        twin._keys, twin._values = self._keys.clone(), self._values.clone()
        twin.length = self.length
        return twin

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on."""
        self.length = min(self.length, length)

    def keep(self, positions: Sequence[int]) -> None:
        """Keeps only these positions, in this order, for instance the accepted branch of a tree."""
        wanted = [int(position) for position in positions]
        if len(set(wanted)) < len(wanted) or not all(0 <= p < self.length for p in wanted):
            raise RangeError(f"positions to keep must be distinct and below {self.length}")
        # The prefix usually stays where it is; only positions that move are copied.
        fixed = next((i for i, p in enumerate(wanted) if i != p), len(wanted))
        if fixed < len(wanted):
            moved = torch.tensor(wanted[fixed:], device=self._keys.device)
            for stored in (self._keys, self._values):
                stored[:, fixed : len(wanted)] = stored[:, moved]
        self.length = len(wanted)


class StoredSequence:
    """One sequence of a `KVCache` of tensors: paged, quantised or with a window."""

    def __init__(self, cache: KVCache, seq: int | None = None) -> None:
        self.cache, self.seq = cache, cache.add() if seq is None else seq
        self._under_way = False

    @property
    def length(self) -> int:
        return self.cache.length(self.seq)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new rows of one layer; returns all rows of that layer as the cache reads them."""
        if layer == 0:
            if self._under_way:
                # The previous pass failed half way: drop what it stored in some layers.
                self.truncate(self.length)
            self._under_way = True
        self.cache.append(self.seq, layer, k, v)
        keys, values = self.cache.view(self.seq, layer)
        return keys, values

    def advance(self, count: int) -> None:  # noqa: ARG002
        """Call after every layer has stored its rows; the cache counts them itself."""
        self._under_way = False

    def fork(self) -> "StoredSequence":
        """A sequence with the same past."""
        twin = StoredSequence(self.cache, self.cache.fork(self.seq))
        twin._under_way = self._under_way
        return twin

    def keep(self, positions: Sequence[int]) -> None:
        """Keeps only these positions, in this order."""
        self.cache.keep(self.seq, list(positions))

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on."""
        self.cache.truncate(self.seq, min(length, self.length))
