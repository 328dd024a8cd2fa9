"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

One position of one layer is one *record* of a structured NumPy dtype: the keys and values of all kv heads, as they are
or as codes and scales. The stores (`_DenseLayer`, `_PagedLayer`) move records and never look inside; only
`_RecordFormat` knows how a record is made and read. Hence copies on fork, copy-on-write and `keep` cannot requantise.
"""

import math
from array import array
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

_KINDS = {"dense": (False, False), "paged": (True, False), "quantized": (False, True), "paged_quantized": (True, True)}
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_SCORE_BUDGET = 1 << 19  # scores that exist at one time, if a single query has not more than that
_MAX_QUERY_BLOCK = 256


# ------------------------------------------------------------------ checks

def _is_int(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_int(value, name, low, high=None):
    if not _is_int(value):
        raise TypeError(f"{name} must be an int")
    value = int(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is out of range: {value}")
    return value


def _check_array(x, name, last_axis):
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array")
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32 or float64")
    if x.ndim != 3 or x.shape[2] != last_axis:
        raise ValueError(f"{name} must have rank 3 and a last axis of {last_axis}, not {x.shape}")


# ------------------------------------------------------------------ records

def _quantise(x, bits):
    """(codes, scales): symmetric, one scale for the last axis."""
    top = 2 ** (bits - 1) - 1
    scale = np.abs(x).max(axis=-1) / x.dtype.type(top)
    divisor = np.where(scale > 0, scale, 1)[..., None]
    codes = np.clip(np.rint(x / divisor), -top, top).astype(np.int8)
    if bits == 8:
        return codes, scale
    nibbles = (codes + 8).astype(np.uint8)
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.full_like(nibbles[..., :1], 8)], axis=-1)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scale


def _dequantise(codes, scale, bits, width, dtype):
    values = np.empty(codes.shape[:-1] + (width,), dtype)
    if bits == 8:
        values[...] = codes
    else:
        values[..., 0::2] = codes & 15
        values[..., 1::2] = (codes >> 4)[..., : width // 2]
        values -= 8
    values *= scale[..., None]
    return values


class _RecordFormat:
    """Keys and values <-> records."""

    def __init__(self, heads, width, bits, dtype):
        self.heads, self.width, self.bits, self.dtype = heads, width, bits, np.dtype(dtype)
        if bits is None:
            fields = [(name, self.dtype, (heads, width)) for name in "kv"]
        else:
            code, code_width = (np.int8, width) if bits == 8 else (np.uint8, (width + 1) // 2)
            fields = []
            for name in "kv":
                fields += [(name, code, (heads, code_width)), (name + "_scale", self.dtype, (heads,))]
        self.record = np.dtype(fields)

    def pack(self, k, v):
        records = np.empty(k.shape[0], self.record)
        for name, x in (("k", k), ("v", v)):
            if self.bits is None:
                records[name] = x
            else:
                records[name], records[name + "_scale"] = _quantise(x, self.bits)
        return records

    def unpack(self, records):
        if self.bits is None:
            return records["k"].copy(), records["v"].copy()
        return tuple(
            _dequantise(records[name], records[name + "_scale"], self.bits, self.width, self.dtype) for name in "kv"
        )


# ------------------------------------------------------------------ stores of one layer

class _DenseLayer:
    """One contiguous array of records a sequence; room is counted by the position."""

    def __init__(self, num_blocks, block_size):
        self.positions = num_blocks * block_size
        self.used = 0
        self.rows = {}  # seq -> array of records, maybe longer than the sequence
        self.count = {}  # seq -> positions

    def add(self, seq):
        self.rows[seq] = None
        self.count[seq] = 0

    def append(self, seq, records):
        start, n = self.count[seq], len(records)
        if self.used + n > self.positions:
            raise MemoryError("the pool is full")
        rows = self.rows[seq]
        capacity = 0 if rows is None else len(rows)
        if start + n > capacity:
            capacity = min(self.positions, max(start + n, capacity + capacity // 2))
            grown = np.empty(capacity, records.dtype)
            if start:
                grown[:start] = rows[:start]
            self.rows[seq] = rows = grown
        rows[start:start + n] = records
        self.count[seq] = start + n
        self.used += n

    def read(self, seq):
        return self.rows[seq][: self.count[seq]]

    def check_fork(self, seq):
        if self.used + self.count[seq] > self.positions:
            raise MemoryError("no room for the copy")

    def fork(self, seq, new):
        self.add(new)
        if self.count[seq]:
            self.rows[new] = self.read(seq).copy()
            self.count[new] = self.count[seq]
            self.used += self.count[seq]

    def check_keep(self, seq, indices):
        """Always possible: the records are packed where they are."""

    def keep(self, seq, indices):
        if self.count[seq]:
            self.rows[seq] = self.read(seq)[indices]
        self._set_count(seq, len(indices))

    def truncate(self, seq, n):
        self._set_count(seq, n)
        rows = self.rows[seq]
        if rows is not None and 2 * n < len(rows):
            self.rows[seq] = rows[:n].copy()

    def free(self, seq):
        self._set_count(seq, 0)
        del self.rows[seq], self.count[seq]

    def _set_count(self, seq, n):
        self.used += n - self.count[seq]
        self.count[seq] = n

    def nbytes(self):
        return sum(rows.nbytes for rows in self.rows.values() if rows is not None) + 8 * len(self.count)


class _PagedLayer:
    """Pages of records with counts of their owners; a page table a sequence; copy on write."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.pool = None  # records of all pages, one after the other; grows up to num_blocks pages
        self.owners = array("q")  # of each page that was ever used
        self.unused = array("q")  # pages given back
        self.tables = {}  # seq -> its pages; always ceil(count / block_size) of them
        self.count = {}

    def add(self, seq):
        self.tables[seq] = array("q")
        self.count[seq] = 0

    def append(self, seq, records):
        block, table, start, n = self.block_size, self.tables[seq], self.count[seq], len(records)
        tail = start % block
        copy_tail = tail > 0 and self.owners[table[-1]] > 1
        fresh = self._pages(start + n) - len(table) + copy_tail
        self._require(fresh)
        self._grow(fresh, records.dtype)
        if copy_tail:
            old, new = table[-1], self._take()
            self.pool[new * block: new * block + tail] = self.pool[old * block: old * block + tail]
            self._drop(old)
            table[-1] = new
        while len(table) < self._pages(start + n):
            table.append(self._take())
        self.pool[self._slots(table, start, start + n)] = records
        self.count[seq] = start + n

    def read(self, seq):
        return self.pool[self._slots(self.tables[seq], 0, self.count[seq])]

    def check_fork(self, seq):
        """Always possible: a fork shares its pages."""

    def fork(self, seq, new):
        self.tables[new] = self.tables[seq][:]
        self.count[new] = self.count[seq]
        for page in self.tables[new]:
            self.owners[page] += 1

    def check_keep(self, seq, indices):
        lead, need = self._keep_plan(indices)
        own = sum(self.owners[page] == 1 for page in self.tables[seq][lead:])
        self._require(need - own)

    def keep(self, seq, indices):
        block, table = self.block_size, self.tables[seq]
        lead, need = self._keep_plan(indices)
        moved = indices[lead * block:]
        if len(moved):
            records = self.read(seq)[moved]
        for page in table[lead:]:
            self._drop(page)
        del table[lead:]
        self.count[seq] = len(indices)
        if need:
            self._grow(need, self.pool.dtype)
            table.extend([self._take() for _ in range(need)])
            self.pool[self._slots(table, lead * block, len(indices))] = records

    def _keep_plan(self, indices):
        """(leading pages that stay as they are, pages to write anew)."""
        moves = np.flatnonzero(indices != np.arange(len(indices)))
        total = self._pages(len(indices))
        lead = int(moves[0]) // self.block_size if len(moves) else total
        return lead, total - lead

    def truncate(self, seq, n):
        table = self.tables[seq]
        for page in table[self._pages(n):]:
            self._drop(page)
        del table[self._pages(n):]
        self.count[seq] = n

    def free(self, seq):
        self.truncate(seq, 0)
        del self.tables[seq], self.count[seq]

    def nbytes(self):
        entries = len(self.owners) + len(self.unused) + len(self.count) + sum(map(len, self.tables.values()))
        return (0 if self.pool is None else self.pool.nbytes) + 8 * entries

    def _pages(self, positions):
        return -(-positions // self.block_size)

    def _slots(self, table, start, stop):
        positions = np.arange(start, stop)
        pages = np.array(table, dtype=np.int64)
        return pages[positions // self.block_size] * self.block_size + positions % self.block_size

    def _require(self, pages):
        if pages > self.num_blocks - len(self.owners) + len(self.unused):
            raise MemoryError("no page is free")

    def _grow(self, pages, record):
        """Storage for that many more pages."""
        have = 0 if self.pool is None else len(self.pool) // self.block_size
        need = len(self.owners) + max(0, pages - len(self.unused))
        if need > have:
            target = min(self.num_blocks, max(need, 2 * have))
            grown = np.zeros(target * self.block_size, record)
            if have:
                grown[: have * self.block_size] = self.pool
            self.pool = grown

    def _take(self):
        if self.unused:
            page = self.unused.pop()
            self.owners[page] = 1
        else:
            page = len(self.owners)
            self.owners.append(1)
        return page

    def _drop(self, page):
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.unused.append(page)


# ------------------------------------------------------------------ the cache

class KVCache:
    """See prompt.md; made by `make_cache`."""

    def __init__(self, layer_type, num_layers, heads, width, block_size, num_blocks, bits):
        self._heads, self._width, self._bits = heads, width, bits
        self._layers = [layer_type(num_blocks, block_size) for _ in range(num_layers)]
        self._sequences = set()
        self._next = 0
        self._format = None  # known with the first append

    def add(self):
        seq = self._new_number()
        for layer in self._layers:
            layer.add(seq)
        return seq

    def append(self, seq, layer, k, v):
        store = self._store(seq, layer)
        self._check_rows(k, v)
        if not len(k):
            return
        form = self._format or _RecordFormat(self._heads, self._width, self._bits, k.dtype)
        store.append(seq, form.pack(k, v))
        self._format = form

    def attend(self, seq, layer, q):
        store = self._store(seq, layer)
        self._check_queries(q)
        if len(q) > store.count[seq]:
            raise ValueError("more queries than positions")
        if not len(q):
            return np.empty(q.shape, q.dtype)
        k, v = self.view(seq, layer)
        return _causal_attention(q, k, v)

    def view(self, seq, layer):
        store = self._store(seq, layer)
        if not store.count[seq]:
            dtype = self._format.dtype if self._format else np.float32
            return tuple(np.empty((0, self._heads, self._width), dtype) for _ in "kv")
        return self._format.unpack(store.read(seq))

    def fork(self, seq):
        self._check_seq(seq)
        for layer in self._layers:
            layer.check_fork(seq)
        new = self._new_number()
        for layer in self._layers:
            layer.fork(seq, new)
        return new

    def keep(self, seq, indices):
        length = self.length(seq)
        indices = [_check_int(i, "an index", 0, length - 1) for i in indices]
        if len(set(indices)) < len(indices):
            raise ValueError("indices must be different")
        indices = np.array(indices, dtype=np.int64)
        for layer in self._layers:
            layer.check_keep(seq, indices)
        for layer in self._layers:
            layer.keep(seq, indices)

    def truncate(self, seq, n):
        n = _check_int(n, "n", 0, self.length(seq))
        for layer in self._layers:
            layer.truncate(seq, n)

    def free(self, seq):
        self._check_seq(seq)
        for layer in self._layers:
            layer.free(seq)
        self._sequences.remove(seq)

    def length(self, seq):
        self._check_seq(seq)
        return min(layer.count[seq] for layer in self._layers)

    def nbytes(self):
        return sum(layer.nbytes() for layer in self._layers)

    def _new_number(self):
        seq = self._next
        self._next += 1
        self._sequences.add(seq)
        return seq

    def _check_seq(self, seq):
        if not _is_int(seq) or seq not in self._sequences:
            raise KeyError(seq)

    def _store(self, seq, layer):
        self._check_seq(seq)
        return self._layers[_check_int(layer, "layer", 0, len(self._layers) - 1)]

    def _check_dtype(self, dtype):
        if self._format and dtype != self._format.dtype:
            raise TypeError(f"this cache holds {self._format.dtype}, not {dtype}")

    def _check_rows(self, k, v):
        _check_array(k, "k", self._width)
        _check_array(v, "v", self._width)
        if k.dtype != v.dtype:
            raise TypeError("k and v have different dtypes")
        if k.shape != v.shape or k.shape[1] != self._heads:
            raise ValueError(f"k {k.shape} and v {v.shape} do not fit {self._heads} kv heads")
        self._check_dtype(k.dtype)

    def _check_queries(self, q):
        _check_array(q, "q", self._width)
        if q.shape[1] < 1 or q.shape[1] % self._heads:
            raise ValueError("the query heads are not a multiple of the kv heads")
        self._check_dtype(q.dtype)


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"unknown kind: {kind!r}")
    paged, quantised = _KINDS[kind]
    if quantised and (not _is_int(bits) or bits not in (4, 8)):
        raise ValueError("a quantised cache needs bits 8 or 4")
    if not quantised and bits is not None:
        raise ValueError("bits is for quantised caches")
    return KVCache(
        _PagedLayer if paged else _DenseLayer,
        _check_int(num_layers, "num_layers", 1),
        _check_int(num_kv_heads, "num_kv_heads", 1),
        _check_int(head_dim, "head_dim", 1),
        _check_int(block_size, "block_size", 1),
        _check_int(num_blocks, "num_blocks", 1),
        None if bits is None else int(bits),
    )


# ------------------------------------------------------------------ attention

def _causal_attention(q, k, v, max_block=_MAX_QUERY_BLOCK):
    """Attention of q, the last len(q) positions of k and v, a few queries at a time."""
    n, heads, width = q.shape
    total, kv_heads = k.shape[:2]
    group = heads // kv_heads
    keys = k.transpose(1, 2, 0)  # (G, D, S)
    values = v.transpose(1, 0, 2)  # (G, S, D)
    out = np.empty((n, heads, width), q.dtype)
    block = max(1, min(max_block, _MAX_QUERY_BLOCK, _SCORE_BUDGET // (heads * total)))
    scale = q.dtype.type(1 / math.sqrt(width))
    for start in range(0, n, block):
        stop = min(start + block, n)
        rows = stop - start
        first = total - n + start  # position of the first query of the block
        seen = first + rows
        part = (q[start:stop] * scale).reshape(rows, kv_heads, group, width)
        part = part.transpose(1, 2, 0, 3).reshape(kv_heads, group * rows, width)
        scores = np.matmul(part, keys[:, :, :seen])
        hidden = np.arange(first, seen) > np.arange(first, seen)[:, None]
        scores.reshape(kv_heads, group, rows, seen)[..., first:][..., hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total_weight = scores.sum(axis=-1, keepdims=True)
        mixed = np.matmul(scores, values[:, :seen]) / total_weight
        mixed = mixed.reshape(kv_heads, group, rows, width).transpose(2, 0, 1, 3)
        out[start:stop] = mixed.reshape(rows, heads, width)
    return out


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time.

    The records go in with one `append`, which either has room for all of them or raises and changes nothing.
    """
    if not isinstance(cache, KVCache):
        raise TypeError("cache must come from make_cache")
    cache._store(seq, layer)
    cache._check_rows(k, v)
    cache._check_queries(q)
    if q.dtype != k.dtype:
        raise TypeError("q and k have different dtypes")
    if len(q) != len(k):
        raise ValueError("q and k have different lengths")
    chunk = _check_int(chunk, "chunk", 1)
    if not len(q):
        return np.empty(q.shape, q.dtype)
    cache.append(seq, layer, k, v)
    return _causal_attention(q, *cache.view(seq, layer), max_block=chunk)


# ------------------------------------------------------------------ how much fits

def _exact(value, name):
    """A finite number as a Fraction; a float counts as the decimal number it is written as."""
    if _is_int(value):
        return Fraction(int(value))
    if isinstance(value, Fraction):
        return value
    if not isinstance(value, (float, np.floating)):
        raise TypeError(f"{name} must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite")
    return Fraction(repr(float(value)))


def _plain(value):
    return int(value) if value.denominator == 1 else float(value)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    factors = []
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
        factors.append(_check_int(spec[name], name, 1))
    share = _exact(utilization, "utilization")
    if not 0 < share <= 1:
        raise ValueError("utilization must be in (0, 1]")
    gpu, weights, reserve = (
        _exact(value, name)
        for value, name in ((gpu_bytes, "gpu_bytes"), (weight_bytes, "weight_bytes"), (reserve_bytes, "reserve_bytes"))
    )
    if min(gpu, weights, reserve) < 0:
        raise ValueError("bytes cannot be negative")
    per_token = Fraction(2 * math.prod(factors), 8)
    budget = share * gpu - weights - reserve
    tokens = max(0, math.floor(budget / per_token))
    terms = {
        "bytes_per_token": _plain(per_token),
        "budget_bytes": _plain(budget),
        "usable_bytes": _plain(share * gpu),
        "weight_bytes": _plain(weights),
        "reserve_bytes": _plain(reserve),
    }
    return tokens, terms
