"""KV caches: dense, paged, quantised; chunked prefill; maximal context. See prompt.md.

Two ideas that know nothing of each other make the four kinds:

* a *codec* turns the keys and values of a position into one row of bytes and back. It runs once for
  every position that is appended;
* a *room* stores rows of bytes for the sequences of one layer: `_Pages` in shared pages,
  `_Strips` in one contiguous buffer a sequence. Forks, `keep` and `truncate` move bytes only, so what
  a position answers never changes.

`KVCache` checks arguments and room for all layers first and changes something only then.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral, Real

import numpy as np

SCORE_TILE = 1 << 20  # attention scores held at once, unless a single query needs more
PAGE_NUMBER = np.int32


# ---------------------------------------------------------------------------------- codecs


class _PlainCodec:
    """A row is the keys and then the values of a position, as they are."""

    def __init__(self, heads, width, dtype):
        self.shape = (2, heads, width)
        self.dtype = dtype

    def encode(self, k, v):
        """Rows (n, bytes) of uint8 for k and v (n, G, D)."""
        pairs = np.stack([k, v], axis=1).astype(self.dtype, order="C", copy=False)
        return pairs.reshape(len(k), -1).view(np.uint8)

    def decode(self, rows):
        """k and v (n, G, D); they may share memory with the rows."""
        pairs = rows.view(self.dtype).reshape(len(rows), *self.shape)
        return pairs[:, 0], pairs[:, 1]


class _QuantCodec:
    """A row is the integer codes of keys and values, and then one scale for each D elements.

    An element x of D elements with largest magnitude a is stored as round(x / scale), scale = a / top,
    top = 2^(bits-1) - 1. Four-bit codes are shifted to 1..15 and go two to a byte.
    """

    def __init__(self, heads, width, dtype, bits):
        self.heads, self.width, self.dtype, self.bits = heads, width, dtype, bits
        self.top = 2 ** (bits - 1) - 1
        self.code_width = (bits * width + 7) // 8
        self.code_bytes = 2 * heads * self.code_width

    def encode(self, k, v):
        """Rows (n, bytes) of uint8 for k and v (n, G, D)."""
        pairs = np.stack([k, v], axis=1).astype(self.dtype, order="C", copy=False)
        scales = np.abs(pairs).max(axis=-1, keepdims=True) / self.dtype.type(self.top)
        steps = pairs / np.where(scales > 0, scales, 1)
        codes = np.clip(np.rint(steps), -self.top, self.top).astype(np.int8)
        parts = [self._pack(codes).reshape(len(k), -1), scales.reshape(len(k), -1).view(np.uint8)]
        return np.concatenate(parts, axis=1)

    def decode(self, rows):
        """k and v (n, G, D)."""
        packed = rows[:, : self.code_bytes].reshape(len(rows), 2, self.heads, self.code_width)
        scales = np.ascontiguousarray(rows[:, self.code_bytes :]).view(self.dtype)
        pairs = self._unpack(packed) * scales.reshape(len(rows), 2, self.heads, 1)
        return pairs[:, 0], pairs[:, 1]

    def _pack(self, codes):
        if self.bits == 8:
            return codes.view(np.uint8)
        packed = np.zeros((*codes.shape[:-1], self.code_width), dtype=np.uint8)
        shifted = (codes + 8).astype(np.uint8)
        packed |= shifted[..., 0::2]
        packed[..., : self.width // 2] |= shifted[..., 1::2] << 4
        return packed

    def _unpack(self, packed):
        if self.bits == 8:
            return packed.view(np.int8).astype(self.dtype)
        codes = np.empty((*packed.shape[:-1], self.width), dtype=self.dtype)
        codes[..., 0::2] = packed & 15
        codes[..., 1::2] = packed[..., : self.width // 2] >> 4
        codes -= 8
        return codes


# ----------------------------------------------------------------------------------- rooms


class _Pages:
    """Rows of one layer in pages of a common pool; forks share pages until they write.

    The pool is made with the first rows. Pages from `fresh` on were never used, `recycled` lists those
    that came back, `extra` counts the owners of a page beyond the first.
    """

    def __init__(self, page_size, num_pages):
        self.page_size, self.num_pages = page_size, num_pages
        self.pool = None
        self.fresh = 0
        self.recycled = []
        self.extra = {}
        self.tables = {}
        self.counts = {}

    def open(self, seq):
        self.tables[seq] = np.empty(0, PAGE_NUMBER)
        self.counts[seq] = 0

    def count(self, seq):
        return self.counts[seq]

    def has_room(self, seq, n):
        """Whether `seq` can take n more rows."""
        new_pages = self._pages_for(self.counts[seq] + n) - len(self.tables[seq])
        return new_pages + self._writes_to_shared_page(seq) <= self._free_pages()

    def append(self, seq, rows):
        if self.pool is None:
            self.pool = np.zeros((self.num_pages, self.page_size, rows.shape[1]), np.uint8)
        start = self.counts[seq]
        if self._writes_to_shared_page(seq):
            self._copy_last_page(seq)
        new_pages = self._pages_for(start + len(rows)) - len(self.tables[seq])
        taken = [self._take_page() for _ in range(new_pages)]
        table = np.concatenate([self.tables[seq], np.array(taken, PAGE_NUMBER)])
        places = np.arange(start, start + len(rows))
        self.pool[table[places // self.page_size], places % self.page_size] = rows
        self.tables[seq] = table
        self.counts[seq] = start + len(rows)

    def read(self, seq):
        """All rows of `seq`, to be read only."""
        count = self.counts[seq]
        pages = self.pool[self.tables[seq]]
        return pages.reshape(-1, self.pool.shape[2])[:count]

    def can_fork(self, seq):
        return True

    def fork(self, seq, new):
        self.tables[new] = self.tables[seq].copy()
        self.counts[new] = self.counts[seq]
        for page in self.tables[seq].tolist():
            self.extra[page] = self.extra.get(page, 0) + 1

    def can_keep(self, seq, n):
        """Whether n rows fit into the free pages and those that only `seq` owns."""
        own = sum(page not in self.extra for page in self.tables[seq].tolist())
        return self._pages_for(n) <= self._free_pages() + own

    def keep(self, seq, indices):
        if self.counts[seq] == 0:
            return
        rows = self.read(seq)[indices]
        self.truncate(seq, 0)
        if len(rows):
            self.append(seq, rows)

    def truncate(self, seq, n):
        used = self._pages_for(n)
        self._release(self.tables[seq][used:].tolist())
        self.tables[seq] = self.tables[seq][:used].copy()
        self.counts[seq] = n

    def free(self, seq):
        self.truncate(seq, 0)
        del self.tables[seq], self.counts[seq]

    def nbytes(self):
        pool = 0 if self.pool is None else self.pool.nbytes
        tables = sum(table.nbytes for table in self.tables.values())
        return pool + tables + 8 * len(self.counts) + 8 * len(self.recycled) + 16 * len(self.extra)

    def _pages_for(self, n):
        return -(-n // self.page_size)

    def _free_pages(self):
        return self.num_pages - self.fresh + len(self.recycled)

    def _writes_to_shared_page(self, seq):
        """Whether the next row of `seq` goes to a page that another sequence owns, too."""
        partly_filled = self.counts[seq] % self.page_size != 0
        return partly_filled and int(self.tables[seq][-1]) in self.extra

    def _copy_last_page(self, seq):
        shared = int(self.tables[seq][-1])
        page = self._take_page()
        self.pool[page] = self.pool[shared]
        self._release([shared])
        self.tables[seq][-1] = page

    def _take_page(self):
        if self.recycled:
            return self.recycled.pop()
        self.fresh += 1
        return self.fresh - 1

    def _release(self, pages):
        """Give up one ownership of each page; a page without owners is free."""
        for page in pages:
            others = self.extra.pop(page, 0)
            if others == 0:
                self.recycled.append(page)
            elif others > 1:
                self.extra[page] = others - 1


class _Strips:
    """Rows of one layer in one growing buffer a sequence; room is counted by the row."""

    def __init__(self, num_rows):
        self.num_rows = num_rows
        self.buffers = {}
        self.counts = {}

    def open(self, seq):
        self.buffers[seq] = None
        self.counts[seq] = 0

    def count(self, seq):
        return self.counts[seq]

    def has_room(self, seq, n):
        """Whether `seq` can take n more rows."""
        return n <= self._free_rows()

    def append(self, seq, rows):
        start = self.counts[seq]
        stop = start + len(rows)
        buffer = self.buffers[seq]
        if buffer is None or stop > len(buffer):
            capacity = min(self.num_rows, max(stop, 3 * start // 2))
            grown = np.zeros((capacity, rows.shape[1]), np.uint8)
            if start:
                grown[:start] = buffer[:start]
            self.buffers[seq] = buffer = grown
        buffer[start:stop] = rows
        self.counts[seq] = stop

    def read(self, seq):
        """All rows of `seq`, to be read only."""
        return self.buffers[seq][: self.counts[seq]]

    def can_fork(self, seq):
        return self.counts[seq] <= self._free_rows()

    def fork(self, seq, new):
        self.open(new)
        if self.counts[seq]:
            self.buffers[new] = self.read(seq).copy()
            self.counts[new] = self.counts[seq]

    def can_keep(self, seq, n):
        return True

    def keep(self, seq, indices):
        if self.counts[seq]:
            self.buffers[seq] = self.read(seq)[indices]
            self.counts[seq] = len(indices)

    def truncate(self, seq, n):
        buffer = self.buffers[seq]
        if buffer is not None and len(buffer) > 2 * n:
            self.buffers[seq] = buffer[:n].copy()
        self.counts[seq] = n

    def free(self, seq):
        del self.buffers[seq], self.counts[seq]

    def nbytes(self):
        held = (buffer for buffer in self.buffers.values() if buffer is not None)
        return sum(buffer.nbytes for buffer in held) + 8 * len(self.counts)

    def _free_rows(self):
        return self.num_rows - sum(self.counts.values())


# ------------------------------------------------------------------------------- arguments


def _integer(name, value, low, high=None):
    """`value` as an int in [low, high), or TypeError / ValueError."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < low or (high is not None and value >= high):
        raise ValueError(f"{name} = {value} is out of range")
    return int(value)


