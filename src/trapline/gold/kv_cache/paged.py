"""Paged storage: a pool of pages of P positions over all layers; sequences hold and share them.

`PageBook` decides who holds which page and never sees an array; `PagedStorage` keeps the rows and
does what the book says.
"""

from collections.abc import Sequence

import numpy as np

from trapline.gold.kv_cache.quantized import Fields


class PageBook:
    """Page tables, holder counts, free pages.

    At all times a page is free exactly when nobody holds it, and its count is the number of tables
    it stands in. A page with more than one holder is copied before it is written.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.tables: dict[int, list[int]] = {}
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, n: int) -> int:
        """⌈n / P⌉."""
        return -(-n // self.page_size)

    def reserve(self, seq: int, start: int, n: int) -> list[tuple[int, int]]:
        """Makes the pages of positions start … start + n − 1 the sequence's own.

        Answers which pages are to be copied, (from, to). Refuses before anything changes.
        """
        table = self.tables[seq]
        needed = self.pages_for(start + n)
        written = range(start // self.page_size, min(needed, len(table)))
        shared = [i for i in written if self._holders[table[i]] > 1]
        missing = max(0, needed - len(table))
        self._require(len(shared) + missing, self.free_pages)
        copies = []
        for i in shared:
            copies.append((table[i], self._take()))
            self._release(table[i])
            table[i] = copies[-1][1]
        table.extend(self._take() for _ in range(missing))
        return copies

    def fork(self, seq: int, child: int) -> None:
        """The child holds the same pages. None are taken."""
        self.tables[child] = list(self.tables[seq])
        for page in self.tables[child]:
            self._holders[page] += 1

    def shrink(self, seq: int, n: int) -> None:
        """Releases the pages behind position n."""
        table = self.tables[seq]
        kept = self.pages_for(n)
        for page in table[kept:]:
            self._release(page)
        del table[kept:]

    def replace(self, seq: int, first: int, pages: int) -> None:
        """Exchanges the table from entry `first` on for `pages` pages of the sequence's own."""
        tail = self.tables[seq][first:]
        own = sum(self._holders[page] == 1 for page in tail)
        self._require(pages, self.free_pages + own)
        self.shrink(seq, first * self.page_size)
        self.tables[seq].extend(self._take() for _ in range(pages))

    def address(self, seq: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Page numbers and slots of positions."""
        table = np.array(self.tables[seq], dtype=np.int64)
        return table[positions // self.page_size], positions % self.page_size

    def entries(self) -> int:
        """How many numbers the book keeps."""
        return sum(map(len, self.tables.values())) + 2 * self.num_pages

    def _require(self, needed: int, available: int) -> None:
        if needed > available:
            raise MemoryError(f"{needed} pages needed, {available} of {self.num_pages} available")

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)


class PagedStorage:
    """One array a field, (layers, pages, P, …), allocated once; its address never changes."""

    def __init__(self, num_layers: int, num_pages: int, page_size: int) -> None:
        self.num_layers = num_layers
        self.book = PageBook(num_pages, page_size)
        self._pools: Fields = ()

    def allocate(self, empty: Fields) -> None:
        """`empty` are the fields of no rows: what is stored a position."""
        place = (self.num_layers, self.book.num_pages, self.book.page_size)
        self._pools = tuple(np.zeros(place + e.shape[1:], e.dtype) for e in empty)

    def open(self, seq: int) -> None:
        self.book.tables[seq] = []

    def close(self, seq: int) -> None:
        self.book.shrink(seq, 0)
        del self.book.tables[seq]

    def reserve(self, seq: int, layer: int, start: int, n: int) -> None:
        """Room for n rows from `start` on, the same pages for every layer; or MemoryError."""
        del layer  # a page spans all layers
        for source, copy in self.book.reserve(seq, start, n):
            for pool in self._pools:
                pool[:, copy] = pool[:, source]

    def write(self, seq: int, layer: int, start: int, fields: Fields) -> None:
        pages, slots = self.book.address(seq, np.arange(start, start + len(fields[0])))
        for pool, field in zip(self._pools, fields, strict=True):
            pool[layer, pages, slots] = field

    def read(self, seq: int, layer: int, count: int) -> Fields:
        table: Sequence[int] = self.book.tables[seq][: self.book.pages_for(count)]
        pages = (pool[layer, table] for pool in self._pools)
        return tuple(p.reshape(-1, *p.shape[2:])[:count] for p in pages)

    def fork(self, seq: int, child: int) -> None:
        self.book.fork(seq, child)

    def gather(self, seq: int, indices: np.ndarray) -> None:
        """Pages in front that stay as they are stay shared; the rest is written afresh."""
        moved = np.flatnonzero(indices != np.arange(len(indices)))
        fixed = int(moved[0]) // self.book.page_size
        start = fixed * self.book.page_size
        pages, slots = self.book.address(seq, indices[start:])
        kept = [pool[:, pages, slots] for pool in self._pools]
        self.book.replace(seq, fixed, self.book.pages_for(len(indices)) - fixed)
        pages, slots = self.book.address(seq, np.arange(start, len(indices)))
        for pool, rows in zip(self._pools, kept, strict=True):
            pool[:, pages, slots] = rows

    def shrink(self, seq: int, n: int) -> None:
        self.book.shrink(seq, n)

    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools) + 8 * self.book.entries()
