"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

One design serves all kinds: a layer is a flat pool of slots, a sequence a table of pages of
it. In the dense kinds a page is a single position.
"""

import operator
from fractions import Fraction

import numpy as np

_QUERY_ROWS = 64


def _int(name, value, low, high=None):
    """`value` as an int in [low, high], or an error."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int")
    value = operator.index(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} = {value} is out of range")
    return value


def _floats(name, array):
    """`array` as an array (n, heads, width) of float32 or float64, or an error."""
    array = np.asarray(array)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if array.ndim != 3:
        raise ValueError(f"{name} must have 3 axes, not {array.ndim}")
    return array


def _encode(rows, bits):
    """Codes and scales of rows (..., D)."""
    limit = 2 ** (bits - 1) - 1
    scale = (np.abs(rows).max(axis=-1) / limit).astype(np.float32)
    divisor = np.where(scale > 0, scale, 1)[..., None].astype(rows.dtype)
    codes = np.clip(np.rint(rows / divisor), -limit, limit).astype(np.int8)
    if bits == 8:
        return codes, scale
    nibbles = (codes + 8).astype(np.uint8)
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.full_like(nibbles[..., :1], 8)], axis=-1)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scale


def _decode(codes, scale, bits, width, dtype):
    """The rows (..., width) behind codes and scales."""
    if bits == 4:
        pairs = np.stack([codes & 15, codes >> 4], axis=-1)
        codes = pairs.reshape(*codes.shape[:-1], -1)[..., :width].astype(np.int8) - 8
    return codes.astype(dtype) * scale[..., None].astype(dtype)


def _attention(q, k, v):
    """Causal attention of q (n,H,D), the last n of the positions of k and v (S,G,D)."""
    n, heads, width = q.shape
    total, groups = k.shape[:2]
    per = heads // groups
    out = np.empty(q.shape, q.dtype)
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    for a in range(0, n, _QUERY_ROWS):
        b = min(a + _QUERY_ROWS, n)
        seen = total - n + b
        rows = (q[a:b] * width**-0.5).reshape(b - a, groups, per, width).transpose(1, 2, 0, 3)
        scores = rows.reshape(groups, -1, width) @ keys[:, :, :seen]
        grid = scores.reshape(groups, per, b - a, seen)
        grid[..., np.arange(seen) > np.arange(total - n + a, seen)[:, None]] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values[:, :seen] / scores.sum(axis=-1, keepdims=True)
        out[a:b] = (
            mixed.reshape(groups, per, b - a, width)
            .transpose(2, 0, 1, 3)
            .reshape(b - a, heads, width)
        )
    return out


class _Layer:
    """The pool of one layer: arrays over slots, the free pages, extra owners of a page."""

    def __init__(self, pages):
        self.arrays = None
        self.free = list(range(pages))[::-1]
        self.extra = {}

    def take(self, count):
        """`count` free pages; the caller knows that they are there."""
        return np.array([self.free.pop() for _ in range(count)], np.int32)

    def share(self, pages):
        for page in pages.tolist():
            self.extra[page] = self.extra.get(page, 0) + 1

    def release(self, pages):
        for page in pages.tolist():
            owners = self.extra.pop(page, 0)
            if owners == 0:
                self.free.append(page)
            elif owners > 1:
                self.extra[page] = owners - 1

    def owned(self, pages):
        """How many of the pages have no other owner."""
        return sum(page not in self.extra for page in pages.tolist())

    def nbytes(self):
        rows = sum(a.nbytes for a in self.arrays) if self.arrays else 0
        return rows + 8 * len(self.free) + 16 * len(self.extra)