def _real(name, value):
    """`value` as an exact number, or TypeError / ValueError."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if isinstance(value, Integral):
        return int(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite")
    return float(value)


def _floats(name, array, rank=3):
    """`array` as a float32 or float64 array of a rank, or TypeError / ValueError."""
    array = np.asarray(array)
    if array.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} must have rank {rank}, not {array.ndim}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _positions(indices, length):
    """`indices` as an int64 array of different positions below `length`."""
    array = indices if isinstance(indices, np.ndarray) else np.asarray(list(indices))
    if array.ndim != 1:
        raise ValueError("indices must be a flat sequence")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError("indices must be ints")
    if array.min() < 0 or array.max() >= length:
        raise ValueError(f"an index is not in [0, {length})")
    array = array.astype(np.int64)
    if len(np.unique(array)) < len(array):
        raise ValueError("indices must be different")
    return array


# ------------------------------------------------------------------------------- attention


def _attention(q, k, v, span):
    """Causal attention of q (n, H, D), the last n of the S positions of k and v (S, G, D).

    Works in float64 on at most `span` queries at a time; memory is linear in S.
    """
    n, num_heads, width = q.shape
    held, kv_heads = k.shape[:2]
    shared = num_heads // kv_heads  # query heads for each kv head
    first = held - n
    keys = k.transpose(1, 2, 0).astype(np.float64)
    values = v.transpose(1, 0, 2).astype(np.float64)
    out = np.empty((n, num_heads, width), q.dtype)

    span = min(span, max(1, SCORE_TILE // (num_heads * held)))
    for start in range(0, n, span):
        stop = min(start + span, n)
        size, seen = stop - start, first + stop
        queries = q[start:stop].astype(np.float64) * width**-0.5
        queries = queries.reshape(size, kv_heads, shared, width).transpose(1, 0, 2, 3)
        scores = queries.reshape(kv_heads, size * shared, width) @ keys[:, :, :seen]
        future = np.arange(seen) > np.arange(first + start, first + stop)[:, None]
        grid = scores.reshape(kv_heads, size, shared, seen)
        np.copyto(grid, -np.inf, where=future[:, None, :])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values[:, :seen] / scores.sum(axis=-1, keepdims=True)
        mixed = mixed.reshape(kv_heads, size, shared, width).transpose(1, 0, 2, 3)
        out[start:stop] = mixed.reshape(size, num_heads, width)
    return out


# ----------------------------------------------------------------------------------- cache


class KVCache:
    """Keys and values of many sequences; made by `make_cache`."""

    def __init__(self, rooms, num_kv_heads, head_dim, bits):
        self._rooms = rooms  # one for each layer
        self._heads, self._width, self._bits = num_kv_heads, head_dim, bits
        self._codec = None  # chosen with the dtype, by the first append
        self._live = set()
        self._next = 0

    def add(self):
        """A new, empty sequence."""
        seq = self._register()
        for room in self._rooms:
            room.open(seq)
        return seq

    def append(self, seq, layer, k, v):
        """Add the positions of k and v (n, G, D) to one layer."""
        room = self._room(seq, layer)
        k, v = self._checked_pair(k, v)
        if len(k) == 0:
            raise ValueError("nothing to append")
        codec = self._codec or self._make_codec(k.dtype)
        if codec.dtype != k.dtype:
            raise ValueError(f"this cache holds {codec.dtype}, not {k.dtype}")
        if not room.has_room(seq, len(k)):
            raise MemoryError(f"no room for {len(k)} positions")
        room.append(seq, codec.encode(k, v))
        self._codec = codec

    def attend(self, seq, layer, q):
        """Causal attention of q (n, H, D), the queries of the last n positions of a layer."""
        room = self._room(seq, layer)
        q = self._checked_queries(q)
        if len(q) > room.count(seq):
            raise ValueError(f"{len(q)} queries, but {room.count(seq)} positions")
        return self._attend(room, seq, q, span=len(q))

    def prefill(self, seq, layer, q, k, v, chunk):
        """Append k, v (T, G, D) and attend with q (T, H, D), `chunk` queries at a time.

        Everything is checked before the append, which is all or nothing, and nothing fails after it.
        """
        room = self._room(seq, layer)
        chunk = _integer("chunk", chunk, 1)
        q = self._checked_queries(q)
        k, v = self._checked_pair(k, v)
        if len(q) != len(k):
            raise ValueError(f"{len(q)} queries for {len(k)} positions")
        if len(k):
            self.append(seq, layer, k, v)
        return self._attend(room, seq, q, span=chunk)

    def view(self, seq, layer):
        """Copies of the keys and values (S, G, D) of a layer."""
        k, v = self._held(self._room(seq, layer), seq)
        return k.copy(), v.copy()

    def fork(self, seq):
        """A new, independent sequence with the same positions."""
        self._require(seq)
        if not all(room.can_fork(seq) for room in self._rooms):
            raise MemoryError("no room for a fork")
        new = self._register()
        for room in self._rooms:
            room.fork(seq, new)
        return new

    def keep(self, seq, indices):
        """Keep these positions, in this order, in every layer."""
        indices = _positions(indices, self.length(seq))
        if not all(room.can_keep(seq, len(indices)) for room in self._rooms):
            raise MemoryError("no room to unshare the positions kept")
        for room in self._rooms:
            room.keep(seq, indices)

    def truncate(self, seq, n):
        """Keep the first n positions of every layer."""
        n = _integer("n", n, 0, self.length(seq) + 1)
        for room in self._rooms:
            room.truncate(seq, n)

    def free(self, seq):
        """Forget a sequence."""
        self._require(seq)
        self._live.remove(seq)
        for room in self._rooms:
            room.free(seq)

    def length(self, seq):
        """Positions that are present in every layer."""
        self._require(seq)
        return min(room.count(seq) for room in self._rooms)

    def nbytes(self):
        """Bytes allocated for rows, page tables and counts."""
        return sum(room.nbytes() for room in self._rooms)

    def _register(self):
        seq = self._next
        self._next += 1
        self._live.add(seq)
        return seq

    def _require(self, seq):
        if seq not in self._live:
            raise KeyError(f"no sequence {seq!r}")

    def _room(self, seq, layer):
        self._require(seq)
        return self._rooms[_integer("layer", layer, 0, len(self._rooms))]

    def _make_codec(self, dtype):
        if self._bits is None:
            return _PlainCodec(self._heads, self._width, dtype)
        return _QuantCodec(self._heads, self._width, dtype, self._bits)

    def _held(self, room, seq):
        """k and v of a layer, to be read only."""
        if room.count(seq) == 0:
            empty = np.empty((0, self._heads, self._width), self._codec.dtype if self._codec else np.float32)
            return empty, empty
        return self._codec.decode(room.read(seq))

    def _attend(self, room, seq, q, span):
        if len(q) == 0:
            return np.empty(q.shape, q.dtype)
        k, v = self._held(room, seq)
        return _attention(q, k, v, span)

    def _checked_pair(self, k, v):
        k, v = _floats("k", k), _floats("v", v)
        if k.shape != v.shape or k.shape[1:] != (self._heads, self._width):
            raise ValueError(f"k {k.shape} and v {v.shape} must be (n, {self._heads}, {self._width})")
        if k.dtype != v.dtype:
            raise TypeError(f"k is {k.dtype}, v is {v.dtype}")
        return k, v

    def _checked_queries(self, q):
        q = _floats("q", q)
        if q.shape[2] != self._width or q.shape[1] == 0 or q.shape[1] % self._heads:
            raise ValueError(f"q {q.shape} must be (n, multiple of {self._heads}, {self._width})")
        return q


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind {kind!r}")
    num_layers = _integer("num_layers", num_layers, 1)
    num_kv_heads = _integer("num_kv_heads", num_kv_heads, 1)
    head_dim = _integer("head_dim", head_dim, 1)
    block_size = _integer("block_size", block_size, 1)
    num_blocks = _integer("num_blocks", num_blocks, 1)
    if "quantized" in kind:
        bits = _integer("bits", bits, 1)
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
    elif bits is not None:
        raise ValueError(f"a {kind} cache has no bits")
    if "paged" in kind:
        rooms = [_Pages(block_size, num_blocks) for _ in range(num_layers)]
    else:
        rooms = [_Strips(block_size * num_blocks) for _ in range(num_layers)]
    return KVCache(rooms, num_kv_heads, head_dim, bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    if not isinstance(cache, KVCache):
        raise TypeError("cache must come from make_cache")
    return cache.prefill(seq, layer, q, k, v, chunk)


# ----------------------------------------------------------------------------- max_context


def _share(utilization, gpu_bytes):
    """utilization * gpu_bytes; exact where the product is whole, else rounded as floats are."""
    exact = Fraction(utilization) * Fraction(gpu_bytes)
    return exact if exact.denominator == 1 else Fraction(utilization * gpu_bytes)


def _plain(number):
    """A Fraction as an int where it is whole, else as a float."""
    return int(number) if number.denominator == 1 else float(number)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    sizes = {}
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
        sizes[name] = _integer(name, spec[name], 1)
    utilization = _real("utilization", utilization)
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization {utilization} is not in (0, 1]")
    amounts = {"gpu_bytes": gpu_bytes, "weight_bytes": weight_bytes, "reserve_bytes": reserve_bytes}
    for name, value in amounts.items():
        amounts[name] = _real(name, value)
        if amounts[name] < 0:
            raise ValueError(f"{name} must not be negative")

    per_token = Fraction(2 * math.prod(sizes.values()), 8)
    usable = _share(utilization, amounts["gpu_bytes"])
    budget = usable - Fraction(amounts["weight_bytes"]) - Fraction(amounts["reserve_bytes"])
    tokens = max(0, math.floor(budget / per_token))
    return tokens, {"bytes_per_token": _plain(per_token), "budget_bytes": _plain(budget)}
