"""KV caches: dense, paged, quantised; chunked prefill; maximal context. See prompt.md.

A position of one layer is one record of a structured NumPy dtype: key and value of all kv heads, as
they are or quantised.  The codecs know what is in a record; the shelves (one for each layer) know
where records lie and only ever move them; the cache validates and ties both together.
"""

import math
import numbers
import operator
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from codecs_of_rows import PlainCodec, QuantisedCodec
from shelves import DenseShelf, PagedShelf

SCORE_ELEMENTS = 1 << 20        # float64 scores that attention holds at once: 8 MiB
KINDS = {                       # kind: (shelf, quantised)
    "dense": (DenseShelf, False),
    "paged": (PagedShelf, False),
    "quantized": (DenseShelf, True),
    "paged_quantized": (PagedShelf, True),
}


# ----------------------------------------------------------------------------------- validation

def _integer(name, value, low, high=None):
    """`value` as an int in [low, high]."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, not a bool")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is out of range: {value}")
    return value


def _require_rows(name, array, shape):
    """Raise unless `array` is a float array of the shape, in which None stands for any size."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape))
    if not fits:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")


def _indices(indices, length):
    """`indices` as an int64 array; different, each in [0, length)."""
    if isinstance(indices, np.ndarray):
        if indices.ndim != 1:
            raise ValueError("indices must be flat")
        if indices.size and indices.dtype.kind not in "iu":
            raise TypeError("indices must be ints")
    checked = [_integer("index", index, 0, length - 1) for index in indices]
    if len(set(checked)) != len(checked):
        raise ValueError("indices must be different")
    return np.array(checked, dtype=np.int64)


# ------------------------------------------------------------------------------------- attention

