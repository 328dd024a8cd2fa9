"""KV caches: dense, paged, quantised; chunked prefill; maximal context. See prompt.md.

A cache is one store for every layer and one codec for all of them. The codec turns positions of keys
and values, stacked to (n, 2, G, D), into columns: arrays with one row a position. A store keeps columns
for many sequences and knows nothing of what they mean; it never alters a row that it was given. Every
store operation that may run out of room has a check of its own, so the cache asks all layers first and
touches them afterwards.
"""

from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral, Real

import numpy as np

FLOAT_TYPES = (np.float32, np.float64)
SCORE_ELEMENTS = 1 << 18  # scores that attention holds at a time


# Codecs


class RawCodec:
    """Keeps rows as they are: one column."""

    def encode(self, rows):
        return (rows,)

    def decode(self, columns, dtype):
        return columns[0].astype(dtype, copy=False)


class IntegerCodec:
    """Signed integers of 8 or 4 bits with one float32 scale for the D elements of a row: two columns."""

    def __init__(self, bits, width):
        self.bits = bits
        self.width = width
        self.top = 2 ** (bits - 1) - 1

    def encode(self, rows):
        largest = np.abs(rows).max(axis=-1)
        scales = (largest / self.top).astype(np.float32)
        divisors = np.where(scales > 0, scales, 1).astype(np.float64)
        codes = np.rint(rows / divisors[..., None]).clip(-self.top, self.top).astype(np.int8)
        return self.pack(codes), scales

    def decode(self, columns, dtype):
        packed, scales = columns
        return self.unpack(packed).astype(dtype) * scales[..., None].astype(dtype)

    def pack(self, codes):
        if self.bits == 8:
            return codes
        if self.width % 2:
            codes = np.concatenate((codes, np.zeros_like(codes[..., :1])), axis=-1)
        nibbles = (codes + self.top).astype(np.uint8)
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)

    def unpack(self, packed):
        if self.bits == 8:
            return packed
        nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
        return nibbles[..., : self.width].astype(np.int8) - self.top


# Stores: the rows of one layer


class ContiguousStore:
    """One array per sequence and column, exactly as long as the sequence."""

    def __init__(self, positions):
        self.vacant = positions
        self.columns = {}

    def add(self, seq):
        self.columns[seq] = ()

    def length(self, seq):
        columns = self.columns[seq]
        return len(columns[0]) if columns else 0

    def read(self, seq):
        return tuple(column.copy() for column in self.columns[seq])

    def check_append(self, seq, count):
        if count > self.vacant:
            raise MemoryError(f"{count} positions needed, {self.vacant} vacant")

    def append(self, seq, columns):
        old = self.columns[seq] or tuple(column[:0] for column in columns)
        self._replace(seq, tuple(np.concatenate(pair) for pair in zip(old, columns)))

    def check_fork(self, seq):
        self.check_append(seq, self.length(seq))

    def fork(self, seq, twin):
        self.add(twin)
        self._replace(twin, self.read(seq))

    def check_keep(self, seq, count):
        """Never needs room: no sequence shares anything here."""

    def keep(self, seq, indices):
        self._replace(seq, tuple(column[indices] for column in self.columns[seq]))

    def truncate(self, seq, count):
        self._replace(seq, tuple(column[:count].copy() for column in self.columns[seq]))

    def free(self, seq):
        self._replace(seq, ())
        del self.columns[seq]

    def nbytes(self):
        rows = sum(column.nbytes for columns in self.columns.values() for column in columns)
        return rows + 16 * len(self.columns)

    def _replace(self, seq, columns):
        before = self.length(seq)
        self.columns[seq] = columns
        self.vacant += before - self.length(seq)


