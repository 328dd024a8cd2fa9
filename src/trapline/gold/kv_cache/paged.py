"""Paged storage: a pool of pages of P positions, across all layers, shared between sequences.

`BlockManager` assigns pages to sequences; `PagedStorage` keeps the rows.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.block_manager import BlockManager
from trapline.gold.kv_cache.codecs import Fields


class Rows(Protocol):
    """Allocates a pool of rows, and writes and reads rows of one layer."""

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any: ...
    def put(self, flat: Any, slots: np.ndarray, rows: Any) -> None: ...
    def get(self, flat: Any, slots: np.ndarray) -> Any: ...


class NumpyRows:
    """Rows in NumPy arrays."""

    def zeros(self, shape: tuple[int, ...], like: Any) -> np.ndarray:
        return np.zeros(shape, like.dtype)

    def put(self, flat: Any, slots: np.ndarray, rows: Any) -> None:
        flat[slots] = rows

    def get(self, flat: Any, slots: np.ndarray) -> Any:
        return flat[slots]


class PagedStorage:
    """One array (layers, pages, P, …) per field, allocated once; its address never changes."""

    def __init__(self, num_layers: int, num_pages: int, page_size: int) -> None:
        self.num_layers = num_layers
        self.book = BlockManager(num_pages, page_size)
        self.pools: Fields = ()

    def allocate(self, empty: Fields, rows: Rows) -> None:
        """Allocates pools with the dtypes and shapes of `empty`, the fields of zero rows."""
        self._rows = rows
        place = (self.num_layers, self.book.num_pages, self.book.page_size)
        self.pools = tuple(rows.zeros(place + tuple(e.shape[1:]), e) for e in empty)

    def open(self, seq: int) -> None:
        self.book.tables[seq] = []

    def close(self, seq: int) -> None:
        self.book.shrink(seq, 0)
        del self.book.tables[seq]

    def adopt(self, seq: int, tokens: Sequence[int], salt: Hashable) -> int:
        return self.book.adopt(seq, tokens, salt)

    def publish(self, seq: int, tokens: Sequence[int], salt: Hashable) -> None:
        self.book.publish(seq, tokens, salt)

    def reserve(self, seq: int, layer: int, start: int, n: int, behind: int = 0) -> None:
        """Allocates n rows from `start` on, in every layer, or raises MemoryError."""
        del layer  # a page spans all layers
        for source, copy in self.book.reserve(seq, start, n, behind):
            for pool in self.pools:
                pool[:, copy] = pool[:, source]

    def write(self, seq: int, layer: int, start: int, fields: Fields) -> None:
        slots = self.book.slots(seq, np.arange(start, start + len(fields[0])))
        for pool, field in zip(self.pools, fields, strict=True):
            self._rows.put(self._flat(pool)[layer], slots, field)

    def read(self, seq: int, layer: int, count: int) -> Fields:
        """The stored rows up to position `count`."""
        slots = self.book.slots(seq, np.arange(self.book.first(seq), count))
        return tuple(self._rows.get(self._flat(pool)[layer], slots) for pool in self.pools)

    def fork(self, seq: int, child: int) -> None:
        self.book.fork(seq, child)

    def gather(self, seq: int, indices: np.ndarray) -> None:
        """Leading pages that do not change stay shared; the rest is rewritten."""
        moved = np.flatnonzero(indices != np.arange(len(indices)))
        fixed = int(moved[0]) // self.book.page_size
        start = fixed * self.book.page_size
        if indices[start:].min() < self.book.first(seq):
            raise RangeError("positions behind the window are gone and cannot be moved")
        slots = self.book.slots(seq, indices[start:])
        kept = [[self._rows.get(flat, slots) for flat in self._flat(pool)] for pool in self.pools]
        self.book.replace(seq, fixed, self.book.pages_for(len(indices)) - fixed)
        slots = self.book.slots(seq, np.arange(start, len(indices)))
        for pool, layers in zip(self.pools, kept, strict=True):
            for flat, moved_rows in zip(self._flat(pool), layers, strict=True):
                self._rows.put(flat, slots, moved_rows)

    def shrink(self, seq: int, n: int) -> None:
        self.book.shrink(seq, n)

    def first(self, seq: int) -> int:
        return self.book.first(seq)

    def nbytes(self) -> int:
        return sum(int(pool.nbytes) for pool in self.pools) + 8 * self.book.entries()

    def _flat(self, pool: Any) -> Any:
        """(layers, pages · P, …), the same memory."""
        return pool.reshape(self.num_layers, -1, *pool.shape[3:])
