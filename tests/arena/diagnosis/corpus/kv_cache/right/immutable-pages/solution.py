"""KV caches as immutable values.

A page is a tuple of arrays that nobody ever writes to again, a layer is a tuple of pages and a
length, a sequence a tuple of layers. Every change builds the new state first, counts its room and
only then becomes the state.
"""

from itertools import chain
from math import prod
from operator import index as as_int

import numpy as np

KINDS = {"dense": (0, 0), "paged": (1, 0), "quantized": (0, 1), "paged_quantized": (1, 1)}
ROWS = 64


def _float_array(x, heads, dim, multiple=False):
    if getattr(x, "dtype", None) not in (np.dtype("f4"), np.dtype("f8")):
        raise TypeError("float32 or float64 arrays only")
    if x.ndim != 3 or x.shape[2] != dim or x.shape[1] == 0:
        raise ValueError(f"bad shape {x.shape}")
    if x.shape[1] % heads if multiple else x.shape[1] != heads:
        raise ValueError(f"bad number of heads in {x.shape}")
    return x


def _at_least_one(**sizes):
    for name, value in sizes.items():
        if as_int(value) < 1:
            raise ValueError(f"{name} < 1")


# ---- rows: a page is a tuple of the parts of k and those of v, with the positions on axis 0


def pack(x, bits):
    """The stored parts of x (n,G,D)."""
    if not bits:
        return (np.array(x),)
    top = 2 ** (bits - 1) - 1
    peak = np.abs(x).max(axis=2, keepdims=True).astype(np.float64)
    step = peak / top
    codes = np.rint(np.divide(x, step, out=np.zeros(x.shape), where=step > 0))
    codes = np.clip(codes, -top, top)
    if bits == 8:
        return codes.astype(np.int8), step.astype(np.float32)
    codes = (codes + 8).astype(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, 0), (0, x.shape[2] % 2)))
    return codes[:, :, ::2] + 16 * codes[:, :, 1::2], step.astype(np.float32)


def unpack(parts, bits, dim, dtype):
    """x (n,G,D) of its stored parts."""
    if not bits:
        return parts[0].astype(dtype)
    codes, step = parts
    if bits == 4:
        wide = np.empty((*codes.shape[:2], 2 * codes.shape[2]), np.int16)
        wide[:, :, ::2] = codes % 16
        wide[:, :, 1::2] = codes // 16
        codes = wide[:, :, :dim] - 8
    return (codes * step.astype(np.float64)).astype(dtype)


def join(pages):
    """One page that holds the rows of all."""
    return tuple(map(np.concatenate, zip(*pages, strict=False)))


def select(page, rows):
    """The rows of a page, as a page of its own."""
    return tuple(np.array(part[rows]) for part in page)


def split(page, step):
    return tuple(select(page, slice(a, a + step)) for a in range(0, len(page[0]), step))


# ---- layers: (pages, n), where the last page may hold rows beyond n that are no longer wanted

EMPTY = ((), 0)


def extend(layer, page, step):
    """The layer plus the rows of page; a last page that is not full is replaced, never changed."""
    pages, n = layer
    used = n % step
    longer = n + len(page[0])
    if used:
        return pages[:-1] + split(join([select(pages[-1], slice(used)), page]), step), longer
    return pages + split(page, step), longer


