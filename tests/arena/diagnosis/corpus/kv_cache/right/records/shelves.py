"""Where the records of one layer lie: a run for each sequence, or pages of a common pool.

Both shelves have the same methods.  What can fail for want of room fails before anything changes;
`can_fork` and `can_keep` tell beforehand, because those calls span several layers.
"""

import numpy as np

WORD = 8        # bytes that nbytes() counts for one number of the bookkeeping


class DenseShelf:
    """One contiguous run of records for each sequence; room is counted by the position."""

    def __init__(self, block_size, num_blocks):
        self._room = block_size * num_blocks            # positions that are free
        self._runs = {}                                 # seq: array of records, with slack
        self._sizes = {}

    def open(self, seq):
        self._runs[seq], self._sizes[seq] = None, 0

    def close(self, seq):
        del self._runs[seq]
        self._room += self._sizes.pop(seq)

    def size(self, seq):
        return self._sizes[seq]

    def rows(self, seq):
        return self._runs[seq][:self._sizes[seq]]

    def extend(self, seq, records):
        if len(records) > self._room:
            raise MemoryError("the pool is full")
        size = self._sizes[seq]
        needed = size + len(records)
        run = self._runs[seq]
        if run is None or needed > len(run):
            # Twice the need, but never more than the sequence could come to hold.
            grown = np.empty(min(2 * needed, size + self._room), records.dtype)
            if size:
                grown[:size] = run[:size]
            self._runs[seq] = run = grown
        run[size:needed] = records
        self._sizes[seq] = needed
        self._room -= len(records)

    def can_fork(self, seq):
        return self._sizes[seq] <= self._room

    def fork(self, seq, twin):
        self.open(twin)
        if self._sizes[seq]:
            self.extend(twin, self.rows(seq))

    def can_keep(self, seq, indices):
        return True

    def keep(self, seq, indices):
        if self._runs[seq] is not None:
            self._runs[seq] = self.rows(seq)[indices]
        self._room += self._sizes[seq] - len(indices)
        self._sizes[seq] = len(indices)

    def cut(self, seq, n):
        self._room += self._sizes[seq] - n
        self._sizes[seq] = n
        run = self._runs[seq]
        if run is not None and 2 * n < len(run):
            self._runs[seq] = run[:n].copy()

    def nbytes(self):
        runs = sum(run.nbytes for run in self._runs.values() if run is not None)
        return runs + WORD * (1 + 2 * len(self._runs))


class PagedShelf:
    """Pages of a pool that grows up to num_blocks; a page may belong to several sequences."""

    def __init__(self, block_size, num_blocks):
        self._block, self._blocks = block_size, num_blocks
        self._pool = None                               # records, page after page
        self._owners = []                               # of every page that was ever taken
        self._spare = []                                # pages without an owner
        self._tables = {}                               # seq: its pages in order
        self._sizes = {}

    def open(self, seq):
        self._tables[seq], self._sizes[seq] = [], 0

    def close(self, seq):
        self._release(self._tables.pop(seq))
        del self._sizes[seq]

    def size(self, seq):
        return self._sizes[seq]

    def rows(self, seq):
        return np.take(self._pool, self._slots(seq, 0, self._sizes[seq]))

    def extend(self, seq, records):
        size, table = self._sizes[seq], self._tables[seq]
        needed = size + len(records)
        fresh = self._pages_of(needed) - len(table)
        # The last page is written to when it has a gap.
        unshare = size % self._block != 0 and self._owners[table[-1]] > 1
        if fresh + unshare > self._free_pages():
            raise MemoryError("the pool is full")
        taken = self._take(fresh + unshare, records.dtype)
        if unshare:
            shared, own = table[-1], taken.pop(0)
            self._page(own)[:] = self._page(shared)
            self._owners[shared] -= 1
            table[-1] = own
        table.extend(taken)
        self._pool[self._slots(seq, size, needed)] = records
        self._sizes[seq] = needed

    def can_fork(self, seq):
        return True

    def fork(self, seq, twin):
        self._tables[twin] = list(self._tables[seq])
        self._sizes[twin] = self._sizes[seq]
        for page in self._tables[twin]:
            self._owners[page] += 1

    def can_keep(self, seq, indices):
        untouched = self._untouched_pages(indices)
        own = sum(self._owners[page] == 1 for page in self._tables[seq][untouched:])
        return self._pages_of(len(indices)) - untouched <= own + self._free_pages()

    def keep(self, seq, indices):
        untouched = self._untouched_pages(indices)
        start = min(untouched * self._block, len(indices))
        moved = indices[start:]
        records = self.rows(seq)[moved] if len(moved) else None
        self.cut(seq, start)
        if records is not None:
            self.extend(seq, records)

    def cut(self, seq, n):
        table, pages = self._tables[seq], self._pages_of(n)
        self._release(table[pages:])
        del table[pages:]
        self._sizes[seq] = n

    def nbytes(self):
        pool = 0 if self._pool is None else self._pool.nbytes
        entries = sum(len(table) for table in self._tables.values())
        words = len(self._owners) + len(self._spare) + entries + 2 * len(self._tables) + 2
        return pool + WORD * words

    # pages

    def _pages_of(self, positions):
        return -(-positions // self._block)

    def _untouched_pages(self, indices):
        """Pages that hold the same positions after `keep` as before, so that they may stay."""
        moved = np.flatnonzero(indices != np.arange(len(indices)))
        return int(moved[0]) // self._block if len(moved) else self._pages_of(len(indices))

    def _free_pages(self):
        return self._blocks - len(self._owners) + len(self._spare)

    def _take(self, count, dtype):
        """`count` pages with one owner each; the pool grows by doubling, never past its end."""
        fresh = max(0, count - len(self._spare))
        top = len(self._owners) + fresh
        if self._pool is None or top * self._block > len(self._pool):
            grown = np.empty(min(2 * top, self._blocks) * self._block, dtype)
            if self._pool is not None:
                grown[:len(self._pool)] = self._pool
            self._pool = grown
        pages = [self._spare.pop() for _ in range(count - fresh)]
        pages.extend(range(len(self._owners), top))
        self._owners.extend([0] * fresh)
        for page in pages:
            self._owners[page] = 1
        return pages

    def _release(self, pages):
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._spare.append(page)

    def _page(self, page):
        return self._pool[page * self._block:(page + 1) * self._block]

    def _slots(self, seq, start, stop):
        """Places in the pool of the positions start to stop of a sequence."""
        positions = np.arange(start, stop)
        table = np.array(self._tables[seq], dtype=np.int64)
        return table[positions // self._block] * self._block + positions % self._block