def _attention(q, k, v, chunk):
    """Causal attention of q (n, H, D), the last n of the S positions of k and v (S, G, D).

    In float64, for at most `chunk` queries and about SCORE_ELEMENTS scores at a time.
    """
    count, heads, width = q.shape
    held, groups, _ = k.shape
    out = np.empty(q.shape, q.dtype)
    if count == 0:
        return out
    keys = np.ascontiguousarray(k.transpose(1, 2, 0), dtype=np.float64)       # (G, D, S)
    values = np.ascontiguousarray(v.transpose(1, 0, 2), dtype=np.float64)     # (G, S, D)
    first = held - count
    step = min(chunk, max(1, SCORE_ELEMENTS // (heads * held)))
    for start in range(0, count, step):
        stop = min(start + step, count)
        seen = first + stop                      # positions that the last query of the tile sees
        tile = q[start:stop].astype(np.float64) * width ** -0.5
        tile = tile.reshape(stop - start, groups, heads // groups, width).transpose(1, 2, 0, 3)
        flat = tile.reshape(groups, -1, width)
        scores = flat @ keys[:, :, :seen]
        by_query = scores.reshape(groups, heads // groups, stop - start, seen)
        # Only the positions of the tile itself can lie in the future of one of its queries.
        hidden = ~np.tri(stop - start, dtype=bool)
        np.copyto(by_query[..., first + start:], -np.inf, where=hidden)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        mixed = (scores @ values[:, :seen]) / total
        mixed = mixed.reshape(groups, heads // groups, stop - start, width)
        out[start:stop] = mixed.transpose(2, 0, 1, 3).reshape(stop - start, heads, width)
    return out


# ----------------------------------------------------------------------------------------- cache

class Cache:
    """Keys and values of many sequences; the methods are described in prompt.md."""

    def __init__(self, codec, shelves):
        self._codec = codec
        self._shelves = shelves
        self._alive = set()
        self._next = 0
        self._dtype = None              # known from the first append on

    # sequences

    def add(self):
        seq = self._new_number()
        for shelf in self._shelves:
            shelf.open(seq)
        return seq

    def fork(self, seq):
        seq = self._known(seq)
        if not all(shelf.can_fork(seq) for shelf in self._shelves):
            raise MemoryError("no room for a copy of the sequence")
        twin = self._new_number()
        for shelf in self._shelves:
            shelf.fork(seq, twin)
        return twin

    def free(self, seq):
        seq = self._known(seq)
        for shelf in self._shelves:
            shelf.close(seq)
        self._alive.remove(seq)

    def length(self, seq):
        seq = self._known(seq)
        return min(shelf.size(seq) for shelf in self._shelves)

    # positions

    def append(self, seq, layer, k, v):
        seq, shelf = self._known(seq), self._shelf(layer)
        self._require_pair(k, v)
        shelf.extend(seq, self._codec.encode(k, v))
        self._dtype = k.dtype

    def keep(self, seq, indices):
        indices = _indices(indices, self.length(seq))
        seq = self._known(seq)
        if not all(shelf.can_keep(seq, indices) for shelf in self._shelves):
            raise MemoryError("no room to unshare the pages of the sequence")
        for shelf in self._shelves:
            shelf.keep(seq, indices)

    def truncate(self, seq, n):
        n = _integer("n", n, 0, self.length(seq))
        seq = self._known(seq)
        for shelf in self._shelves:
            shelf.cut(seq, n)

    # reading

    def view(self, seq, layer):
        seq, shelf = self._known(seq), self._shelf(layer)
        if shelf.size(seq) == 0:
            nothing = (0, self._codec.heads, self._codec.width)
            dtype = self._dtype or np.dtype(np.float32)
            return np.empty(nothing, dtype), np.empty(nothing, dtype)
        return self._codec.decode(shelf.rows(seq), self._dtype)

    def attend(self, seq, layer, q):
        seq, shelf = self._known(seq), self._shelf(layer)
        self._require_queries(q)
        if q.shape[0] > shelf.size(seq):
            raise ValueError(f"{q.shape[0]} queries for {shelf.size(seq)} positions")
        return _attention(q, *self.view(seq, layer), chunk=max(1, q.shape[0]))

    def prefill(self, seq, layer, q, k, v, chunk):
        """`append` of everything and `attend` of everything, `chunk` queries at a time.

        All is validated and all room is taken before the first answer, so nothing has to be undone.
        """
        chunk = _integer("chunk", chunk, 1)
        self._known(seq)
        self._shelf(layer)
        self._require_pair(k, v)
        self._require_queries(q)
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"{q.shape[0]} queries for {k.shape[0]} new positions")
        if q.dtype != k.dtype:
            raise TypeError(f"q is {q.dtype}, k and v are {k.dtype}")
        if q.shape[0] == 0:
            return np.empty(q.shape, q.dtype)
        self.append(seq, layer, k, v)
        return _attention(q, *self.view(seq, layer), chunk=chunk)

    def nbytes(self):
        return sum(shelf.nbytes() for shelf in self._shelves)

    # helpers

    def _new_number(self):
        seq = self._next
        self._next += 1
        self._alive.add(seq)
        return seq

    def _known(self, seq):
        is_int = isinstance(seq, numbers.Integral) and not isinstance(seq, bool)
        if not is_int or seq not in self._alive:
            raise KeyError(seq)
        return int(seq)

    def _shelf(self, layer):
        return self._shelves[_integer("layer", layer, 0, len(self._shelves) - 1)]

    def _require_dtype(self, name, dtype):
        if self._dtype is not None and dtype != self._dtype:
            raise TypeError(f"{name} is {dtype} in a cache of {self._dtype}")

    def _require_pair(self, k, v):
        _require_rows("k", k, (None, self._codec.heads, self._codec.width))
        _require_rows("v", v, k.shape)
        if k.dtype != v.dtype:
            raise TypeError(f"k is {k.dtype}, v is {v.dtype}")
        self._require_dtype("k", k.dtype)

    def _require_queries(self, q):
        _require_rows("q", q, (None, None, self._codec.width))
        if q.shape[1] == 0 or q.shape[1] % self._codec.heads:
            raise ValueError(f"{q.shape[1]} heads are no multiple of {self._codec.heads}")
        self._require_dtype("q", q.dtype)


# ---------------------------------------------------------------------------------- entry points

def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind: {kind!r}")
    num_layers = _integer("num_layers", num_layers, 1)
    num_kv_heads = _integer("num_kv_heads", num_kv_heads, 1)
    head_dim = _integer("head_dim", head_dim, 1)
    block_size = _integer("block_size", block_size, 1)
    num_blocks = _integer("num_blocks", num_blocks, 1)
    make_shelf, quantised = KINDS[kind]
    if quantised:
        bits = _integer("bits", bits, 4, 8)
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
        codec = QuantisedCodec(num_kv_heads, head_dim, bits)
    elif bits is not None:
        raise ValueError(f"bits must be None for kind {kind!r}")
    else:
        codec = PlainCodec(num_kv_heads, head_dim)
    return Cache(codec, [make_shelf(block_size, num_blocks) for _ in range(num_layers)])


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    if not isinstance(cache, Cache):
        raise TypeError("cache must come from make_cache")
    return cache.prefill(seq, layer, q, k, v, chunk)


def _exact(name, value):
    """A finite number as a fraction; a float counts as the decimal number that it is written as."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if isinstance(value, numbers.Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return Fraction(repr(float(value)))


def _number(fraction):
    return int(fraction) if fraction.denominator == 1 else float(fraction)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    names = ("num_layers", "num_kv_heads", "head_dim", "bits")
    missing = [name for name in names if name not in spec]
    if missing:
        raise ValueError(f"spec lacks {', '.join(missing)}")
    elements = 2 * math.prod(_integer(name, spec[name], 1) for name in names[:3])
    per_token = Fraction(elements * _integer("bits", spec["bits"], 1), 8)
    share = _exact("utilization", utilization)
    if not 0 < share <= 1:
        raise ValueError(f"utilization must be in (0, 1], not {utilization}")
    sizes = {"gpu_bytes": gpu_bytes, "weight_bytes": weight_bytes, "reserve_bytes": reserve_bytes}
    sizes = {name: _exact(name, value) for name, value in sizes.items()}
    for name, value in sizes.items():
        if value < 0:
            raise ValueError(f"{name} must not be negative")
    budget = share * sizes["gpu_bytes"] - sizes["weight_bytes"] - sizes["reserve_bytes"]
    tokens = max(0, math.floor(budget / per_token))
    return tokens, {"bytes_per_token": _number(per_token), "budget_bytes": _number(budget)}
