"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

One position of one layer, key and value of all heads together, is a *row* of bytes.  A `_Codec`
turns (n, 2, G, D) numbers into rows and back, raw or quantised; a *shelf* (one for each layer)
stores rows without knowing what is in them, contiguously or in pages.  The four kinds of cache are
the four pairings.  Rows are encoded once, and only copied afterwards.

Every method that changes something first asks all shelves whether there is room, and then acts.
"""

import operator
from array import array
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real

import numpy as np

_SCORE_CELLS = 1 << 18  # numbers in a tile of attention scores


# ---------------------------------------------------------------------------- checks


def _int(value, name, low, high=None):
    """value as an int in [low, high], or TypeError / ValueError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, not a bool")
    value = operator.index(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is out of range: {value}")
    return value


def _floats(value, name):
    """value as a float32 or float64 array of rank 3, or TypeError / ValueError."""
    value = np.asarray(value)
    if value.dtype.kind != "f" or value.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} must be float32 or float64, not {value.dtype}")
    if value.ndim != 3:
        raise ValueError(f"{name} must have rank 3, not {value.ndim}")
    return value


# ---------------------------------------------------------------------------- codecs


class _Codec:
    """Rows of bytes for keys and values of one dtype; bits None, 8 or 4."""

    def __init__(self, dtype, heads, width, bits):
        self.dtype = np.dtype(dtype).newbyteorder("=")
        self.width = width
        self.bits = bits
        if bits is None:
            fields = [("kv", self.dtype, (2, heads, width))]
        else:
            code_bytes = (bits * width + 7) // 8
            fields = [("codes", np.uint8, (2, heads, code_bytes)), ("scale", self.dtype, (2, heads))]
        self.record = np.dtype(fields)

    def encode(self, k, v):
        """(n, G, D) twice -> (n, bytes of a row)."""
        kv = np.stack([k, v], axis=1).astype(self.dtype, copy=False)
        rows = np.empty(len(kv), dtype=self.record)
        if self.bits is None:
            rows["kv"] = kv
        else:
            rows["codes"], rows["scale"] = self._quantise(kv)
        return rows.view(np.uint8).reshape(len(kv), self.record.itemsize)

    def decode(self, rows):
        """(n, bytes of a row) -> fresh (n, G, D) twice."""
        rows = np.ascontiguousarray(rows).reshape(-1).view(self.record)
        kv = rows["kv"] if self.bits is None else self._restore(rows["codes"], rows["scale"])
        return kv[:, 0].copy(), kv[:, 1].copy()

    def _quantise(self, kv):
        """Symmetric codes -q..q with one scale for each position, tensor and head."""
        q = 2 ** (self.bits - 1) - 1
        scale = np.abs(kv).max(axis=-1) / self.dtype.type(q)
        divisor = np.where(scale > 0, scale, 1)[..., None]
        codes = np.clip(np.rint(kv / divisor), -q, q).astype(np.int8)
        if self.bits == 8:
            return codes.view(np.uint8), scale
        nibbles = (codes + 8).astype(np.uint8)
        if self.width % 2:
            nibbles = np.concatenate([nibbles, np.full_like(nibbles[..., :1], 8)], axis=-1)
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scale

    def _restore(self, codes, scale):
        if self.bits == 8:
            levels = np.ascontiguousarray(codes).view(np.int8)
        else:
            levels = np.empty(codes.shape[:-1] + (2 * codes.shape[-1],), dtype=np.int8)
            levels[..., 0::2] = codes & 15
            levels[..., 1::2] = codes >> 4
            levels = levels[..., :self.width] - np.int8(8)
        return levels.astype(self.dtype) * scale[..., None]


# ---------------------------------------------------------------------------- shelves


class _Run:
    """The rows of one sequence on a `_DenseShelf`: the first `size` of `rows`."""

    def __init__(self, rows=None):
        self.rows = rows
        self.size = 0 if rows is None else len(rows)


