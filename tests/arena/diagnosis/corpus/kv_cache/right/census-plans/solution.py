"""KV caches that plan every change first and carry it out afterwards.

A layer is a pool of pages and, for every sequence, a `Span`: a table of page numbers and a
length. Spans are never changed in place. There are no reference counts and no free list: a
census of all spans tells how often each page is used. A change is a list of `Plan`s, each
made from a census and none touching storage; only when all plans of a call exist are they
carried out, so that a call that fails has changed nothing.

The dense kinds are laid out with pages of one position.
"""

from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

KINDS = {
    "dense": (False, False),
    "paged": (True, False),
    "quantized": (False, True),
    "paged_quantized": (True, True),
}
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
SCORES_AT_ONCE = 1 << 20


class Span(NamedTuple):
    """Where one sequence lies in one layer."""

    pages: np.ndarray
    length: int


class Plan(NamedTuple):
    """The span a sequence gets and the stored rows that move for it."""

    span: Span
    source: np.ndarray
    target: np.ndarray


NO_ROWS = np.zeros(0, np.int64)
EMPTY = Span(np.zeros(0, np.int32), 0)


def _whole(name, value, low, high=None):
    """`value` as an int in [low, high), or an error."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < low or (high is not None and value >= high):
        raise ValueError(f"{name} is out of range: {value}")
    return int(value)


def _floats(name, array, tail):
    """`array` as a float array (n, *tail); None in `tail` fits everything."""
    array = np.asarray(array)
    if array.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    fits = array.ndim == 1 + len(tail) and all(
        want is None or have == want for have, want in zip(array.shape[1:], tail)
    )
    if not fits:
        raise ValueError(f"{name} has the shape {array.shape}, not (n, {tail})")
    return array


class PlainRows:
    """Rows as they are: one plane."""

    def planes(self, shape, dtype):
        return [(shape, dtype)]

    def encode(self, rows):
        return [rows]

    def decode(self, parts, dtype):
        return parts[0]


class RoundedRows:
    """Rows as signed codes (two to a byte with 4 bits) and a float32 step a row."""

    def __init__(self, bits, width):
        self.packed = bits == 4
        self.top = 2 ** (bits - 1) - 1
        self.width = width

    def planes(self, shape, dtype):
        stored = (self.width + 1) // 2 if self.packed else self.width
        return [((*shape[:-1], stored), np.dtype(np.uint8)), (shape[:-1], np.dtype(np.float32))]

    def encode(self, rows):
        steps = (np.abs(rows).max(axis=-1) / self.top).astype(np.float32)
        safe = np.where(steps > 0, steps, 1).astype(np.float32)[..., None]
        codes = np.clip(np.rint(rows / safe), -self.top, self.top).astype(np.int8)
        if not self.packed:
            return [codes.view(np.uint8), steps]
        padding = [(0, 0)] * (codes.ndim - 1) + [(0, self.width % 2)]
        nibbles = np.pad(codes + 8, padding).astype(np.uint8)
        return [nibbles[..., 0::2] | nibbles[..., 1::2] << 4, steps]

    def decode(self, parts, dtype):
        stored, steps = parts
        if self.packed:
            codes = np.stack([stored & 15, stored >> 4], axis=-1)
            codes = codes.reshape(*stored.shape[:-1], 2 * stored.shape[-1])
            codes = codes[..., : self.width].astype(np.int8) - 8
        else:
            codes = stored.view(np.int8)
        return codes.astype(dtype) * steps[..., None].astype(dtype)


class Layer:
    """The pages of one layer and the spans of all sequences in it."""

    def __init__(self, page_size, num_pages):
        self.page_size = page_size
        self.num_pages = num_pages
        self.planes = []
        self.spans = {}

    def census(self):
        """How many sequences use each page."""
        tables = [span.pages for span in self.spans.values()]
        return np.bincount(np.concatenate([EMPTY.pages, *tables]), minlength=self.num_pages)

    def rows(self, pages, first, last):
        """Storage rows of the positions [first, last) of a page table."""
        positions = np.arange(first, last)
        return pages[positions // self.page_size].astype(np.int64) * self.page_size + (
            positions % self.page_size
        )

    def pages_for(self, positions):
        return -(-positions // self.page_size)

    def plan_growth(self, seq, count):
        """Room for `count` more positions behind those of `seq`."""
        old = self.spans[seq]
        length = old.length + count
        census = self.census()
        filled = old.length % self.page_size
        own_copy = filled > 0 and census[old.pages[-1]] > 1
        settled = old.pages[:-1] if own_copy else old.pages
        fresh = self._take(np.flatnonzero(census == 0), self.pages_for(length) - len(settled))
        span = Span(np.concatenate([settled, fresh]), length)
        if not own_copy:
            return Plan(span, NO_ROWS, NO_ROWS)
        moved = (old.length - filled, old.length)
        return Plan(span, self.rows(old.pages, *moved), self.rows(span.pages, *moved))

    def plan_choice(self, seq, chosen):
        """The positions `chosen` of `seq`, in this order; unchanged leading pages stay."""
        old = self.spans[seq]
        length = len(chosen)
        differs = np.flatnonzero(chosen != np.arange(length))
        if not len(differs):
            return Plan(Span(old.pages[: self.pages_for(length)].copy(), length), NO_ROWS, NO_ROWS)
        settled = old.pages[: differs[0] // self.page_size]
        start = len(settled) * self.page_size
        census = self.census()
        rest = old.pages[len(settled) :]
        usable = np.concatenate([rest[census[rest] == 1], np.flatnonzero(census == 0)])
        fresh = self._take(usable, self.pages_for(length) - len(settled))
        span = Span(np.concatenate([settled, fresh]), length)
        source = self.rows(old.pages, 0, old.length)[chosen[start:]]
        return Plan(span, source, self.rows(span.pages, start, length))

    def carry_out(self, seq, plan):
        for plane in self.planes:
            plane[plan.target] = plane[plan.source]
        self.spans[seq] = plan.span

    @staticmethod
    def _take(pages, count):
        if len(pages) < count:
            raise MemoryError("the pool has no room left")
        return pages[:count].astype(np.int32)


class Cache:
    """Keys and values of many sequences; see prompt.md for the methods."""

    def __init__(self, layers, heads, width, page_size, num_pages, codec):
        self._row = (2, heads, width)
        self._codec = codec
        self._dtype = None
        self._added = 0
        self._layers = [Layer(page_size, num_pages) for _ in range(layers)]

    def add(self):
        return self._enter([EMPTY] * len(self._layers))

    def append(self, seq, layer, k, v):
        store = self._store(seq, layer)
        rows = self._pairs(k, v)
        if len(rows) == 0:
            raise ValueError("nothing to append")
        self._grow(store, seq, rows)

    def attend(self, seq, layer, q):
        store = self._store(seq, layer)
        q = self._queries(q)
        if len(q) > store.spans[seq].length:
            raise ValueError("more queries than positions")
        return _attention(q, *self.view(seq, layer), len(q))

    def view(self, seq, layer):
        store = self._store(seq, layer)
        span = store.spans[seq]
        if self._dtype is None:
            nothing = np.zeros((0, *self._row[1:]), np.float32)
            return nothing, nothing.copy()
        where = store.rows(span.pages, 0, span.length)
        both = self._codec.decode([plane[where] for plane in store.planes], self._dtype)
        return both[:, 0].copy(), both[:, 1].copy()

    def fork(self, seq):
        return self._enter(self._spans(seq))

    def keep(self, seq, indices):
        length = self.length(seq)
        chosen = [_whole("an index", index, 0, length) for index in indices]
        if len(set(chosen)) < len(chosen):
            raise ValueError("an index occurs twice")
        self._choose(seq, np.array(chosen, np.int64))

    def truncate(self, seq, n):
        length = self.length(seq)
        self._choose(seq, np.arange(_whole("n", n, 0, length + 1)))

    def free(self, seq):
        self._spans(seq)
        for store in self._layers:
            del store.spans[seq]

    def length(self, seq):
        return min(span.length for span in self._spans(seq))

    def nbytes(self):
        planes = sum(plane.nbytes for store in self._layers for plane in store.planes)
        tables = {
            id(span.pages): span.pages.nbytes
            for store in self._layers
            for span in store.spans.values()
        }
        return planes + sum(tables.values())

    def prefill(self, seq, layer, q, k, v, chunk):
        """Append k and v, and attend `chunk` queries at a time."""
        store = self._store(seq, layer)
        chunk = _whole("chunk", chunk, 1)
        q = self._queries(q)
        rows = self._pairs(k, v)
        if len(q) != len(rows):
            raise ValueError("q and k differ in their number of positions")
        if len(q) == 0:
            return np.zeros(q.shape, q.dtype)
        self._grow(store, seq, rows)
        return _attention(q, *self.view(seq, layer), chunk)

    def _enter(self, spans):
        seq = self._added
        self._added += 1
        for store, span in zip(self._layers, spans):
            store.spans[seq] = span
        return seq

    def _spans(self, seq):
        return [store.spans[seq] for store in self._layers]

    def _store(self, seq, layer):
        self._spans(seq)
        return self._layers[_whole("layer", layer, 0, len(self._layers))]

    def _pairs(self, k, v):
        """k and v, checked, as a new array (n, 2, G, D)."""
        k = _floats("k", k, self._row[1:])
        v = _floats("v", v, self._row[1:])
        if k.dtype != v.dtype or k.shape != v.shape:
            raise ValueError("k and v differ in shape or dtype")
        if self._dtype not in (None, k.dtype):
            raise TypeError(f"the cache holds {self._dtype}")
        return np.stack([k, v], axis=1)

    def _queries(self, q):
        _, heads, width = self._row
        q = _floats("q", q, (None, width))
        if q.shape[1] == 0 or q.shape[1] % heads:
            raise ValueError("query heads must be a multiple of kv heads")
        return q

    def _grow(self, store, seq, rows):
        plan = store.plan_growth(seq, len(rows))
        if self._dtype is None:
            self._dtype = rows.dtype
            for each in self._layers:
                capacity = each.page_size * each.num_pages
                each.planes = [
                    np.empty((capacity, *shape), dtype)
                    for shape, dtype in self._codec.planes(self._row, rows.dtype)
                ]
        store.carry_out(seq, plan)
        where = store.rows(plan.span.pages, plan.span.length - len(rows), plan.span.length)
        for plane, part in zip(store.planes, self._codec.encode(rows)):
            plane[where] = part

    def _choose(self, seq, chosen):
        plans = [store.plan_choice(seq, chosen) for store in self._layers]
        for store, plan in zip(self._layers, plans):
            store.carry_out(seq, plan)


def _attention(q, k, v, chunk):
    """Causal attention of the last len(q) positions, at most `chunk` queries at a time."""
    count, heads, width = q.shape
    total, groups, _ = k.shape
    share = heads // groups
    out = np.empty(q.shape, q.dtype)
    keys = np.ascontiguousarray(k.transpose(1, 2, 0))
    values = np.ascontiguousarray(v.transpose(1, 0, 2))
    block = max(1, min(chunk, SCORES_AT_ONCE // (heads * max(total, 1))))
    for start in range(0, count, block):
        stop = min(start + block, count)
        seen = total - count + stop
        tile = q[start:stop].reshape(stop - start, groups, share, width) * q.dtype.type(width**-0.5)
        tile = tile.transpose(1, 2, 0, 3).reshape(groups, -1, width)
        scores = (tile @ keys[:, :, :seen]).reshape(groups, share, stop - start, seen)
        first_seen = total - count + start
        later = np.arange(seen) > np.arange(first_seen, seen)[:, None]
        scores[:, :, later] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights.reshape(groups, -1, seen) @ values[:, :seen]
        mixed = mixed.reshape(groups, share, stop - start, width).transpose(2, 0, 1, 3)
        out[start:stop] = mixed.reshape(stop - start, heads, width)
    return out


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind: {kind!r}")
    paged, rounded = KINDS[kind]
    layers = _whole("num_layers", num_layers, 1)
    heads = _whole("num_kv_heads", num_kv_heads, 1)
    width = _whole("head_dim", head_dim, 1)
    block_size = _whole("block_size", block_size, 1)
    num_blocks = _whole("num_blocks", num_blocks, 1)
    if rounded:
        if _whole("bits", bits, 1) not in (4, 8):
            raise ValueError("bits must be 4 or 8")
        codec = RoundedRows(int(bits), width)
    else:
        if bits is not None:
            raise ValueError("bits belongs to the quantised kinds")
        codec = PlainRows()
    page_size, num_pages = (block_size, num_blocks) if paged else (1, block_size * num_blocks)
    return Cache(layers, heads, width, page_size, num_pages, codec)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    if not isinstance(cache, Cache):
        raise TypeError("cache must come from make_cache")
    return cache.prefill(seq, layer, q, k, v, chunk)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    factors = {}
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
        factors[name] = _whole(name, spec[name], 1)
    sizes = {"gpu_bytes": gpu_bytes, "weight_bytes": weight_bytes, "reserve_bytes": reserve_bytes}
    for name, value in {"utilization": utilization, **sizes}.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number")
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is out of range: {value}")
    if not 0 < utilization <= 1:
        raise ValueError("utilization must be in (0, 1]")
    elements = 2 * factors["num_layers"] * factors["num_kv_heads"] * factors["head_dim"]
    token_bytes = Fraction(elements * factors["bits"], 8)
    budget = _exact(utilization) * _exact(gpu_bytes) - _exact(weight_bytes) - _exact(reserve_bytes)
    terms = {"bytes_per_token": _number(token_bytes), "budget_bytes": _number(budget)}
    return max(0, budget // token_bytes), terms


def _exact(value):
    return Fraction(int(value)) if isinstance(value, Integral) else Fraction(float(value))


def _number(value):
    return int(value) if value.denominator == 1 else float(value)