class PagedStore:
    """A pool of pages, a table of page numbers per sequence, and a count of users per page."""

    def __init__(self, page_size, num_pages):
        self.page_size = page_size
        self.users = np.zeros(num_pages, dtype=np.int32)
        self.pool = ()
        self.tables = {}
        self.lengths = {}

    def add(self, seq):
        self.tables[seq] = np.empty(0, dtype=np.int64)
        self.lengths[seq] = 0

    def length(self, seq):
        return self.lengths[seq]

    def read(self, seq):
        slots = self._slots(seq, 0, self.lengths[seq])
        return tuple(column[slots] for column in self.pool)

    def check_append(self, seq, count):
        needed = self._pages_for(self.lengths[seq] + count) - len(self.tables[seq])
        needed += self._tail_is_shared(seq)
        self._check_vacant(needed, self._vacant_pages())

    def append(self, seq, columns):
        self._allocate_pool(columns)
        if self._tail_is_shared(seq):
            self._make_tail_private(seq)
        start = self.lengths[seq]
        stop = start + len(columns[0])
        fresh = self._take(self._pages_for(stop) - len(self.tables[seq]))
        self.tables[seq] = np.concatenate((self.tables[seq], fresh))
        self.lengths[seq] = stop
        slots = self._slots(seq, start, stop)
        for column, rows in zip(self.pool, columns):
            column[slots] = rows

    def check_fork(self, seq):
        """Never needs room: a fork shares all its pages."""

    def fork(self, seq, twin):
        self.tables[twin] = self.tables[seq].copy()
        self.lengths[twin] = self.lengths[seq]
        self.users[self.tables[twin]] += 1

    def check_keep(self, seq, count):
        own = np.count_nonzero(self.users[self.tables[seq]] == 1)
        self._check_vacant(self._pages_for(count), self._vacant_pages() + own)

    def keep(self, seq, indices):
        slots = self._slots(seq, 0, self.lengths[seq])[indices]
        columns = tuple(column[slots] for column in self.pool)
        self.truncate(seq, 0)
        if len(indices):
            self.append(seq, columns)

    def truncate(self, seq, count):
        pages = self._pages_for(count)
        self.users[self.tables[seq][pages:]] -= 1
        self.tables[seq] = self.tables[seq][:pages].copy()
        self.lengths[seq] = count

    def free(self, seq):
        self.truncate(seq, 0)
        del self.tables[seq], self.lengths[seq]

    def nbytes(self):
        rows = sum(column.nbytes for column in self.pool)
        tables = sum(table.nbytes for table in self.tables.values())
        return rows + tables + self.users.nbytes + 16 * len(self.tables)

    def _pages_for(self, positions):
        return -(-positions // self.page_size)

    def _vacant_pages(self):
        return np.count_nonzero(self.users == 0)

    def _check_vacant(self, needed, vacant):
        if needed > vacant:
            raise MemoryError(f"{needed} pages needed, {vacant} vacant")

    def _slots(self, seq, start, stop):
        """Where the positions start..stop-1 of a sequence lie in the pool."""
        pages, offsets = np.divmod(np.arange(start, stop), self.page_size)
        return self.tables[seq][pages] * self.page_size + offsets

    def _tail_is_shared(self, seq):
        """Whether the next position falls into a page that another sequence uses, too."""
        if self.lengths[seq] % self.page_size == 0:
            return False
        return bool(self.users[self.tables[seq][-1]] > 1)

    def _make_tail_private(self, seq):
        (page,) = self._take(1)
        shared = self.tables[seq][-1]
        for column in self.pool:
            pages = column.reshape(-1, self.page_size, *column.shape[1:])
            pages[page] = pages[shared]
        self.users[shared] -= 1
        self.tables[seq][-1] = page

    def _take(self, count):
        pages = np.flatnonzero(self.users == 0)[:count]
        self.users[pages] = 1
        return pages

    def _allocate_pool(self, columns):
        if not self.pool:
            slots = len(self.users) * self.page_size
            self.pool = tuple(np.empty((slots, *column.shape[1:]), column.dtype) for column in columns)


# The cache


class Cache:
    """Keys and values of many sequences. See `make_cache`."""

    def __init__(self, stores, codec, num_kv_heads, head_dim):
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._stores = stores
        self._codec = codec
        self._dtype = None
        self._live = set()
        self._next_seq = 0

    def add(self):
        seq = self._new_seq()
        for store in self._stores:
            store.add(seq)
        return seq

    def append(self, seq, layer, k, v):
        store = self._store(seq, layer)
        k, v = self.check_rows(k, v)
        if not len(k):
            raise ValueError("append needs at least one position")
        if self._dtype is not None and self._dtype != k.dtype:
            raise TypeError(f"this cache holds {self._dtype}, not {k.dtype}")
        store.check_append(seq, len(k))
        columns = self._codec.encode(np.stack((k, v), axis=1))
        store.append(seq, columns)
        self._dtype = k.dtype

    def attend(self, seq, layer, q):
        store = self._store(seq, layer)
        q = self.check_queries(q)
        if len(q) > store.length(seq):
            raise ValueError(f"{len(q)} queries, but only {store.length(seq)} positions")
        k, v = self.view(seq, layer)
        return causal_attention(q, head_major(k), head_major(v))

    def view(self, seq, layer):
        store = self._store(seq, layer)
        dtype = self._dtype or np.dtype(np.float32)
        if not store.length(seq):
            empty = np.empty((0, self.num_kv_heads, self.head_dim), dtype)
            return empty, empty.copy()
        rows = self._codec.decode(store.read(seq), dtype)
        return rows[:, 0], rows[:, 1]

    def fork(self, seq):
        self._check_seq(seq)
        for store in self._stores:
            store.check_fork(seq)
        twin = self._new_seq()
        for store in self._stores:
            store.fork(seq, twin)
        return twin

    def keep(self, seq, indices):
        indices = self._check_indices(indices, self.length(seq))
        for store in self._stores:
            store.check_keep(seq, len(indices))
        for store in self._stores:
            store.keep(seq, indices)

    def truncate(self, seq, n):
        length = self.length(seq)
        if not is_int(n) or not 0 <= n <= length:
            raise ValueError(f"n must be an int in [0, {length}], not {n!r}")
        for store in self._stores:
            store.truncate(seq, int(n))

    def free(self, seq):
        self._check_seq(seq)
        for store in self._stores:
            store.free(seq)
        self._live.remove(seq)

    def length(self, seq):
        self._check_seq(seq)
        return min(store.length(seq) for store in self._stores)

    def nbytes(self):
        return int(sum(store.nbytes() for store in self._stores))

    def check_rows(self, k, v):
        """k and v as arrays, once they are known to be (n, G, D) of one dtype."""
        k, v = float_array("k", k), float_array("v", v)
        if k.dtype != v.dtype:
            raise TypeError(f"k is {k.dtype}, but v is {v.dtype}")
        if k.shape != v.shape or k.ndim != 3 or k.shape[1:] != (self.num_kv_heads, self.head_dim):
            raise ValueError(
                f"k and v must be (n, {self.num_kv_heads}, {self.head_dim}), not {k.shape} and {v.shape}"
            )
        return k, v

    def check_queries(self, q):
        """q as an array, once it is known to be (n, H, D) with H a multiple of G."""
        q = float_array("q", q)
        if q.ndim != 3 or q.shape[2] != self.head_dim:
            raise ValueError(f"q must be (n, H, {self.head_dim}), not {q.shape}")
        if q.shape[1] == 0 or q.shape[1] % self.num_kv_heads:
            raise ValueError(f"{q.shape[1]} query heads do not share {self.num_kv_heads} kv heads")
        return q

    def positions(self, seq, layer):
        """How many positions one layer holds."""
        return self._store(seq, layer).length(seq)

    def _new_seq(self):
        seq = self._next_seq
        self._next_seq += 1
        self._live.add(seq)
        return seq

    def _check_seq(self, seq):
        if seq not in self._live:
            raise KeyError(seq)

    def _store(self, seq, layer):
        self._check_seq(seq)
        if not is_int(layer) or not 0 <= layer < len(self._stores):
            raise ValueError(f"layer must be an int in [0, {len(self._stores)}), not {layer!r}")
        return self._stores[layer]

    def _check_indices(self, indices, length):
        indices = np.asarray(indices)
        if indices.ndim != 1:
            raise ValueError(f"indices must have rank 1, not {indices.ndim}")
        if not indices.size:
            return np.empty(0, dtype=np.int64)
        if not np.issubdtype(indices.dtype, np.integer):
            raise TypeError(f"indices must be ints, not {indices.dtype}")
        if indices.min() < 0 or indices.max() >= length:
            raise ValueError(f"indices must lie in [0, {length})")
        if len(np.unique(indices)) != len(indices):
            raise ValueError("indices must be different")
        return indices.astype(np.int64)


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind {kind!r}")
    sizes = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "num_blocks": num_blocks,
    }
    for name, size in sizes.items():
        check_positive_int(name, size)

    if kind.endswith("quantized"):
        if not is_int(bits) or bits not in (4, 8):
            raise ValueError(f"a quantised cache needs bits 8 or 4, not {bits!r}")
        codec = IntegerCodec(int(bits), head_dim)
    else:
        if bits is not None:
            raise ValueError(f"a {kind} cache takes no bits, not {bits!r}")
        codec = RawCodec()

    if kind.startswith("paged"):
        stores = [PagedStore(block_size, num_blocks) for _ in range(num_layers)]
    else:
        stores = [ContiguousStore(block_size * num_blocks) for _ in range(num_layers)]
    return Cache(stores, codec, num_kv_heads, head_dim)