class _DenseShelf:
    """One layer; each sequence has its rows in one array. Room is counted by the position."""

    def __init__(self, positions):
        self.positions = positions
        self.used = 0

    def new(self):
        return _Run()

    def need_append(self, run, n):
        self._need(n)

    def append(self, run, rows):
        size = run.size + len(rows)
        self.used += len(rows)
        if run.rows is None or size > len(run.rows):
            most = size + self.positions - self.used
            bigger = np.empty((min(most, max(size, 2 * run.size)), rows.shape[1]), dtype=np.uint8)
            if run.size:
                bigger[:run.size] = run.rows[:run.size]
            run.rows = bigger
        run.rows[run.size:size] = rows
        run.size = size

    def read(self, run):
        return run.rows[:run.size]

    def need_fork(self, run):
        self._need(run.size)

    def fork(self, run):
        self.used += run.size
        return _Run(run.rows[:run.size].copy() if run.size else None)

    def need_pick(self, run, indices):
        """Picking never needs room: the result is no longer than what is there."""

    def pick(self, run, indices):
        self.used -= run.size - len(indices)
        if run.size:
            run.rows = run.rows[indices]
        run.size = len(indices)

    def cut(self, run, n):
        if n < run.size:
            self.used -= run.size - n
            run.rows = run.rows[:n].copy()
            run.size = n

    def drop(self, run):
        self.used -= run.size

    def nbytes(self, runs):
        return 16 + sum(16 + (0 if run.rows is None else run.rows.nbytes) for run in runs)

    def _need(self, n):
        if n > self.positions - self.used:
            raise MemoryError(f"no room for {n} positions")


class _Table:
    """The rows of one sequence on a `_PagedShelf`: `size` rows on the listed pages."""

    def __init__(self, pages=(), size=0):
        self.pages = array("i", pages)
        self.size = size


