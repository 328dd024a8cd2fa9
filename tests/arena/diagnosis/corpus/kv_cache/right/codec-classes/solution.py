"""KV caches out of parts: a codec (how a row is stored), a pool (where), and a strip (whose)."""

import math
import operator

import numpy as np

BLOCK = 128  # queries handled at a time, which bounds the score matrix


def _positive(name, value):
    value = operator.index(value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1")
    return value


def _rows_of(x, name):
    if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be a float32 or float64 array")
    if x.ndim != 3:
        raise ValueError(f"{name} must have three axes")
    return x


class PlainCodec:
    """Stores elements as they are."""

    def __init__(self, dim):
        self.dim = dim

    def planes(self, dtype):
        return [(self.dim, dtype)]

    def encode(self, x):
        return [x]

    def decode(self, planes, dtype):
        return planes[0].astype(dtype)


class IntCodec:
    """Symmetric integers with one float32 scale for each row of D elements."""

    def __init__(self, dim, bits):
        self.dim, self.bits = dim, bits
        self.top = 2 ** (bits - 1) - 1

    def planes(self, dtype):
        return [((self.dim * self.bits + 7) // 8, np.uint8), (1, np.float32)]

    def encode(self, x):
        x = x.astype(np.float64)
        scale = (np.abs(x).max(axis=-1, keepdims=True) / self.top).astype(np.float32)
        safe = np.where(scale > 0, scale, 1).astype(np.float64)
        code = np.clip(np.rint(x / safe), -self.top, self.top).astype(np.int8)
        if self.bits == 8:
            return [code.view(np.uint8), scale]
        nibble = (code + 8).astype(np.uint8)
        if self.dim % 2:
            nibble = np.concatenate([nibble, np.zeros_like(nibble[..., :1])], axis=-1)
        return [nibble[..., 0::2] | (nibble[..., 1::2] << 4), scale]

    def decode(self, planes, dtype):
        packed, scale = planes
        if self.bits == 8:
            code = packed.view(np.int8)
        else:
            code = np.stack([packed & 15, packed >> 4], axis=-1).reshape(
                *packed.shape[:-1], 2 * packed.shape[-1]
            )
            code = code[..., : self.dim].astype(np.int8) - 8
        return code.astype(dtype) * scale.astype(dtype)


class Pool:
    """The storage of one layer: `count` pages of `size` positions each, with reference counts."""

    def __init__(self, count, size):
        self.count, self.size = count, size
        self.refs = np.zeros(count, np.int32)
        self.free = list(range(count))
        self.planes = None

    def prepare(self, planes, heads):
        if self.planes is None:
            self.planes = [np.zeros((self.count, self.size, 2, heads, w), t) for w, t in planes]

    def require(self, pages):
        if pages > len(self.free):
            raise MemoryError("the cache is full")

    def take(self):
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def drop(self, page):
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self.free.append(page)

    def copy(self, page):
        twin = self.take()
        for plane in self.planes:
            plane[twin] = plane[page]
        self.drop(page)
        return twin

    def nbytes(self):
        return sum(p.nbytes for p in self.planes or ()) + self.refs.nbytes + 8 * len(self.free)


class PagedStrip:
    """The positions of one sequence in one layer, in pages."""

    def __init__(self, pool):
        self.pool, self.pages, self.length = pool, [], 0

    def append(self, planes):
        n, size = len(planes[0]), self.pool.size
        fresh = -(-(self.length + n) // size) - len(self.pages)
        split = self.length % size > 0 and self.pool.refs[self.pages[-1]] > 1
        self.pool.require(fresh + int(split))
        if split:
            self.pages[-1] = self.pool.copy(self.pages[-1])
        self.pages += [self.pool.take() for _ in range(fresh)]
        at = np.arange(self.length, self.length + n)
        page = np.asarray(self.pages)[at // size]
        for plane, rows in zip(self.pool.planes, planes, strict=False):
            plane[page, at % size] = rows
        self.length += n

    def gather(self, index):
        page = np.asarray(self.pages, dtype=np.intp)[index // self.pool.size]
        return [plane[page, index % self.pool.size] for plane in self.pool.planes]

    def fork(self):
        twin = PagedStrip(self.pool)
        twin.pages, twin.length = list(self.pages), self.length
        self.pool.refs[self.pages] += 1
        return twin

    def fork_cost(self):
        return 0

    def keep_cost(self, n):
        own = sum(1 for page in self.pages if self.pool.refs[page] == 1)
        return -(-n // self.pool.size) - own

    def keep(self, index):
        if self.length == 0:
            return
        planes = self.gather(index)
        self.cut(0)
        if len(index):
            self.append(planes)

    def cut(self, n):
        pages = -(-n // self.pool.size)
        for page in self.pages[pages:]:
            self.pool.drop(page)
        del self.pages[pages:]
        self.length = min(self.length, n)

    def nbytes(self):
        return 8 * len(self.pages)


class DensePool:
    """Counts the positions of one layer; the strips own the arrays."""

    def __init__(self, count, size):
        self.left = count * size
        self.capacity = count * size
        self.spec = None

    def prepare(self, planes, heads):
        self.spec = [((2, heads, w), t) for w, t in planes]

    def require(self, positions):
        if positions > self.left:
            raise MemoryError("the cache is full")

    def nbytes(self):
        return 16


class DenseStrip:
    """The positions of one sequence in one layer, in one growing buffer."""

    def __init__(self, pool):
        self.pool, self.length, self.buffers = pool, 0, None

    def _reserve(self, total):
        have = 0 if self.buffers is None else len(self.buffers[0])
        if total <= have:
            return
        room = min(self.pool.capacity, max(total, have + have // 4))
        grown = [np.zeros((room, *shape), t) for shape, t in self.pool.spec]
        for new, old in zip(grown, self.buffers or (), strict=False):
            new[: self.length] = old[: self.length]
        self.buffers = grown

    def append(self, planes):
        n = len(planes[0])
        self.pool.require(n)
        self._reserve(self.length + n)
        for buffer, rows in zip(self.buffers, planes, strict=False):
            buffer[self.length : self.length + n] = rows
        self.length += n
        self.pool.left -= n

    def gather(self, index):
        return [buffer[index] for buffer in self.buffers]

    def fork(self):
        twin = DenseStrip(self.pool)
        if self.length:
            twin.append(self.gather(np.arange(self.length)))
        return twin

    def fork_cost(self):
        return self.length

    def keep_cost(self, n):
        return 0

    keep = PagedStrip.keep

    def cut(self, n):
        self.pool.left += max(0, self.length - n)
        self.length = min(self.length, n)
        if n == 0:
            self.buffers = None

    def nbytes(self):
        return sum(b.nbytes for b in self.buffers or ())


class Cache:
    """Many sequences over the same pools, one pool a layer."""

    def __init__(self, codec, strip, pools, heads, dim):
        self.codec, self.strip, self.pools = codec, strip, pools
        self.heads, self.dim = heads, dim
        self.dtype = None
        self.seqs = {}
        self.next = 0

    def _strip(self, seq, layer):
        strips = self.seqs[seq]
        layer = operator.index(layer)
        if not 0 <= layer < len(self.pools):
            raise ValueError(f"no layer {layer}")
        return strips[layer]

    def _register(self, strips):
        seq, self.next = self.next, self.next + 1
        self.seqs[seq] = strips
        return seq

    def add(self):
        return self._register([self.strip(pool) for pool in self.pools])

    def append(self, seq, layer, k, v):
        strip = self._strip(seq, layer)
        _rows_of(k, "k"), _rows_of(v, "v")
        if k.dtype != v.dtype or self.dtype not in (None, k.dtype):
            raise TypeError("dtypes differ")
        if k.shape != v.shape or k.shape[1:] != (self.heads, self.dim) or len(k) == 0:
            raise ValueError("k and v must be (n, G, D)")
        strip.pool.prepare(self.codec.planes(k.dtype), self.heads)
        strip.append(self.codec.encode(np.stack([k, v], axis=1)))
        self.dtype = k.dtype

    def view(self, seq, layer):
        strip = self._strip(seq, layer)
        if strip.length == 0:
            empty = np.zeros((0, self.heads, self.dim), self.dtype or np.float32)
            return empty, empty.copy()
        both = self.codec.decode(strip.gather(np.arange(strip.length)), self.dtype)
        return both[:, 0].copy(), both[:, 1].copy()

    def check_queries(self, q):
        _rows_of(q, "q")
        if q.shape[2] != self.dim or q.shape[1] % self.heads or q.shape[1] == 0:
            raise ValueError("q must be (n, H, D) with H a multiple of G")

    def attend(self, seq, layer, q):
        held = self._strip(seq, layer).length
        self.check_queries(q)
        if len(q) > held:
            raise ValueError("more queries than positions")
        return self.attend_from(seq, layer, q, held - len(q))

    def attend_from(self, seq, layer, q, start):
        """Attention of queries that stand at positions start, start + 1, ..."""
        n, heads, dim = q.shape
        out = np.empty((n, heads, dim), q.dtype)
        k, v = self.view(seq, layer)
        k, v = k.transpose(1, 2, 0), v.transpose(1, 0, 2)
        for a in range(0, n, BLOCK):
            b = min(n, a + BLOCK)
            end = start + b
            hidden = np.arange(end) > (start + np.arange(a, b))[:, None]
            for g in range(self.heads):
                group = slice(g * heads // self.heads, (g + 1) * heads // self.heads)
                part = q[a:b, group].transpose(1, 0, 2) * dim**-0.5
                s = part @ k[g, :, :end]
                s[:, hidden] = -np.inf
                s -= s.max(axis=-1, keepdims=True)
                np.exp(s, out=s)
                s /= s.sum(axis=-1, keepdims=True)
                out[a:b, group] = (s @ v[g, :end]).transpose(1, 0, 2)
        return out

    def fork(self, seq):
        strips = self.seqs[seq]
        for strip in strips:
            if strip.fork_cost():
                strip.pool.require(strip.fork_cost())
        return self._register([strip.fork() for strip in strips])

    def keep(self, seq, indices):
        strips = self.seqs[seq]
        chosen = [operator.index(i) for i in indices]
        limit = self.length(seq)
        if len(set(chosen)) != len(chosen) or any(not 0 <= i < limit for i in chosen):
            raise ValueError("indices must be different positions of the sequence")
        for strip in strips:
            strip.pool.require(strip.keep_cost(len(chosen)))
        for strip in strips:
            strip.keep(np.array(chosen, dtype=np.intp))

    def truncate(self, seq, n):
        strips = self.seqs[seq]
        n = operator.index(n)
        if not 0 <= n <= self.length(seq):
            raise ValueError(f"cannot keep {n} positions")
        for strip in strips:
            strip.cut(n)

    def free(self, seq):
        for strip in self.seqs.pop(seq):
            strip.cut(0)

    def length(self, seq):
        return min(strip.length for strip in self.seqs[seq])

    def nbytes(self):
        pools = sum(pool.nbytes() for pool in self.pools)
        return int(pools + sum(s.nbytes() for strips in self.seqs.values() for s in strips))


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind {kind!r}")
    layers = _positive("num_layers", num_layers)
    heads = _positive("num_kv_heads", num_kv_heads)
    dim = _positive("head_dim", head_dim)
    size = _positive("block_size", block_size)
    count = _positive("num_blocks", num_blocks)
    if kind in ("quantized", "paged_quantized"):
        if bits not in (4, 8):
            raise ValueError("bits must be 4 or 8")
        codec = IntCodec(dim, bits)
    else:
        if bits is not None:
            raise ValueError("bits are for quantised kinds")
        codec = PlainCodec(dim)
    strip, pool = (PagedStrip, Pool) if kind.startswith("paged") else (DenseStrip, DensePool)
    return Cache(codec, strip, [pool(count, size) for _ in range(layers)], heads, dim)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    start = cache._strip(seq, layer).length
    cache.check_queries(q)
    step = min(_positive("chunk", chunk), BLOCK * 4)
    _rows_of(k, "k"), _rows_of(v, "v")
    if (
        not len(q) == len(k) == len(v)
        or k.shape[1:] != (cache.heads, cache.dim)
        or k.shape != v.shape
    ):
        raise ValueError("q, k and v do not fit")
    if k.dtype != v.dtype:
        raise TypeError("dtypes differ")
    out = np.empty(q.shape, q.dtype)
    if len(q):
        cache.append(seq, layer, k, v)  # all or nothing
    for a in range(0, len(q), step):
        out[a : a + step] = cache.attend_from(seq, layer, q[a : a + step], start + a)
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    try:
        sizes = [
            _positive(key, spec[key]) for key in ("num_layers", "num_kv_heads", "head_dim", "bits")
        ]
    except KeyError as error:
        raise ValueError(f"spec lacks {error}") from None
    if not 0 < utilization <= 1:
        raise ValueError("utilization must be in (0, 1]")
    if not (gpu_bytes >= 0 and weight_bytes >= 0 and reserve_bytes >= 0):
        raise ValueError("bytes must not be negative")
    per_token = 2 * math.prod(sizes) / 8
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, int(budget // per_token))
    return tokens, {"bytes_per_token": per_token, "budget_bytes": budget}
