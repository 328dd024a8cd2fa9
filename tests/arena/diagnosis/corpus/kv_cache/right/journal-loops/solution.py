"""KV caches that work one position at a time and take everything back when something fails.

Every layer has slots for rows; a page is `page` slots in a row (one slot where room is allocated by
the position). A change that raises half-way is undone from a snapshot of the books; rows need no
undo, because only slots that nobody else can see are ever written before a change is complete.
"""

import copy
from contextlib import contextmanager
from operator import index

import numpy as np


def integer_from(low, value):
    value = index(value)
    if value < low:
        raise ValueError(f"{value} is less than {low}")
    return value


class Books:
    """Who holds which pages of a layer: a table and a length for every sequence."""

    def __init__(self, pages):
        self.free = list(range(pages - 1, -1, -1))
        self.holders = [0] * pages
        self.table = {}
        self.length = {}

    def copy(self):
        twin = copy.copy(self)
        twin.free, twin.holders = self.free[:], self.holders[:]
        twin.table = {seq: pages[:] for seq, pages in self.table.items()}
        twin.length = dict(self.length)
        return twin

    def acquire(self):
        if not self.free:
            raise MemoryError("no free page")
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def release(self, page):
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self.free.append(page)


class LoopCache:
    def __init__(self, layers, heads, dim, page, pages, bits, by_position):
        self.heads, self.dim, self.page, self.bits = heads, dim, page, bits
        self.by_position = by_position
        self.books = [Books(pages) for _ in range(layers)]
        self.slots = pages * page
        self.counter = 0
        self.dtype = None
        self.codes = self.scales = None

    @contextmanager
    def all_or_nothing(self):
        before = [books.copy() for books in self.books], self.counter, self.dtype
        try:
            yield
        except BaseException:
            self.books, self.counter, self.dtype = before
            raise

    # ---- one position

    def encode(self, row):
        """Codes and scales of a row (2, G, D)."""
        if self.bits is None:
            return row, None
        top = 2 ** (self.bits - 1) - 1
        codes = np.zeros(row.shape, dtype=np.int64)
        scales = np.zeros(row.shape[:2], dtype=np.float32)
        for t in range(2):
            for g in range(self.heads):
                scale = np.float32(float(np.max(np.abs(row[t, g]))) / top)
                scales[t, g] = scale
                if scale > 0:
                    codes[t, g] = np.clip(np.rint(row[t, g] / float(scale)), -top, top)
        codes += 2 ** (self.bits - 1)
        if self.bits == 4:
            if self.dim % 2:
                codes = np.concatenate([codes, np.zeros((2, self.heads, 1), np.int64)], axis=2)
            codes = codes[:, :, 0::2] + 16 * codes[:, :, 1::2]
        return codes, scales

    def decode(self, codes, scales):
        """Rows (n, 2, G, D) of codes and scales."""
        if self.bits is None:
            return codes
        if self.bits == 4:
            wide = np.zeros((*codes.shape[:3], 2 * codes.shape[3]), np.uint8)
            wide[..., 0::2] = codes & 0x0F
            wide[..., 1::2] = codes >> 4
            codes = wide[..., : self.dim]
        values = codes.astype(self.dtype) - 2 ** (self.bits - 1)
        return values * scales[..., None].astype(self.dtype)

    def make_slots(self):
        if self.codes is None:
            shape = (len(self.books), self.slots, 2, self.heads)
            width = self.dim if self.bits is None else (self.dim * self.bits + 7) // 8
            self.codes = np.zeros((*shape, width), self.dtype if self.bits is None else np.uint8)
            self.scales = np.zeros(
                shape if self.bits else (len(self.books), self.slots, 0), np.float32
            )

    def slot(self, seq, layer, position):
        return (
            self.books[layer].table[seq][position // self.page] * self.page + position % self.page
        )

    def new_slot(self, seq, layer):
        """The slot of the next position; takes or copies a page if that is needed."""
        books = self.books[layer]
        table, position = books.table[seq], books.length[seq]
        if position % self.page == 0:
            table.append(books.acquire())
        elif books.holders[table[-1]] > 1:
            mine = books.acquire()
            for offset in range(self.page):
                old, new = table[-1] * self.page + offset, mine * self.page + offset
                self.codes[layer, new] = self.codes[layer, old]
                self.scales[layer, new] = self.scales[layer, old]
            books.release(table[-1])
            table[-1] = mine
        books.length[seq] = position + 1
        return self.slot(seq, layer, position)

    def rows(self, seq, layer, positions):
        where = [self.slot(seq, layer, p) for p in positions]
        return self.codes[layer, where], self.scales[layer, where]

    # ---- checks

    def check_seq(self, seq):
        if seq not in self.books[0].table:
            raise KeyError(seq)

    def check_layer(self, layer):
        if integer_from(0, layer) >= len(self.books):
            raise ValueError("no such layer")

    def check_rows(self, *arrays, heads=None):
        for x in arrays:
            if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float64):
                raise TypeError("expected a float32 or float64 array")
            if x.ndim != 3 or x.shape[2] != self.dim:
                raise ValueError("expected (n, heads, D)")
            if x.shape[1] != heads if heads else x.shape[1] < 1 or x.shape[1] % self.heads:
                raise ValueError("wrong number of heads")
            if x.shape[0] != arrays[0].shape[0]:
                raise ValueError("different numbers of positions")
            if x.dtype != arrays[0].dtype:
                raise TypeError("different dtypes")

    # ---- methods

    def add(self):
        self.counter += 1
        for books in self.books:
            books.table[self.counter] = []
            books.length[self.counter] = 0
        return self.counter

    def append(self, seq, layer, k, v):
        self.check_seq(seq)
        self.check_layer(layer)
        self.check_rows(k, v, heads=self.heads)
        if self.dtype is not None and self.dtype != k.dtype:
            raise TypeError("the cache holds another dtype")
        with self.all_or_nothing():
            self.dtype = k.dtype
            self.make_slots()
            for i in range(len(k)):
                codes, scales = self.encode(np.stack([k[i], v[i]]))
                slot = self.new_slot(seq, layer)
                self.codes[layer, slot] = codes
                if scales is not None:
                    self.scales[layer, slot] = scales

    def view(self, seq, layer):
        self.check_seq(seq)
        self.check_layer(layer)
        held = self.books[layer].length[seq]
        if held == 0:
            nothing = np.zeros((0, self.heads, self.dim), self.dtype or np.float32)
            return nothing, nothing.copy()
        both = self.decode(*self.rows(seq, layer, range(held)))
        return both[:, 0].copy(), both[:, 1].copy()

    def attend(self, seq, layer, q):
        self.check_seq(seq)
        self.check_layer(layer)
        self.check_rows(q)
        keys, values = self.view(seq, layer)
        n, heads, dim = q.shape
        if n > len(keys):
            raise ValueError("more queries than positions")
        keys = np.ascontiguousarray(keys.transpose(1, 0, 2))
        values = np.ascontiguousarray(values.transpose(1, 0, 2))
        per_group = heads // self.heads
        out = np.zeros((n, heads, dim), q.dtype)
        for i in range(n):
            sees = len(keys[0]) - n + i + 1
            for g in range(self.heads):
                mine = slice(g * per_group, (g + 1) * per_group)
                scores = keys[g, :sees] @ (q[i, mine] * dim**-0.5).T  # (sees, H/G)
                weights = np.exp(scores - scores.max(axis=0))
                weights /= weights.sum(axis=0)
                out[i, mine] = weights.T @ values[g, :sees]
        return out

    def fork(self, seq):
        self.check_seq(seq)
        with self.all_or_nothing():
            new = self.add()
            for layer, books in enumerate(self.books):
                if not self.by_position:
                    books.table[new] = books.table[seq][:]
                    books.length[new] = books.length[seq]
                    for page in books.table[seq]:
                        books.holders[page] += 1
                    continue
                for position in range(books.length[seq]):
                    old, twin = self.slot(seq, layer, position), self.new_slot(new, layer)
                    self.codes[layer, twin] = self.codes[layer, old]
                    self.scales[layer, twin] = self.scales[layer, old]
        return new

    def keep(self, seq, indices):
        self.check_seq(seq)
        wanted = []
        for i in indices:
            i = integer_from(0, i)
            if i >= self.length(seq):
                raise ValueError(f"no position {i}")
            wanted.append(i)
        if len(set(wanted)) != len(wanted):
            raise ValueError("a position is named twice")
        saved = [
            self.rows(seq, layer, wanted) if wanted else None for layer in range(len(self.books))
        ]
        with self.all_or_nothing():
            for (
                books
            ) in self.books:  # only the books: rows are written when all layers have their room
                self.cut(books, seq, 0)
                for _ in range(-(-len(wanted) // self.page)):
                    books.table[seq].append(books.acquire())
                books.length[seq] = len(wanted)
        for layer in range(len(self.books)):
            for position in range(len(wanted)):
                slot = self.slot(seq, layer, position)
                self.codes[layer, slot] = saved[layer][0][position]
                self.scales[layer, slot] = saved[layer][1][position]

    def cut(self, books, seq, n):
        while len(books.table[seq]) * self.page >= n + self.page:
            books.release(books.table[seq].pop())
        books.length[seq] = n

    def truncate(self, seq, n):
        self.check_seq(seq)
        if integer_from(0, n) > self.length(seq):
            raise ValueError("n is larger than the length")
        for books in self.books:
            self.cut(books, seq, n)

    def free(self, seq):
        self.check_seq(seq)
        for books in self.books:
            self.cut(books, seq, 0)
            del books.table[seq], books.length[seq]

    def length(self, seq):
        self.check_seq(seq)
        return min(books.length[seq] for books in self.books)

    def nbytes(self):
        total = 0 if self.codes is None else self.codes.nbytes + self.scales.nbytes
        for books in self.books:
            total += 4 * len(books.holders)
            for table in books.table.values():
                total += 4 * len(table)
        return total


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind {kind!r}")
    quantized = kind.endswith("quantized")
    if quantized and bits not in (4, 8):
        raise ValueError("bits must be 4 or 8")
    if not quantized and bits is not None:
        raise ValueError("bits must be None")
    layers, heads = integer_from(1, num_layers), integer_from(1, num_kv_heads)
    dim, page, pages = (
        integer_from(1, head_dim),
        integer_from(1, block_size),
        integer_from(1, num_blocks),
    )
    if kind in ("dense", "quantized"):
        return LoopCache(layers, heads, dim, 1, page * pages, bits, True)
    return LoopCache(layers, heads, dim, page, pages, bits, False)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    cache.check_seq(seq)
    cache.check_layer(layer)
    cache.check_rows(q)
    cache.check_rows(k, v, heads=cache.heads)
    chunk = integer_from(1, chunk)
    if len(q) != len(k):
        raise ValueError("q and k differ in length")
    out = np.zeros(q.shape, q.dtype)
    with cache.all_or_nothing():
        for begin in range(0, len(q), chunk):
            end = min(begin + chunk, len(q))
            cache.append(seq, layer, k[begin:end], v[begin:end])
            out[begin:end] = cache.attend(seq, layer, q[begin:end])
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    bytes_per_token = 2.0 / 8.0
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"{name} is missing")
        bytes_per_token *= integer_from(1, spec[name])
    if not 0.0 < utilization <= 1.0:
        raise ValueError("utilization must be in (0, 1]")
    for amount in (gpu_bytes, weight_bytes, reserve_bytes):
        if amount < 0:
            raise ValueError("bytes must be at least 0")
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = 0 if budget < 0 else int(budget // bytes_per_token)
    return tokens, {"bytes_per_token": bytes_per_token, "budget_bytes": budget}