class Cache:
    """Keys and values of many sequences: for each a [page table, length] per layer."""

    def __init__(self, layers, heads, width, page, pages, bits):
        self.heads, self.width, self.page, self.bits = heads, width, page, bits
        self.dtype = None
        self.layers = [_Layer(pages) for _ in range(layers)]
        self.slots = page * pages
        self.seqs = {}
        self.next = 0

    def _seq(self, seq):
        if seq not in self.seqs:
            raise KeyError(seq)
        return self.seqs[seq]

    def _at(self, seq, layer):
        tracks = self._seq(seq)
        layer = _int("layer", layer, 0, len(self.layers) - 1)
        return self.layers[layer], tracks[layer]

    def _where(self, table, positions):
        """The slots of positions."""
        return table[positions // self.page].astype(np.intp) * self.page + positions % self.page

    def _pages(self, n):
        return -(-n // self.page)

    def _check_kv(self, k, v):
        k, v = _floats("k", k), _floats("v", v)
        if k.shape != v.shape or k.shape[1:] != (self.heads, self.width):
            raise ValueError(f"k {k.shape} and v {v.shape} must be (n, {self.heads}, {self.width})")
        if k.dtype != v.dtype or self.dtype not in (None, k.dtype):
            raise TypeError("all arrays of a cache have one dtype")
        return k, v

    def _check_q(self, q):
        q = _floats("q", q)
        if q.shape[2] != self.width or q.shape[1] == 0 or q.shape[1] % self.heads:
            raise ValueError(
                f"q {q.shape} does not fit {self.heads} kv heads of width {self.width}"
            )
        if self.dtype not in (None, q.dtype):
            raise TypeError("all arrays of a cache have one dtype")
        return q

    def _reserve(self, pool, dtype):
        """Allocate the arrays of a layer on its first use."""
        if pool.arrays is None:
            head = (self.slots, 2, self.heads)
            if self.bits is None:
                pool.arrays = [np.empty((*head, self.width), dtype)]
            else:
                packed = -(-self.width * self.bits // 8)
                kind = np.int8 if self.bits == 8 else np.uint8
                pool.arrays = [np.empty((*head, packed), kind), np.empty(head, np.float32)]

    def add(self):
        seq = self.next
        self.next += 1
        self.seqs[seq] = [[np.empty(0, np.int32), 0] for _ in self.layers]
        return seq

    def append(self, seq, layer, k, v):
        pool, track = self._at(seq, layer)
        k, v = self._check_kv(k, v)
        table, length = track
        n = len(k)
        if n == 0:
            raise ValueError("append needs at least one position")
        tail = length % self.page
        split = tail > 0 and int(table[-1]) in pool.extra
        need = self._pages(length + n) - len(table) + split
        if need > len(pool.free):
            raise MemoryError("no room in the pool")
        rows = np.stack([k, v], axis=1)
        parts = [rows] if self.bits is None else _encode(rows, self.bits)
        self._reserve(pool, k.dtype)
        self.dtype = k.dtype
        fresh = pool.take(need)
        if split:
            old, new = int(table[-1]) * self.page, int(fresh[0]) * self.page
            for array in pool.arrays:
                array[new : new + tail] = array[old : old + tail]
            pool.release(table[-1:])
            table = table[:-1]
        table = np.concatenate([table, fresh])
        slots = self._where(table, np.arange(length, length + n))
        for array, part in zip(pool.arrays, parts, strict=False):
            array[slots] = part
        track[:] = table, length + n

    def view(self, seq, layer):
        pool, (table, length) = self._at(seq, layer)
        if length == 0:
            empty = np.zeros((2, 0, self.heads, self.width), self.dtype or np.float32)
            return empty[0], empty[1]
        slots = self._where(table, np.arange(length))
        rows = [array[slots] for array in pool.arrays]
        both = rows[0] if self.bits is None else _decode(*rows, self.bits, self.width, self.dtype)
        return both[:, 0], both[:, 1]

    def attend(self, seq, layer, q):
        _, (_, length) = self._at(seq, layer)
        q = self._check_q(q)
        if len(q) > length:
            raise ValueError(f"{len(q)} queries, but {length} positions")
        return _attention(q, *self.view(seq, layer))

    def fork(self, seq):
        tracks = self._seq(seq)
        for pool, (table, _) in zip(self.layers, tracks, strict=False):
            pool.share(table)
        new = self.add()
        self.seqs[new] = [[table.copy(), length] for table, length in tracks]
        return new

    def length(self, seq):
        return min(length for _, length in self._seq(seq))

    def keep(self, seq, indices):
        tracks = self._seq(seq)
        present = self.length(seq)
        chosen = [_int("index", i, 0, present - 1) for i in indices]
        if len(set(chosen)) != len(chosen):
            raise ValueError("indices must be different")
        need = self._pages(len(chosen))
        for pool, (table, _) in zip(self.layers, tracks, strict=False):
            if need > len(pool.free) + pool.owned(table):
                raise MemoryError("no room in the pool")
        order = np.array(chosen, np.intp)
        for pool, track in zip(self.layers, tracks, strict=False):
            table = track[0]
            slots = self._where(table, order)
            rows = [array[slots] for array in pool.arrays or ()]
            pool.release(table)
            table = pool.take(need)
            slots = self._where(table, np.arange(len(order)))
            for array, part in zip(pool.arrays or (), rows, strict=False):
                array[slots] = part
            track[:] = table, len(order)

    def truncate(self, seq, n):
        tracks = self._seq(seq)
        n = _int("n", n, 0, self.length(seq))
        pages = self._pages(n)
        for pool, track in zip(self.layers, tracks, strict=False):
            pool.release(track[0][pages:])
            track[:] = track[0][:pages].copy(), n

    def free(self, seq):
        tracks = self._seq(seq)
        for pool, (table, _) in zip(self.layers, tracks, strict=False):
            pool.release(table)
        del self.seqs[seq]

    def nbytes(self):
        tables = sum(table.nbytes for tracks in self.seqs.values() for table, _ in tracks)
        return int(tables + sum(pool.nbytes() for pool in self.layers))


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind {kind!r}")
    layers = _int("num_layers", num_layers, 1)
    heads = _int("num_kv_heads", num_kv_heads, 1)
    width = _int("head_dim", head_dim, 1)
    page = _int("block_size", block_size, 1)
    pages = _int("num_blocks", num_blocks, 1)
    if "quantized" in kind:
        if bits is None or _int("bits", bits, 4, 8) not in (4, 8):
            raise ValueError("a quantised cache needs bits 8 or 4")
    elif bits is not None:
        raise ValueError("bits are for quantised caches only")
    if "paged" not in kind:
        page, pages = 1, page * pages
    return Cache(layers, heads, width, page, pages, bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    cache._at(seq, layer)
    chunk = _int("chunk", chunk, 1)
    q = cache._check_q(q)
    k, v = cache._check_kv(k, v)
    if len(q) != len(k) or q.dtype != k.dtype:
        raise ValueError("q, k and v must have one length and one dtype")
    out = np.empty(q.shape, q.dtype)
    if len(q) == 0:
        return out
    # All or nothing: one append, then queries chunk by chunk over the prefix that each chunk sees.
    cache.append(seq, layer, k, v)
    keys, values = cache.view(seq, layer)
    before = len(keys) - len(q)
    for a in range(0, len(q), chunk):
        b = min(a + chunk, len(q))
        out[a:b] = _attention(q[a:b], keys[: before + b], values[: before + b])
    return out


def _number(name, value):
    if isinstance(value, (bool, complex, str)) or not value >= 0:
        raise ValueError(f"{name} must be a number >= 0")
    return value


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    names = ("num_layers", "num_kv_heads", "head_dim", "bits")
    if any(name not in spec for name in names):
        raise ValueError(f"spec needs {names}")
    layers, heads, width, bits = (_int(name, spec[name], 1) for name in names)
    if not 0 < _number("utilization", utilization) <= 1:
        raise ValueError("utilization must be in (0, 1]")
    budget = utilization * _number("gpu_bytes", gpu_bytes)
    budget = (
        budget - _number("weight_bytes", weight_bytes) - _number("reserve_bytes", reserve_bytes)
    )
    per_token = Fraction(2 * layers * heads * width * bits, 8)
    tokens = max(0, int(Fraction(budget) // per_token))
    return tokens, {"bytes_per_token": float(per_token), "budget_bytes": budget}
