"""KV caches in which one act does everything: keep a prefix of a layer, then write rows after it.

append = (all, new rows), truncate = (n, nothing), keep = (common prefix, moved rows), free = (0, nothing).
Each act is planned for all layers first (this may raise) and committed afterwards (this may not).
The dense kinds are the paged ones with pages of one position. Only pages with a second owner are counted.
"""

import math
import operator
from array import array
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real

import numpy as np

KINDS = {  # kind: (in pages, quantised)
    "dense": (False, False),
    "paged": (True, False),
    "quantized": (False, True),
    "paged_quantized": (True, True),
}
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def _whole(name, value, low, high=None):
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int")
    value = operator.index(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is out of range: {value}")
    return value


def _array(name, value, *tail):
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be an array")
    if value.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32 or float64")
    if value.ndim != 3:
        raise ValueError(f"{name} must have three axes")
    for size, want in zip(value.shape[::-1], tail[::-1]):
        if want is not None and size != want:
            raise ValueError(f"{name} has the wrong shape {value.shape}")
    return value


# ---- rows as they lie in storage: a dict of arrays whose first axis is the position ----


def _raw_coder():
    def encode(pairs):
        return {"raw": pairs}

    def decode(rows, dtype, width):
        return rows["raw"]

    return encode, decode


def _integer_coder(bits):
    top = 2 ** (bits - 1) - 1

    def encode(pairs):
        peak = np.abs(pairs).max(axis=-1)
        scale = (peak / top).astype(np.float32)
        step = np.where(scale > 0, scale, 1).astype(pairs.dtype)[..., None]
        code = np.clip(np.rint(pairs / step), -top, top).astype(np.int8)
        if bits == 4:
            nibble = (code + 8).astype(np.uint8)
            if nibble.shape[-1] % 2:
                nibble = np.concatenate([nibble, np.zeros_like(nibble[..., :1])], axis=-1)
            code = nibble[..., 0::2] | (nibble[..., 1::2] << 4)
        return {"code": code, "scale": scale}

    def decode(rows, dtype, width):
        code = rows["code"]
        if bits == 4:
            both = np.stack([code & 15, code >> 4], axis=-1)
            code = both.reshape(*code.shape[:-1], -1)[..., :width].astype(np.int8) - 8
        return code.astype(dtype) * rows["scale"].astype(dtype)[..., None]

    return encode, decode


class _Strip:
    """The pool of one layer, and which of its pages every sequence owns."""

    def __init__(self, pages, span):
        self.pages = pages
        self.span = span
        self.parts = {}
        self.room = 0
        self.top = 0
        self.spare = []
        self.sharers = {}  # page: owners beyond the first
        self.tables = {}
        self.sizes = {}
        self.code = "i" if pages < 2**31 else "q"

    def open(self, seq):
        self.tables[seq] = array(self.code)
        self.sizes[seq] = 0

    def close(self, seq):
        self.plan(seq, 0)()
        del self.tables[seq], self.sizes[seq]

    def share(self, seq, twin):
        self.tables[twin] = self.tables[seq][:]
        self.sizes[twin] = self.sizes[seq]
        for page in self.tables[seq]:
            self.sharers[page] = self.sharers.get(page, 0) + 1

    def gather(self, seq, index=None):
        table = np.array(self.tables[seq], dtype=np.int64)
        if index is None:
            size = self.sizes[seq]
            return {
                name: part[table].reshape(-1, *part.shape[2:])[:size] for name, part in self.parts.items()
            }
        page, place = np.divmod(index, self.span)
        return {name: part[table[page], place] for name, part in self.parts.items()}

    def plan(self, seq, prefix, rows=None):
        """Check that the first `prefix` positions and then `rows` fit; answer the act that does it."""
        table, span = self.tables[seq], self.span
        count = len(next(iter(rows.values()))) if rows else 0
        kept = -(-prefix // span)
        need = -(-(prefix + count) // span) - kept
        torn = bool(count and prefix % span and table[kept - 1] in self.sharers)
        back = sum(page not in self.sharers for page in table[kept:])
        lack = need + torn - len(self.spare) - back
        if lack > self.pages - self.top:
            raise MemoryError("no room left in the cache")

        def act():
            if lack > 0:
                self._grow(self.top + lack, rows)
            for page in table[kept:]:
                self._release(page)
            del table[kept:]
            if torn:
                old, new = table[kept - 1], self._take()
                for part in self.parts.values():
                    part[new] = part[old]
                self._release(old)
                table[kept - 1] = new
            table.extend([self._take() for _ in range(need)])
            if count:
                page, place = np.divmod(np.arange(prefix, prefix + count), span)
                where = np.array(table, dtype=np.int64)[page]
                for name, part in self.parts.items():
                    part[where, place] = rows[name]
            self.sizes[seq] = prefix + count

        return act

    def _grow(self, pages, rows):
        if pages <= self.room:
            return
        room = min(self.pages, max(pages, self.room + self.room // 2))
        fresh = {}
        for name, some in rows.items():
            fresh[name] = np.zeros((room, self.span, *some.shape[1:]), some.dtype)
            if name in self.parts:
                fresh[name][: self.room] = self.parts[name]
        self.parts, self.room = fresh, room

    def _take(self):
        if self.spare:
            return self.spare.pop()
        self.top += 1
        return self.top - 1

    def _release(self, page):
        others = self.sharers.get(page, 0)
        if others == 0:
            self.spare.append(page)
        elif others == 1:
            del self.sharers[page]
        else:
            self.sharers[page] = others - 1

    def nbytes(self):
        tables = sum(len(table) * table.itemsize for table in self.tables.values())
        return (
            sum(part.nbytes for part in self.parts.values())
            + tables
            + 8 * len(self.tables)
            + 8 * len(self.spare)
            + 16 * len(self.sharers)
        )


class _Cache:
    def __init__(self, layers, heads, width, pages, span, coder):
        self._heads = heads
        self._width = width
        self._encode, self._decode = coder
        self._strips = [_Strip(pages, span) for _ in range(layers)]
        self._next = 0
        self._dtype = None

    # -- checks

    def _known(self, seq):
        if isinstance(seq, (int, np.integer)) and seq in self._strips[0].tables:
            return int(seq)
        raise KeyError(seq)

    def _strip(self, layer):
        return self._strips[_whole("layer", layer, 0, len(self._strips) - 1)]

    def _pairs(self, k, v):
        _array("k", k, self._heads, self._width)
        _array("v", v, self._heads, self._width)
        if k.dtype != v.dtype:
            raise TypeError("k and v have different dtypes")
        if k.shape != v.shape:
            raise ValueError("k and v have different shapes")
        if self._dtype is not None and k.dtype != self._dtype:
            raise ValueError("another dtype than before")

    def _queries(self, q):
        _array("q", q, self._width)
        if q.shape[1] < 1 or q.shape[1] % self._heads:
            raise ValueError("the query heads are not a multiple of the kv heads")

    # -- the table of methods

    def add(self):
        seq = self._next
        self._next += 1
        for strip in self._strips:
            strip.open(seq)
        return seq

    def append(self, seq, layer, k, v):
        seq, strip = self._known(seq), self._strip(layer)
        self._pairs(k, v)
        if len(k) == 0:
            return
        rows = self._encode(np.stack([k, v], axis=1))
        strip.plan(seq, strip.sizes[seq], rows)()
        self._dtype = k.dtype

    def view(self, seq, layer):
        seq, strip = self._known(seq), self._strip(layer)
        if strip.sizes[seq] == 0:
            shape, dtype = (0, self._heads, self._width), self._dtype or np.float32
            return np.empty(shape, dtype), np.empty(shape, dtype)
        pairs = self._decode(strip.gather(seq), self._dtype, self._width)
        return pairs[:, 0], pairs[:, 1]

    def attend(self, seq, layer, q):
        seq, strip = self._known(seq), self._strip(layer)
        self._queries(q)
        if len(q) > strip.sizes[seq]:
            raise ValueError("more queries than positions")
        return _attention(q, *self.view(seq, layer), len(q))

    def fork(self, seq):
        seq, twin = self._known(seq), self._next
        self._next += 1
        for strip in self._strips:
            strip.share(seq, twin)
        return twin

    def keep(self, seq, indices):
        seq = self._known(seq)
        length = self.length(seq)
        index = [_whole("an index", i, 0, length - 1) for i in indices]
        if len(set(index)) != len(index):
            raise ValueError("an index occurs twice")
        prefix = next((at for at, i in enumerate(index) if at != i), len(index))
        moved = np.array(index[prefix:], dtype=np.int64)
        acts = []
        for strip in self._strips:
            rows = strip.gather(seq, moved) if len(moved) else None
            acts.append(strip.plan(seq, prefix, rows))
        for act in acts:
            act()

    def truncate(self, seq, n):
        seq = self._known(seq)
        n = _whole("n", n, 0, self.length(seq))
        for act in [strip.plan(seq, n) for strip in self._strips]:
            act()

    def free(self, seq):
        seq = self._known(seq)
        for strip in self._strips:
            strip.close(seq)

    def length(self, seq):
        seq = self._known(seq)
        return min(strip.sizes[seq] for strip in self._strips)

    def nbytes(self):
        return sum(strip.nbytes() for strip in self._strips)


def _attention(q, k, v, most):
    """Causal attention of the last len(q) positions, at most `most` queries at a time."""
    n, heads, width = q.shape
    groups, before = k.shape[1], len(k) - n
    keys = np.ascontiguousarray(k.transpose(1, 2, 0), dtype=np.float64)
    values = np.ascontiguousarray(v.transpose(1, 0, 2), dtype=np.float64)
    out = np.empty(q.shape, q.dtype)
    tile = max(1, min(most, 64, 1024 // heads))
    for a in range(0, n, tile):
        b = min(n, a + tile)
        seen = before + b
        some = q[a:b].astype(np.float64) * width**-0.5
        some = some.reshape(b - a, groups, -1, width).transpose(1, 2, 0, 3)
        weight = np.matmul(some, keys[:, None, :, :seen])
        future = np.arange(seen)[None, :] > np.arange(before + a, before + b)[:, None]
        np.copyto(weight, -np.inf, where=future)
        weight -= weight.max(axis=-1, keepdims=True)
        np.exp(weight, out=weight)
        mixed = np.matmul(weight, values[:, None, :seen]) / weight.sum(axis=-1, keepdims=True)
        out[a:b] = mixed.transpose(2, 0, 1, 3).reshape(b - a, heads, width)
    return out


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    paged, quantised = KINDS[kind]
    layers = _whole("num_layers", num_layers, 1)
    heads = _whole("num_kv_heads", num_kv_heads, 1)
    width = _whole("head_dim", head_dim, 1)
    span = _whole("block_size", block_size, 1)
    pages = _whole("num_blocks", num_blocks, 1)
    if quantised:
        if _whole("bits", bits, 1) not in (4, 8):
            raise ValueError("bits must be 8 or 4")
        coder = _integer_coder(int(bits))
    else:
        if bits is not None:
            raise ValueError("bits are for the quantised kinds")
        coder = _raw_coder()
    if not paged:
        pages, span = pages * span, 1
    return _Cache(layers, heads, width, pages, span, coder)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    if not isinstance(cache, _Cache):
        raise TypeError("not a cache of make_cache")
    chunk = _whole("chunk", chunk, 1)
    cache._pairs(k, v)
    cache._queries(q)
    if len(q) != len(k):
        raise ValueError("q and k have different lengths")
    cache.append(seq, layer, k, v)
    if len(q) == 0:
        return np.empty(q.shape, q.dtype)
    return _attention(q, *cache.view(seq, layer), chunk)


def _amount(name, value):
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is out of range: {value}")
    return Fraction(int(value)) if value == int(value) else Fraction(str(float(value)))


def _plain(exact):
    return int(exact) if exact.denominator == 1 else float(exact)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    token = Fraction(2, 8)
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
        token *= _whole(name, spec[name], 1)
    share = _amount("utilization", utilization)
    if not 0 < share <= 1:
        raise ValueError("utilization must be in (0, 1]")
    weights, reserve = _amount("weight_bytes", weight_bytes), _amount("reserve_bytes", reserve_bytes)
    budget = share * _amount("gpu_bytes", gpu_bytes) - weights - reserve
    tokens = max(0, math.floor(budget / token))
    return tokens, {"bytes_per_token": _plain(token), "budget_bytes": _plain(budget)}
