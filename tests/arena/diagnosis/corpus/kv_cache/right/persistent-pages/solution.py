"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

Pages are immutable here.  What a layer of a sequence holds is a `Strip`, a tuple of pages and a
count; every operation builds new strips from old ones, asks whether they fit, and only then swaps
them in.  So a fork shares pages for nothing and a call that raises has changed nothing.
The dense kinds are the same machine with internal pages that are charged by the position.
"""

import math
import numbers
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
KINDS = {  # (paged, quantised)
    "dense": (False, False),
    "paged": (True, False),
    "quantized": (False, True),
    "paged_quantized": (True, True),
}
DENSE_PAGE_ROWS = 128
PAGE_OVERHEAD = 8  # a reference count
ENTRY_OVERHEAD = 8  # a reference to a page in a strip
TILE_SCORES = 1 << 19
SPEC_FIELDS = ("num_layers", "num_kv_heads", "head_dim", "bits")


class PlainCodec:
    """Rows as they came: (k, v)."""

    def encode(self, k, v):
        """The rows of k and v."""
        return k, v

    def decode(self, rows, _dtype):
        """k and v of the rows."""
        return rows


class QuantCodec(PlainCodec):
    """Rows as signed codes of `bits` bits with one scale a position, head and tensor."""

    def __init__(self, bits, head_dim):
        self.bits = bits
        self.head_dim = head_dim
        self.top = 2 ** (bits - 1) - 1

    def encode(self, k, v):
        """The rows of k and v: codes and scales of k, codes and scales of v."""
        return (*self._quantise(k), *self._quantise(v))

    def decode(self, rows, dtype):
        """k and v of the rows, in `dtype`."""
        k_codes, k_scales, v_codes, v_scales = rows
        pairs = ((k_codes, k_scales), (v_codes, v_scales))
        return tuple(self._restore(codes, scales, dtype) for codes, scales in pairs)

    def _quantise(self, values):
        values = values.astype(np.float64)
        steps = np.abs(values).max(axis=-1) / self.top
        safe = np.where(steps > 0, steps, 1.0)
        codes = np.rint(values / safe[..., None])
        codes = np.clip(codes, -self.top, self.top).astype(np.int8)
        if self.bits == 4:
            codes = _pack_nibbles(codes)
        return codes, steps.astype(np.float32)

    def _restore(self, codes, scales, dtype):
        if self.bits == 4:
            codes = _unpack_nibbles(codes, self.head_dim)
        return (codes * scales[..., None].astype(np.float64)).astype(dtype)


def _pack_nibbles(codes):
    """Codes in [-7, 7], two to a byte; an odd last one is paired with a zero."""
    shifted = (codes + 8).astype(np.uint8)
    if shifted.shape[-1] % 2:
        shifted = np.pad(shifted, [(0, 0)] * (shifted.ndim - 1) + [(0, 1)])
    return shifted[..., 0::2] | (shifted[..., 1::2] << 4)


def _unpack_nibbles(packed, width):
    """The `width` codes that _pack_nibbles packed."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    codes = pairs.reshape(*packed.shape[:-1], -1)[..., :width]
    return codes.astype(np.int8) - np.int8(8)


class Page:
    """Immutable rows; two pages are the same only if they are one object."""

    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = tuple(np.array(part, order="C") for part in rows)

    def __len__(self):
        return len(self.rows[0])

    @property
    def nbytes(self):
        """Bytes of the arrays."""
        return sum(part.nbytes for part in self.rows)


@dataclass(frozen=True)
class Strip:
    """What one layer of a sequence holds: the first `count` rows of its pages."""

    pages: tuple = ()
    count: int = 0


def _sliced(rows, start, stop):
    return tuple(part[start:stop] for part in rows)


def _joined(pieces):
    return tuple(np.concatenate(parts) for parts in zip(*pieces))


