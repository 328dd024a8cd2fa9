"""Paged storage: a pool of pages of P positions, across all layers, shared between sequences.

`BlockManager` assigns pages to sequences; `PagedStorage` keeps the rows.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.block_manager import BlockManager
from trapline.gold.kv_cache.codecs import Fields
from trapline.gold.page_layout import PageLayout, memory_shape


class Rows(Protocol):
    """Allocates pools, and writes and reads rows of one layer (pages, P, …) with any strides."""

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any: ...
    def put(self, pool: Any, slots: np.ndarray, rows: Any) -> None: ...
    def get(self, pool: Any, slots: np.ndarray) -> Any: ...


class NumpyRows:
    """Rows in NumPy arrays."""

    def zeros(self, shape: tuple[int, ...], like: Any) -> np.ndarray:
        return np.zeros(shape, like.dtype)

    def put(self, pool: Any, slots: np.ndarray, rows: Any) -> None:
        pool[slots // pool.shape[1], slots % pool.shape[1]] = rows

    def get(self, pool: Any, slots: np.ndarray) -> Any:
        return pool[slots // pool.shape[1], slots % pool.shape[1]]


class PagedStorage:
    """One pool (layers, pages, P, …) per field, allocated once; its address never changes.

    The layout is the order of a layer in memory; pools are views of it.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, layout: PageLayout = "bshd"
    ) -> None:
        self.num_layers, self.layout = num_layers, layout
        self.book = BlockManager(num_pages, page_size)
        self.pools: Fields = ()

    def allocate(self, empty: Fields, rows: Rows) -> None:
        """Allocates pools with the dtypes and shapes of `empty`, the fields of zero rows."""
        self._rows = rows
        self.pools = tuple(self._pool(field, rows) for field in empty)

    def _pool(self, empty: Any, rows: Rows) -> Any:
        book, (_, *row) = self.book, empty.shape
        if self.layout == "bshd":
            return rows.zeros((self.num_layers, book.num_pages, book.page_size, *row), empty)
        place = memory_shape(book.num_pages, row[0], book.page_size, self.layout)
        pool = rows.zeros((self.num_layers, *place, *row[1:]), empty)
        # (layers, pages, heads, P, …) by swapping, then heads behind positions.
        ordered = pool.swapaxes(1, 2) if self.layout == "hbsd" else pool
        return ordered.swapaxes(2, 3)

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
            self._rows.put(pool[layer], slots, field)

    def read(self, seq: int, layer: int, count: int) -> Fields:
        """The stored rows up to position `count`."""
        slots = self.book.slots(seq, np.arange(self.book.first(seq), count))
        return tuple(self._rows.get(pool[layer], slots) for pool in self.pools)

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
        kept = [[self._rows.get(layer, slots) for layer in pool] for pool in self.pools]
        self.book.replace(seq, fixed, self.book.pages_for(len(indices)) - fixed)
        slots = self.book.slots(seq, np.arange(start, len(indices)))
        for pool, layers in zip(self.pools, kept, strict=True):
            for layer, moved_rows in zip(pool, layers, strict=True):
                self._rows.put(layer, slots, moved_rows)

    def shrink(self, seq: int, n: int) -> None:
        self.book.shrink(seq, n)

    def first(self, seq: int) -> int:
        return self.book.first(seq)

    def nbytes(self) -> int:
        return sum(int(pool.nbytes) for pool in self.pools) + 8 * self.book.entries()
