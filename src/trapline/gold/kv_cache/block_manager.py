"""Assigns pages to sequences: page tables, reference counts, free pages, cached prefixes.

No arrays are involved. A page is *held* (it is in a table), *cached* (no sequence holds it, but its
tokens are known and it can be found again) or *free*. When no free page is left, the least recently
used cached page is evicted.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import RangeError

#: The table entry of a page behind the window, which was freed.
GONE = -1


@dataclass(frozen=True, eq=False, slots=True)
class CachedBlock:
    """The content of a full page: these tokens, after those of its parent.

    Blocks are looked up by key, then compared. Parents are compared by identity: a parent that was
    evicted and stored again counts as a different block.
    """

    parent: "CachedBlock | None"
    salt: Hashable
    tokens: tuple[int, ...]
    key: int
    page: int


def chained_key(parent: int, salt: Hashable, tokens: tuple[int, ...]) -> int:
    """The key of these tokens and of everything before them."""
    return hash((parent, salt, tokens))


class BlockManager:
    """Page tables, reference counts, free and cached pages.

    Invariants: free_pages + distinct pages in tables = all pages, and the count of a page is the
    number of tables that contain it. A page with several holders is copied before it is written; a
    cached page that is written is no longer found.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        key: Callable[[int, Hashable, tuple[int, ...]], int] = chained_key,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.tables: dict[int, list[int]] = {}
        self._key = key
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))
        self._seals: dict[int, CachedBlock] = {}  # by page
        self._found: dict[int, CachedBlock] = {}  # by key
        self._cached: dict[int, None] = {}  # least recently used first

    @property
    def free_pages(self) -> int:
        """Pages without a holder, cached prefixes included."""
        return len(self._free) + len(self._cached)

    def pages_for(self, n: int) -> int:
        """⌈n / P⌉."""
        return cdiv(n, self.page_size)

    def reserve(self, seq: int, start: int, n: int, behind: int = 0) -> list[tuple[int, int]]:
        """Gives the sequence writable pages for positions start … start + n − 1.

        Frees the pages before position `behind` first. Returns the pages to copy as (from, to).
        Raises MemoryError before anything changes.
        """
        table = self.tables[seq]
        needed = self.pages_for(start + n)
        written = range(start // self.page_size, min(needed, len(table)))
        shared = [i for i in written if self._holders[table[i]] > 1]
        missing = max(0, needed - len(table))
        given = sum(p != GONE and self._holders[p] == 1 for p in table[: behind // self.page_size])
        self._require(len(shared) + missing, self.free_pages + given)
        self.forget(seq, behind)
        copies = []
        for i in shared:
            copies.append((table[i], self._take()))
            self._release(table[i])
            table[i] = copies[-1][1]
        for i in written:
            self._unseal(table[i])
        table.extend(self._take() for _ in range(missing))
        return copies

    def fork(self, seq: int, child: int) -> None:
        """The child holds the same pages; no new page is allocated."""
        self.tables[child] = list(self.tables[seq])
        for page in self.tables[child]:
            if page != GONE:
                self._hold(page)

    def shrink(self, seq: int, n: int) -> None:
        """Releases the pages after position n, the last first: it is then evicted first."""
        table = self.tables[seq]
        kept = self.pages_for(n)
        for page in reversed(table[kept:]):
            if page != GONE:
                self._release(page)
        del table[kept:]

    def forget(self, seq: int, n: int) -> None:
        """Frees the whole pages before position n. Positions keep their numbers."""
        table = self.tables[seq]
        for i in reversed(range(min(n // self.page_size, len(table)))):
            if table[i] == GONE:
                return
            self._release(table[i])
            table[i] = GONE

    def first(self, seq: int) -> int:
        """The first position that is still stored."""
        table = self.tables[seq]
        gone = next((i for i, page in enumerate(table) if page != GONE), len(table))
        return gone * self.page_size

    def replace(self, seq: int, first: int, pages: int) -> None:
        """Replaces the table from entry `first` on with `pages` newly allocated pages."""
        tail = self.tables[seq][first:]
        own = sum(page != GONE and self._holders[page] == 1 for page in tail)
        self._require(pages, self.free_pages + own)
        self.shrink(seq, first * self.page_size)
        self.tables[seq].extend(self._take() for _ in range(pages))

    def adopt(self, seq: int, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Starts an empty sequence with cached pages of these tokens; returns the positions found.

        At least one token is left over, because its logits have to be computed.
        """
        parent: CachedBlock | None = None
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            seal = self._find(parent, salt, tuple(tokens[start : start + self.page_size]))
            if seal is None:
                break
            self._hold(seal.page)
            self.tables[seq].append(seal.page)
            parent = seal
        return len(self.tables[seq]) * self.page_size

    def publish(self, seq: int, tokens: Sequence[int], salt: Hashable = None) -> None:
        """Caches the whole pages of a sequence whose positions hold these tokens."""
        parent: CachedBlock | None = None
        for i in range(len(tokens) // self.page_size):
            piece = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
            page = self.tables[seq][i]
            seal = self._seals.get(page)
            if seal is not None and (seal.tokens, seal.salt) != (piece, salt):
                raise RangeError(f"page {i} of the sequence is known to hold other tokens")
            if seal is None or seal.parent is not parent:
                # If its parent was an equal page that is gone, the page is cached again. If a page
                # of equal content is cached already, this one is not.
                self._unseal(page)
                seal = self._find(parent, salt, piece) or self._seal(parent, salt, piece, page)
            if seal is None:
                return
            parent = seal

    def slots(self, seq: int, positions: np.ndarray) -> np.ndarray:
        """The slots of positions: page · P + offset in the page."""
        table = np.array(self.tables[seq], dtype=np.int64)
        pages = table[positions // self.page_size]
        return np.asarray(pages * self.page_size + positions % self.page_size)

    def entries(self) -> int:
        """The number of integers stored here, for `nbytes`."""
        tables = sum(map(len, self.tables.values()))
        return tables + 2 * self.num_pages + len(self._seals) * (self.page_size + 3)

    def _find(
        self, parent: CachedBlock | None, salt: Hashable, tokens: tuple[int, ...]
    ) -> CachedBlock | None:
        """The cached block of these tokens; keys may collide, so tokens and parent are compared."""
        seal = self._found.get(self._key(parent.key if parent else 0, salt, tokens))
        if seal is None or seal.parent is not parent:
            return None
        return seal if seal.tokens == tokens and seal.salt == salt else None

    def _seal(
        self, parent: CachedBlock | None, salt: Hashable, tokens: tuple[int, ...], page: int
    ) -> CachedBlock | None:
        key = self._key(parent.key if parent else 0, salt, tokens)
        if page == GONE or key in self._found:
            return None
        seal = CachedBlock(parent, salt, tokens, key, page)
        self._seals[page] = self._found[key] = seal
        return seal

    def _unseal(self, page: int) -> None:
        seal = self._seals.pop(page, None)
        if seal is not None:
            del self._found[seal.key]

    def _require(self, needed: int, available: int) -> None:
        if needed > available:
            raise MemoryError(f"{needed} pages needed, {available} of {self.num_pages} available")

    def _hold(self, page: int) -> None:
        self._cached.pop(page, None)
        self._holders[page] += 1

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
            self._unseal(page)
        self._holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._seals:
                self._cached[page] = None
            else:
                self._free.append(page)