def _cut(rows, page_rows):
    """Pages of `page_rows` positions, the last one perhaps shorter, that hold `rows`."""
    total = len(rows[0])
    starts = range(0, total, page_rows)
    return tuple(Page(_sliced(rows, start, start + page_rows)) for start in starts)


def _strip_rows(strip):
    """All rows of a strip that is not empty, in new arrays."""
    return _sliced(_joined([page.rows for page in strip.pages]), 0, strip.count)


class Cache:
    """Keys and values of many sequences in a pool of bounded room."""

    def __init__(self, shape, codec, *, paged, block_size, num_blocks):
        self._num_layers, self._heads, self._width = shape
        self._codec = codec
        self._paged = paged
        self._page_rows = block_size if paged else DENSE_PAGE_ROWS
        self._capacity = num_blocks if paged else num_blocks * block_size
        self._used = [0] * self._num_layers
        self._holders = Counter()
        self._sequences = {}
        self._next_seq = 0
        self._dtype = None

    def add(self):
        """A new, empty sequence."""
        return self._register((Strip(),) * self._num_layers)

    def fork(self, seq):
        """A new sequence with the positions of `seq`; paged kinds share the pages."""
        strips = self._sequences[seq]
        if not self._paged:
            strips = tuple(
                Strip(tuple(Page(page.rows) for page in s.pages), s.count) for s in strips
            )
        return self._register(strips)

    def free(self, seq):
        """Ends the sequence and gives its room back."""
        self._swap(self._sequences[seq], (Strip(),) * self._num_layers)
        del self._sequences[seq]

    def length(self, seq):
        """The number of positions that are present in every layer."""
        return min(strip.count for strip in self._sequences[seq])

    def keep(self, seq, indices):
        """Keeps these positions in this order in every layer."""
        strips = self._sequences[seq]
        wanted = self._checked_indices(indices, self.length(seq))
        self._replace(seq, tuple(self._picked(strip, wanted) for strip in strips))

    def truncate(self, seq, n):
        """Keeps the first n positions of every layer."""
        strips = self._sequences[seq]
        n = _whole("n", n, least=0)
        if n > self.length(seq):
            raise ValueError("n is larger than the length of the sequence")
        self._replace(seq, tuple(self._shortened(strip, n) for strip in strips))

    def append(self, seq, layer, k, v):
        """Adds the positions of k and v, (n, G, D) each, to one layer."""
        strips = self._sequences[seq]
        layer = self._checked_layer(layer)
        self._check_rows(k, v)
        if len(k) == 0:
            raise ValueError("append needs at least one position")
        grown = self._extended(strips[layer], self._codec.encode(k, v))
        self._replace(seq, (*strips[:layer], grown, *strips[layer + 1 :]))
        self._dtype = k.dtype

    def view(self, seq, layer):
        """(k, v) of one layer, (S, G, D) each, in new arrays."""
        strip = self._sequences[seq][self._checked_layer(layer)]
        dtype = FLOATS[0] if self._dtype is None else self._dtype
        if not strip.count:
            return tuple(np.zeros((0, self._heads, self._width), dtype) for _ in range(2))
        return self._codec.decode(_strip_rows(strip), dtype)

    def attend(self, seq, layer, q):
        """Causal attention of q (n, H, D), the queries of the layer's last n positions."""
        strips = self._sequences[seq]
        layer = self._checked_layer(layer)
        self.check_queries(q)
        if len(q) > strips[layer].count:
            raise ValueError("more queries than positions")
        return _attention(q, *self.view(seq, layer))

    def nbytes(self):
        """Bytes of all rows, scales, reference counts and tables."""
        stored = sum(page.nbytes + PAGE_OVERHEAD for page in self._holders)
        entries = sum(len(s.pages) for strips in self._sequences.values() for s in strips)
        return stored + ENTRY_OVERHEAD * entries

    def check_prefill(self, seq, layer, q, k, v):
        """Raises unless these could be appended and attended, room apart."""
        if seq not in self._sequences:
            raise KeyError(seq)
        self._checked_layer(layer)
        self._check_rows(k, v)
        self.check_queries(q)
        if len(q) != len(k) or q.dtype != k.dtype:
            raise ValueError("q, k and v must have the same positions and dtype")

    def _extended(self, strip, rows):
        """The strip with `rows` after its own; a page that is partly filled is written anew."""
        whole_pages, rest = divmod(strip.count, self._page_rows)
        if rest:
            rows = _joined([_sliced(strip.pages[whole_pages].rows, 0, rest), rows])
        pages = strip.pages[:whole_pages] + _cut(rows, self._page_rows)
        return Strip(pages, whole_pages * self._page_rows + len(rows[0]))

    def _picked(self, strip, wanted):
        """A strip of the positions `wanted` alone."""
        if len(wanted) == 0:
            return Strip()
        rows = tuple(part[wanted] for part in _strip_rows(strip))
        return Strip(_cut(rows, self._page_rows), len(wanted))

    def _shortened(self, strip, n):
        """The strip's first n positions; the last page is cropped unless others read it."""
        pages = strip.pages[: -(-n // self._page_rows)]
        rest = n % self._page_rows
        if rest and len(pages[-1]) > rest and self._holders[pages[-1]] == 1:
            pages = (*pages[:-1], Page(_sliced(pages[-1].rows, 0, rest)))
        return Strip(pages, n)

    def _register(self, strips):
        self._swap((Strip(),) * self._num_layers, strips)
        seq = self._next_seq
        self._next_seq += 1
        self._sequences[seq] = strips
        return seq

    def _replace(self, seq, strips):
        self._swap(self._sequences[seq], strips)
        self._sequences[seq] = strips

    def _cost(self, pages):
        return len(pages) if self._paged else sum(len(page) for page in pages)

    def _swap(self, old, new):
        """Releases the pages of `old` and holds those of `new`, or raises and does neither."""
        used = list(self._used)
        released, taken = [], []
        for layer, (before, after) in enumerate(zip(old, new)):
            if before is after:
                continue
            gone = set(before.pages) - set(after.pages)
            come = set(after.pages) - set(before.pages)
            used[layer] -= self._cost([page for page in gone if self._holders[page] == 1])
            used[layer] += self._cost([page for page in come if page not in self._holders])
            if used[layer] > self._capacity:
                raise MemoryError(f"no room left in layer {layer}")
            released.extend(gone)
            taken.extend(come)
        self._used = used
        self._holders.update(taken)
        for page in released:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]

    def _checked_layer(self, layer):
        layer = _whole("layer", layer, least=0)
        if layer >= self._num_layers:
            raise ValueError("there is no such layer")
        return layer

    def _check_rows(self, k, v):
        for name, array in (("k", k), ("v", v)):
            self._check_array(name, array)
            if array.shape[1:] != (self._heads, self._width):
                raise ValueError(f"{name} must be (n, {self._heads}, {self._width})")
        if k.shape != v.shape:
            raise ValueError("k and v differ in shape")
        if k.dtype != v.dtype:
            raise TypeError("k and v differ in dtype")

    def check_queries(self, q):
        """Raises unless q is (n, H, D) with H a multiple of G."""
        self._check_array("q", q)
        heads, width = q.shape[1:]
        if width != self._width or heads < 1 or heads % self._heads:
            raise ValueError(f"q must be (n, H, {self._width}), H a multiple of {self._heads}")

    def _check_array(self, name, array):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be an array")
        if array.dtype not in FLOATS:
            raise TypeError(f"{name} must be float32 or float64")
        if array.ndim != 3:
            raise ValueError(f"{name} must have three axes")
        if self._dtype is not None and array.dtype != self._dtype:
            raise TypeError(f"{name} must be {self._dtype} as the cache is")

    @staticmethod
    def _checked_indices(indices, length):
        wanted = [_whole("an index", index, least=0) for index in indices]
        if len(set(wanted)) != len(wanted):
            raise ValueError("the indices must differ")
        if wanted and max(wanted) >= length:
            raise ValueError("an index lies beyond the sequence")
        return np.array(wanted, dtype=np.intp)


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind of cache: {kind!r}")
    paged, quantised = KINDS[kind]
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    shape = tuple(_whole(name, size) for name, size in sizes.items())
    block_size = _whole("block_size", block_size)
    num_blocks = _whole("num_blocks", num_blocks)
    if quantised and _whole("bits", bits) not in (4, 8):
        raise ValueError("bits must be 4 or 8")
    if not quantised and bits is not None:
        raise ValueError(f"bits must be None for {kind}")
    codec = QuantCodec(int(bits), shape[2]) if quantised else PlainCodec()
    return Cache(shape, codec, paged=paged, block_size=block_size, num_blocks=num_blocks)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    if not isinstance(cache, Cache):
        raise TypeError("cache must come from make_cache")
    chunk = _whole("chunk", chunk)
    cache.check_prefill(seq, layer, q, k, v)
    if len(q) == 0:
        return np.zeros(q.shape, q.dtype)
    # The rows go in by one append, which is atomic; the queries then go through in chunks.
    cache.append(seq, layer, k, v)
    return _attention(q, *cache.view(seq, layer), chunk=chunk)


def _attention(q, k, v, chunk=None):
    """Attention of q (n, H, D), the last n of the S positions of k and v, in q's dtype."""
    count, heads, width = q.shape
    positions, kv_heads = k.shape[:2]
    keys = np.ascontiguousarray(k.transpose(1, 2, 0), dtype=np.float64)
    values = np.ascontiguousarray(v.transpose(1, 0, 2), dtype=np.float64)
    out = np.empty(q.shape, q.dtype)
    tile = max(1, TILE_SCORES // (heads * max(positions, 1)))
    if chunk is not None:
        tile = min(tile, chunk)
    group = heads // kv_heads
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        seen = positions - count + stop
        rows = stop - start
        block = q[start:stop].reshape(rows, kv_heads, group, width).astype(np.float64)
        block = block.transpose(1, 2, 0, 3).reshape(kv_heads, group * rows, width)
        scores = (block / math.sqrt(width)) @ keys[:, :, :seen]
        scores = scores.reshape(kv_heads, group, rows, seen)
        own = np.arange(seen - rows, seen)
        scores[..., np.arange(seen) > own[:, None]] = -np.inf
        mixed = _softmax(scores).reshape(kv_heads, group * rows, seen) @ values[:, :seen]
        mixed = mixed.reshape(kv_heads, group, rows, width).transpose(2, 0, 1, 3)
        out[start:stop] = mixed.reshape(rows, heads, width)
    return out


def _softmax(scores):
    """The softmax over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    missing = [name for name in SPEC_FIELDS if name not in spec]
    if missing:
        raise ValueError(f"spec lacks {missing}")
    layers, heads, width, bits = (_whole(name, spec[name]) for name in SPEC_FIELDS)
    share = _amount("utilization", utilization)
    if not 0 < share <= 1:
        raise ValueError("utilization must be in (0, 1]")
    total = _amount("gpu_bytes", gpu_bytes)
    weights = _amount("weight_bytes", weight_bytes)
    reserve = _amount("reserve_bytes", reserve_bytes)
    per_token = Fraction(2 * layers * heads * width * bits, 8)
    budget = share * total - weights - reserve
    tokens = max(0, math.floor(budget / per_token))
    return tokens, {"bytes_per_token": _number(per_token), "budget_bytes": _number(budget)}


def _number(fraction):
    return int(fraction) if fraction.denominator == 1 else float(fraction)


def _amount(name, value):
    """A number that is finite and not negative, exactly."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number")
    if not value >= 0 or value == math.inf:
        raise ValueError(f"{name} must be finite and not negative")
    return Fraction(int(value)) if value == int(value) else Fraction(float(value))


def _whole(name, value, least=1):
    """An int of at least `least`."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int")
    value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}")
    return value