def head(layer, n, step):
    """The first n rows; pages stay the objects they are."""
    return layer[0][: -(-n // step)], n


def softmax_average(q, k, v, first):
    """q (n,H,D) at positions first...; k, v (S,G,D)."""
    n, heads, dim = q.shape
    groups = k.shape[1]
    kt = np.ascontiguousarray(np.moveaxis(k, 0, 2))
    vt = np.ascontiguousarray(np.moveaxis(v, 0, 1))
    result = np.zeros((n, heads, dim), q.dtype)
    for a in range(0, n, ROWS):
        rows = q[a : a + ROWS]
        reach = first + a + len(rows)
        folded = np.moveaxis(rows, 0, 1).reshape(groups, -1, dim)  # (G, H/G * rows, D)
        s = (folded * dim**-0.5) @ kt[:, :, :reach]
        s = s.reshape(heads, len(rows), reach)
        s += np.triu(np.full((len(rows), reach), -np.inf, q.dtype), first + a + 1)
        p = np.exp(s - s.max(-1, keepdims=True))
        mixed = p.reshape(groups, -1, reach) @ vt[:, :reach]
        mixed = mixed.reshape(heads, len(rows), dim) / p.sum(-1, keepdims=True)
        result[a : a + ROWS] = np.moveaxis(mixed, 0, 1)
    return result


class Cache:
    """The only thing that changes is which state is the present one."""

    def __init__(self, paged, bits, layers, heads, dim, block, blocks):
        self.paged, self.bits = paged, bits
        self.layers, self.heads, self.dim = layers, heads, dim
        self.step = block if paged else block * blocks
        self.room = blocks if paged else block * blocks
        self.state, self.dtype, self.count = {}, None, 0

    def _used(self, state, layer):
        if self.paged:
            return len({id(page) for seq in state.values() for page in seq[layer][0]})
        return sum(seq[layer][1] for seq in state.values())

    def _commit(self, seq, layers):
        state = {**self.state, seq: tuple(layers)}
        if any(self._used(state, i) > self.room for i in range(self.layers)):
            raise MemoryError("no room")
        self.state = state

    def _layer(self, seq, layer):
        layers = self.state[seq]
        if not 0 <= as_int(layer) < self.layers:
            raise ValueError("layer out of range")
        return layers[layer]

    def _new(self, layers):
        self._commit(self.count, layers)
        self.count += 1
        return self.count - 1

    def add(self):
        return self._new((EMPTY,) * self.layers)

    def fork(self, seq):
        return self._new(self.state[seq])

    def append(self, seq, layer, k, v):
        before = self._layer(seq, layer)
        _float_array(k, self.heads, self.dim)
        _float_array(v, self.heads, self.dim)
        if k.dtype != v.dtype or (self.dtype or k.dtype) != k.dtype:
            raise TypeError("mixed dtypes")
        if k.shape != v.shape or not len(k):
            raise ValueError("k and v must hold the same positions, at least one")
        layers = list(self.state[seq])
        layers[layer] = extend(before, pack(k, self.bits) + pack(v, self.bits), self.step)
        self._commit(seq, layers)
        self.dtype = k.dtype

    def view(self, seq, layer):
        pages, n = self._layer(seq, layer)
        if not n:
            return tuple(np.zeros((2, 0, self.heads, self.dim), self.dtype or np.float32))
        parts = [part[:n] for part in join(pages)]
        half = len(parts) // 2
        return tuple(
            unpack(p, self.bits, self.dim, self.dtype) for p in (parts[:half], parts[half:])
        )

    def attend(self, seq, layer, q):
        k, v = self.view(seq, layer)
        _float_array(q, self.heads, self.dim, multiple=True)
        if len(q) > len(k):
            raise ValueError("more queries than positions")
        return softmax_average(q, k, v, len(k) - len(q))

    def keep(self, seq, indices):
        layers = self.state[seq]
        rows = np.array([as_int(i) for i in indices], dtype=int)
        if len(np.unique(rows)) < len(rows) or ((rows < 0) | (rows >= self.length(seq))).any():
            raise ValueError("indices must be different and in range")
        if len(rows):
            kept = [(split(select(join(pages), rows), self.step), len(rows)) for pages, _ in layers]
        else:
            kept = [EMPTY] * self.layers
        self._commit(seq, kept)

    def truncate(self, seq, n):
        layers = self.state[seq]
        if not 0 <= as_int(n) <= self.length(seq):
            raise ValueError("n out of range")
        self._commit(seq, [head(layer, n, self.step) for layer in layers])

    def free(self, seq):
        self.state[seq]
        self.state = {other: layers for other, layers in self.state.items() if other != seq}

    def length(self, seq):
        return min(n for _, n in self.state[seq])

    def nbytes(self):
        tables = [pages for layers in self.state.values() for pages, _ in layers]
        distinct = {id(page): page for page in chain.from_iterable(tables)}
        rows = sum(part.nbytes for page in distinct.values() for part in page)
        return rows + 8 * sum(map(len, tables))


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    sizes = {"layers": num_layers, "heads": num_kv_heads, "dim": head_dim}
    sizes |= {"block": block_size, "blocks": num_blocks}
    _at_least_one(**sizes)
    paged, quantized = KINDS[kind]
    if bits not in ((4, 8) if quantized else (None,)):
        raise ValueError(f"bits {bits!r} do not fit {kind}")
    return Cache(paged, bits, **sizes)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    cache._layer(seq, layer)
    _at_least_one(chunk=chunk)
    _float_array(q, cache.heads, cache.dim, multiple=True)
    _float_array(k, cache.heads, cache.dim)
    _float_array(v, cache.heads, cache.dim)
    if not len(q) == len(k) == len(v):
        raise ValueError("q, k and v must have one length")
    before = cache.state, cache.dtype
    out = np.empty(q.shape, q.dtype)
    try:
        for a in range(0, len(q), chunk):
            now = slice(a, a + chunk)
            cache.append(seq, layer, k[now], v[now])
            out[now] = cache.attend(seq, layer, q[now])
    except BaseException:
        cache.state, cache.dtype = before
        raise
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    names = ("num_layers", "num_kv_heads", "head_dim", "bits")
    if any(name not in spec for name in names):
        raise ValueError(f"spec needs {names}")
    _at_least_one(**{name: spec[name] for name in names})
    if not (utilization > 0 and utilization <= 1):
        raise ValueError("utilization must be in (0, 1]")
    if min(gpu_bytes, weight_bytes, reserve_bytes) < 0:
        raise ValueError("bytes must be >= 0")
    bits_per_token = 2 * prod(int(spec[name]) for name in names)
    budget = utilization * gpu_bytes - (weight_bytes + reserve_bytes)
    tokens = int((8 * budget) // bits_per_token)
    terms = {"bytes_per_token": bits_per_token / 8, "budget_bytes": budget}
    return max(tokens, 0), terms