class _PagedShelf:
    """One layer; rows lie on pages, and forks share pages until one of them writes."""

    def __init__(self, num_pages, page_size):
        self.num_pages = num_pages
        self.page_size = page_size
        self.pool = None  # (pages so far, page_size, bytes of a row)
        self.touched = 0  # pages that were ever handed out
        self.idle = array("i")  # those of them that came back
        self.sharers = {}  # page -> owners beyond the first; only shared pages are listed

    def new(self):
        return _Table()

    def need_append(self, table, n):
        self._need(self._fresh_pages(table, n))

    def append(self, table, rows):
        self._grow(self._fresh_pages(table, len(rows)), rows.shape[1])
        size = table.size + len(rows)
        if self._writes_shared_tail(table):
            old = table.pages[-1]
            table.pages[-1] = self._take()
            self.pool[table.pages[-1]] = self.pool[old]
            self._release(old)
        while len(table.pages) < self._pages_for(size):
            table.pages.append(self._take())
        self._write(table.pages, table.size, rows)
        table.size = size

    def read(self, table):
        pages = self.pool[np.asarray(table.pages, dtype=np.intp)]
        return pages.reshape(-1, self.pool.shape[2])[:table.size]

    def need_fork(self, table):
        """A fork takes no pages."""

    def fork(self, table):
        for page in table.pages:
            self.sharers[page] = self.sharers.get(page, 0) + 1
        return _Table(table.pages, table.size)

    def need_pick(self, table, indices):
        if not self._is_prefix(indices):
            self._need(self._pages_for(len(indices)) - len(self._private(table)))

    def pick(self, table, indices):
        if self._is_prefix(indices):
            self.cut(table, len(indices))
            return
        rows = self.read(table)[indices]
        pages = self._private(table)
        wanted = self._pages_for(len(indices))
        self._grow(wanted - len(pages), rows.shape[1])
        for page in set(table.pages) - set(pages):
            self._release(page)
        while len(pages) > wanted:
            self._release(pages.pop())
        while len(pages) < wanted:
            pages.append(self._take())
        table.pages = array("i", pages)
        table.size = len(indices)
        self._write(table.pages, 0, rows)

    def cut(self, table, n):
        while len(table.pages) > self._pages_for(n):
            self._release(table.pages.pop())
        table.size = n

    def drop(self, table):
        for page in table.pages:
            self._release(page)

    def nbytes(self, tables):
        rows = 0 if self.pool is None else self.pool.nbytes
        lists = 4 * len(self.idle) + 16 * len(self.sharers)
        return 16 + rows + lists + sum(8 + 4 * len(table.pages) for table in tables)

    def _pages_for(self, n):
        return -(-n // self.page_size)

    def _writes_shared_tail(self, table):
        return table.size % self.page_size != 0 and table.pages[-1] in self.sharers

    def _fresh_pages(self, table, n):
        """Pages that appending n rows takes, the copy of a shared last page included."""
        copies = 1 if self._writes_shared_tail(table) else 0
        return self._pages_for(table.size + n) - len(table.pages) + copies

    def _private(self, table):
        return [page for page in table.pages if page not in self.sharers]

    @staticmethod
    def _is_prefix(indices):
        return np.array_equal(indices, np.arange(len(indices)))

    def _need(self, pages):
        if pages > self.num_pages - self.touched + len(self.idle):
            raise MemoryError(f"no room for {pages} pages")

    def _grow(self, fresh, row_bytes):
        """Have storage for so many more pages; geometric, and never beyond the pool."""
        have = 0 if self.pool is None else len(self.pool)
        target = self.touched + max(0, fresh - len(self.idle))
        if target > have or self.pool is None:
            count = min(self.num_pages, max(target, 2 * have))
            pool = np.empty((count, self.page_size, row_bytes), dtype=np.uint8)
            if have:
                pool[:have] = self.pool
            self.pool = pool

    def _take(self):
        if self.idle:
            return self.idle.pop()
        self.touched += 1
        return self.touched - 1

    def _release(self, page):
        if page in self.sharers:
            self.sharers[page] -= 1
            if not self.sharers[page]:
                del self.sharers[page]
        else:
            self.idle.append(page)

    def _write(self, pages, start, rows):
        at = np.arange(start, start + len(rows))
        self.pool[np.asarray(pages, dtype=np.intp)[at // self.page_size], at % self.page_size] = rows


# ---------------------------------------------------------------------------- attention


def _attention(q, k, v, first):
    """Causal attention of q (n, H, D) at positions first, first + 1, ... over k, v (S, G, D)."""
    n, heads, width = q.shape
    groups = k.shape[1]
    per_group = heads // groups
    out = np.empty(q.shape, dtype=q.dtype.newbyteorder("="))
    keys = k.astype(np.float64).transpose(1, 2, 0)  # (G, D, S)
    values = v.astype(np.float64).transpose(1, 0, 2)  # (G, S, D)
    step = max(1, _SCORE_CELLS // (heads * max(1, first + n)))
    for i in range(0, n, step):
        part = q[i:i + step].astype(np.float64) * width ** -0.5
        m = len(part)
        seen = first + i + m
        part = part.reshape(m, groups, per_group, width).transpose(1, 2, 0, 3)
        scores = part.reshape(groups, per_group * m, width) @ keys[:, :, :seen]
        hidden = np.arange(seen) > np.arange(first + i, seen)[:, None]
        scores.reshape(groups, per_group, m, seen)[:, :, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        mixed = (scores @ values[:, :seen]) / total
        mixed = mixed.reshape(groups, per_group, m, width).transpose(2, 0, 1, 3)
        out[i:i + m] = mixed.reshape(m, heads, width)
    return out


# ---------------------------------------------------------------------------- the cache


class _Cache:
    """Sequences of positions; every layer of every sequence has its rows on that layer's shelf."""

    def __init__(self, shelves, heads, width, bits):
        self._shelves = shelves
        self._heads = heads
        self._width = width
        self._bits = bits
        self._codec = None  # known from the first append on
        self._parts = {}  # seq -> its part of every shelf
        self._next = 0

    def add(self):
        """A new, empty sequence."""
        return self._admit([shelf.new() for shelf in self._shelves])

    def append(self, seq, layer, k, v):
        """Add the positions k, v (n, G, D) to one layer."""
        shelf, part = self._at(seq, layer)
        k, v = self._checked_kv(k, v)
        if len(k) == 0:
            raise ValueError("append needs at least one position")
        shelf.need_append(part, len(k))
        codec = self._codec or _Codec(k.dtype, self._heads, self._width, self._bits)
        shelf.append(part, codec.encode(k, v))
        self._codec = codec

    def attend(self, seq, layer, q):
        """Causal attention of q (n, H, D), the queries of the last n positions of the layer."""
        _, part = self._at(seq, layer)
        q = self._checked_q(q)
        if len(q) > part.size:
            raise ValueError(f"{len(q)} queries, but only {part.size} positions")
        k, v = self.view(seq, layer)
        return _attention(q, k, v, part.size - len(q))

    def view(self, seq, layer):
        """Keys and values of the layer, (S, G, D) each, as copies."""
        shelf, part = self._at(seq, layer)
        if part.size == 0:
            dtype = np.float32 if self._codec is None else self._codec.dtype
            shape = (0, self._heads, self._width)
            return np.empty(shape, dtype), np.empty(shape, dtype)
        return self._codec.decode(shelf.read(part))

    def fork(self, seq):
        """A new sequence with the same positions."""
        pairs = self._all(seq)
        for shelf, part in pairs:
            shelf.need_fork(part)
        return self._admit([shelf.fork(part) for shelf, part in pairs])

    def keep(self, seq, indices):
        """Keep these positions, in this order, in every layer."""
        pairs = self._all(seq)
        last = self.length(seq) - 1
        if isinstance(indices, np.ndarray) and indices.ndim != 1:
            raise ValueError("indices must have rank 1")
        indices = [_int(index, "index", 0, last) for index in indices]
        if len(set(indices)) != len(indices):
            raise ValueError("indices must be different")
        indices = np.array(indices, dtype=np.intp)
        for shelf, part in pairs:
            shelf.need_pick(part, indices)
        for shelf, part in pairs:
            shelf.pick(part, indices)

    def truncate(self, seq, n):
        """Keep the first n positions of every layer."""
        pairs = self._all(seq)
        n = _int(n, "n", 0, self.length(seq))
        for shelf, part in pairs:
            shelf.cut(part, n)

    def free(self, seq):
        """Forget the sequence."""
        for shelf, part in self._all(seq):
            shelf.drop(part)
        del self._parts[seq]

    def length(self, seq):
        """Positions that are present in every layer."""
        return min(part.size for _, part in self._all(seq))

    def nbytes(self):
        """Bytes allocated for rows, scales, page tables and lists of pages."""
        columns = zip(*self._parts.values()) if self._parts else ((),) * len(self._shelves)
        return sum(shelf.nbytes(parts) for shelf, parts in zip(self._shelves, columns))

    def _admit(self, parts):
        seq = self._next
        self._next += 1
        self._parts[seq] = parts
        return seq

    def _all(self, seq):
        """(shelf, part) of every layer of a sequence, or KeyError."""
        if isinstance(seq, bool) or not isinstance(seq, (int, np.integer)):
            raise KeyError(seq)
        return list(zip(self._shelves, self._parts[seq]))

    def _at(self, seq, layer):
        """(shelf, part) of one layer of a sequence, or KeyError / ValueError / TypeError."""
        pairs = self._all(seq)
        return pairs[_int(layer, "layer", 0, len(pairs) - 1)]

    def _checked_kv(self, k, v):
        k, v = _floats(k, "k"), _floats(v, "v")
        if k.dtype != v.dtype:
            raise TypeError(f"k is {k.dtype}, v is {v.dtype}")
        if k.shape != v.shape or k.shape[1:] != (self._heads, self._width):
            raise ValueError(f"k and v must be (n, {self._heads}, {self._width})")
        if self._codec is not None and k.dtype.newbyteorder("=") != self._codec.dtype:
            raise TypeError(f"this cache holds {self._codec.dtype}, not {k.dtype}")
        return k, v

    def _checked_q(self, q):
        q = _floats(q, "q")
        if q.shape[2] != self._width or q.shape[1] < 1 or q.shape[1] % self._heads:
            raise ValueError(f"q must be (n, a multiple of {self._heads}, {self._width})")
        return q


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind: {kind!r}")
    num_layers = _int(num_layers, "num_layers", 1)
    num_kv_heads = _int(num_kv_heads, "num_kv_heads", 1)
    head_dim = _int(head_dim, "head_dim", 1)
    block_size = _int(block_size, "block_size", 1)
    num_blocks = _int(num_blocks, "num_blocks", 1)
    if kind.endswith("quantized"):
        if _int(bits, "bits", 1) not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, not {bits}")
        bits = int(bits)
    elif bits is not None:
        raise ValueError(f"a {kind} cache takes no bits")
    if kind.startswith("paged"):
        shelves = [_PagedShelf(num_blocks, block_size) for _ in range(num_layers)]
    else:
        shelves = [_DenseShelf(num_blocks * block_size) for _ in range(num_layers)]
    return _Cache(shelves, num_kv_heads, head_dim, bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T, G, D) and return the attention of q (T, H, D), `chunk` positions at a time.

    The rows go in by one append, which either happens or raises and changes nothing; the queries
    are then answered chunk by chunk over what was read back once.
    """
    _, part = cache._at(seq, layer)
    q = cache._checked_q(q)
    k, v = cache._checked_kv(k, v)
    chunk = _int(chunk, "chunk", 1)
    if len(q) != len(k):
        raise ValueError(f"{len(q)} queries for {len(k)} positions")
    out = np.empty(q.shape, dtype=q.dtype.newbyteorder("="))
    if len(k) == 0:
        return out
    start = part.size
    cache.append(seq, layer, k, v)
    keys, values = cache.view(seq, layer)
    for i in range(0, len(q), chunk):
        j = min(i + chunk, len(q))
        out[i:j] = _attention(q[i:j], keys[:start + j], values[:start + j], start + i)
    return out


# ---------------------------------------------------------------------------- max_context


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    bits_per_token = 2
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"spec has no {name}")
        bits_per_token *= _int(spec[name], name, 1)
    per_token = Fraction(bits_per_token, 8)
    share = _number(utilization, "utilization")
    if not 0 < share <= 1:
        raise ValueError(f"utilization must be in (0, 1], not {utilization}")
    total, weights, reserve = (
        _bytes(gpu_bytes, "gpu_bytes"),
        _bytes(weight_bytes, "weight_bytes"),
        _bytes(reserve_bytes, "reserve_bytes"),
    )
    budget = share * total - weights - reserve
    tokens = max(0, budget // per_token)
    terms = {
        "bytes_per_token": _plain(per_token),
        "budget_bytes": _plain(budget),
        "weight_bytes": _plain(weights),
        "reserve_bytes": _plain(reserve),
    }
    return int(tokens), terms


def _number(value, name):
    """value as an exact fraction; a float means the decimal number it is written as."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number")
    try:
        return Fraction(str(value))
    except ValueError:
        raise ValueError(f"{name} must be finite, not {value}") from None


def _bytes(value, name):
    number = _number(value, name)
    if number < 0:
        raise ValueError(f"{name} must not be negative: {value}")
    return number


def _plain(number):
    return int(number) if number.denominator == 1 else float(number)
