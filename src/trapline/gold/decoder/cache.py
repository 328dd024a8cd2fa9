"""Keys and values of sequences that grow at different speeds: dense storage that doubles."""

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
        """Stores new rows of one layer; returns all of that layer, old and new."""
        end = self.length + len(k)
        if end > self._keys.shape[1]:
            self._grow(max(end, 2 * self._keys.shape[1], 16))
        self._keys[layer, self.length : end] = k
        self._values[layer, self.length : end] = v
        return self._keys[layer, :end], self._values[layer, :end]

    def advance(self, count: int) -> None:
        """After every layer has stored its rows."""
        self.length += count

    def fork(self) -> "SequenceCache":
        """A copy that goes its own way."""
        twin = object.__new__(SequenceCache)
        twin._keys, twin._values = self._keys.clone(), self._values.clone()
        twin.length = self.length
        return twin

    def truncate(self, length: int) -> None:
        """Forgets what came after."""
        self.length = min(self.length, length)

    def keep(self, positions: Sequence[int]) -> None:
        """Keeps these positions in this order: what a verified tree leaves of its branches."""
        wanted = [int(position) for position in positions]
        if len(set(wanted)) < len(wanted) or not all(0 <= p < self.length for p in wanted):
            raise RangeError(f"positions to keep must be distinct and below {self.length}")
        # The prefix mostly stays where it is, and only what moves is copied.
        fixed = next((i for i, p in enumerate(wanted) if i != p), len(wanted))
        if fixed < len(wanted):
            moved = torch.tensor(wanted[fixed:], device=self._keys.device)
            for stored in (self._keys, self._values):
                stored[:, fixed : len(wanted)] = stored[:, moved]
        self.length = len(wanted)

    def _grow(self, capacity: int) -> None:
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_empty((old.shape[0], capacity, *old.shape[2:]))
            new[:, : self.length] = old[:, : self.length]
            setattr(self, name, new)


class StoredSequence:
    """One sequence of a `KVCache` of tensors, of any kind: paged, quantised, with a window."""

    def __init__(self, cache: KVCache, seq: int | None = None) -> None:
        self.cache, self.seq = cache, cache.add() if seq is None else seq
        self._under_way = False

    @property
    def length(self) -> int:
        return self.cache.length(self.seq)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new rows of one layer; returns all of that layer, as the cache gives them back."""
        if layer == 0:
            if self._under_way:
                # The pass before ended half way: what it left in some layers was never there.
                self.truncate(self.length)
            self._under_way = True
        self.cache.append(self.seq, layer, k, v)
        keys, values = self.cache.view(self.seq, layer)
        return keys, values

    def advance(self, count: int) -> None:  # noqa: ARG002
        """After every layer has stored its rows; the cache has counted them by itself."""
        self._under_way = False

    def fork(self) -> "StoredSequence":
        """A sequence with the same past."""
        twin = StoredSequence(self.cache, self.cache.fork(self.seq))
        twin._under_way = self._under_way
        return twin

    def keep(self, positions: Sequence[int]) -> None:
        """Keeps these positions in this order."""
        self.cache.keep(self.seq, list(positions))

    def truncate(self, length: int) -> None:
        """Forgets what came after."""
        self.cache.truncate(self.seq, min(length, self.length))