# Attention


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time.

    All positions are appended first, so that running out of room leaves nothing behind. The chunks are
    those of the queries; each sees the keys up to its own last position.
    """
    before = cache.positions(seq, layer)
    k, v = cache.check_rows(k, v)
    q = cache.check_queries(q)
    if len(q) != len(k):
        raise ValueError(f"{len(q)} queries for {len(k)} positions")
    check_positive_int("chunk", chunk)
    out = np.empty(q.shape, q.dtype)
    if not len(q):
        return out

    cache.append(seq, layer, k, v)
    keys, values = map(head_major, cache.view(seq, layer))
    for start in range(0, len(q), chunk):
        stop = min(start + chunk, len(q))
        seen = before + stop
        out[start:stop] = causal_attention(q[start:stop], keys[:, :seen], values[:, :seen])
    return out


def head_major(rows):
    """(S, G, D) as (G, S, D) in float64."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2), dtype=np.float64)


def causal_attention(q, keys, values):
    """Attention (n, H, D) of the queries of the last n positions over keys and values (G, S, D)."""
    count, heads, width = q.shape
    groups, positions, _ = keys.shape
    out = np.empty(q.shape, q.dtype)
    step = max(1, SCORE_ELEMENTS // max(1, heads * positions))
    for start in range(0, count, step):
        stop = min(start + step, count)
        first = positions - count + start  # the position of query `start`
        seen = positions - count + stop
        block = q[start:stop].reshape(stop - start, groups, -1, width).transpose(1, 2, 0, 3)
        scores = block.astype(np.float64) @ keys[:, None, :seen].swapaxes(-1, -2)
        scores *= width**-0.5
        future = np.arange(seen) > np.arange(first, seen)[:, None]
        scores[..., future] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights @ values[:, None, :seen]
        out[start:stop] = mixed.transpose(2, 0, 1, 3).reshape(stop - start, heads, width)
    return out


# Capacity


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError(f"spec must be a mapping, not {type(spec).__name__}")
    bits_per_token = 2
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
        check_positive_int(name, spec[name])
        bits_per_token *= int(spec[name])
    utilization = plain_number("utilization", utilization)
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization must lie in (0, 1], not {utilization}")
    usable = Fraction(utilization * byte_count("gpu_bytes", gpu_bytes))
    weights = Fraction(byte_count("weight_bytes", weight_bytes))
    reserve = Fraction(byte_count("reserve_bytes", reserve_bytes))

    budget = usable - weights - reserve
    tokens = max(0, 8 * budget // bits_per_token)
    return tokens, {"bytes_per_token": bits_per_token / 8, "budget_bytes": float(budget)}


# Checks


def is_int(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_positive_int(name, value):
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, not {value!r}")


def plain_number(name, value):
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return int(value) if is_int(value) else float(value)


def byte_count(name, value):
    value = plain_number(name, value)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, not {value}")
    return value


def float_array(name, values):
    array = np.asarray(values)
    if array.dtype.type not in FLOAT_TYPES:
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    return array
