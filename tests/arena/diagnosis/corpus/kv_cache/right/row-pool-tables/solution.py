"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

Every layer owns one pool of rows.  A sequence is, per layer, a table of page numbers and a length;
position p of it lies in row  table[p // block] * block + p % block  of the pool.  The dense kinds are
the same thing with pages of one position.  Forks share pages and copy the last one when they write.
"""

from collections.abc import Mapping
from numbers import Real
import math

import numpy as np

KINDS = ("dense", "paged", "quantized", "paged_quantized")
QUERY_BLOCK = 128  # queries that are scored at a time: scores take QUERY_BLOCK * S, not n * S


# ---------------------------------------------------------------- checks


def as_int(value, name, low, high=None):
    """`value` as an int in [low, high), or TypeError / ValueError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < low or (high is not None and value >= high):
        raise ValueError(f"{name} = {value} is out of range")
    return int(value)


def check_array(array, name, tail):
    """`array` must be a float array of three axes that ends in the shape `tail` (None: any size)."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array")
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if array.ndim != 3:
        raise ValueError(f"{name} must have three axes, not {array.ndim}")
    for size, wanted in zip(array.shape[1:], tail):
        if wanted is not None and size != wanted:
            raise ValueError(f"{name} has shape {array.shape}, which does not fit (n, *{tail})")


# ---------------------------------------------------------------- how rows are stored


class PlainCodec:
    """Rows as they are."""

    def encode(self, rows):
        return (rows,)

    def decode(self, parts, dtype):
        (rows,) = parts
        return rows.astype(dtype, copy=False)


class QuantCodec:
    """Rows as signed integers of 8 or 4 bits and one float32 scale a row."""

    def __init__(self, bits, head_dim):
        self.bits = bits
        self.head_dim = head_dim
        self.top = 2 ** (bits - 1) - 1

    def encode(self, rows):
        rows = rows.astype(np.float64)
        scales = (np.abs(rows).max(axis=-1) / self.top).astype(np.float32)
        divisor = np.where(scales > 0, scales, 1).astype(np.float64)
        codes = np.rint(rows / divisor[..., None]).clip(-self.top, self.top).astype(np.int8)
        return (self._pack(codes), scales)

    def decode(self, parts, dtype):
        packed, scales = parts
        return self._unpack(packed).astype(dtype) * scales[..., None].astype(dtype)

    def _pack(self, codes):
        if self.bits == 8:
            return codes
        nibbles = (codes + 8).astype(np.uint8)
        if self.head_dim % 2:
            nibbles = np.concatenate([nibbles, np.zeros_like(nibbles[..., :1])], axis=-1)
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)

    def _unpack(self, packed):
        if self.bits == 8:
            return packed
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
        nibbles = nibbles.reshape(*packed.shape[:-1], -1)[..., : self.head_dim]
        return nibbles.astype(np.int8) - 8


# ---------------------------------------------------------------- the pool of one layer


class LayerPool:
    """The rows of one layer, and which pages of them are taken."""

    def __init__(self, block, pages):
        self.block = block
        self.pages = pages
        self.fresh = 0  # pages below this number were handed out at least once
        self.returned = []  # of those, the ones that came back
        self.extra = {}  # owners beyond the first, for pages that have any
        self.parts = None  # the arrays of rows, as the codec makes them

    def room(self):
        return self.pages - self.fresh + len(self.returned)

    def take(self, count):
        """The numbers of `count` free pages; the caller has looked at room()."""
        reused = [self.returned.pop() for _ in range(min(count, len(self.returned)))]
        first = self.fresh
        self.fresh += count - len(reused)
        return np.array(reused + list(range(first, self.fresh)), dtype=np.int32)

    def share(self, table):
        for page in table.tolist():
            self.extra[page] = self.extra.get(page, 0) + 1

    def release(self, table):
        for page in table.tolist():
            others = self.extra.pop(page, 0)
            if others > 1:
                self.extra[page] = others - 1
            elif others == 0:
                self.returned.append(page)

    def owned_alone(self, table):
        return sum(page not in self.extra for page in table.tolist())

    def get(self, rows):
        return tuple(part[rows] for part in self.parts)

    def put(self, rows, parts):
        self._grow(parts)
        for stored, part in zip(self.parts, parts):
            stored[rows] = part

    def _grow(self, like):
        """Make the arrays long enough for all pages in use: twice as long, up to the whole pool."""
        if self.parts is None:
            self.parts = tuple(np.empty((0, *part.shape[1:]), part.dtype) for part in like)
        held, needed = len(self.parts[0]), self.fresh * self.block
        if needed <= held:
            return
        size = min(self.pages * self.block, max(needed, 2 * held))
        grown = tuple(np.zeros((size, *part.shape[1:]), part.dtype) for part in self.parts)
        for new, old in zip(grown, self.parts):
            new[:held] = old
        self.parts = grown

    def nbytes(self):
        rows = sum(part.nbytes for part in self.parts or ())
        return rows + 8 * len(self.returned) + 16 * len(self.extra)


class Run:
    """What one sequence holds in one layer: pages, and how many positions in them."""

    def __init__(self, table=None, length=0):
        self.table = np.zeros(0, np.int32) if table is None else table
        self.length = length

    def rows(self, positions, block):
        return self.table[positions // block].astype(np.int64) * block + positions % block


# ---------------------------------------------------------------- the cache


class Cache:
    def __init__(self, layers, heads, width, block, pages, codec):
        self.heads = heads
        self.width = width
        self.block = block
        self.codec = codec
        self.dtype = None
        self.pools = [LayerPool(block, pages) for _ in range(layers)]
        self.sequences = {}
        self.next_seq = 0

    # -- sequences

    def add(self):
        return self._enter([Run() for _ in self.pools])

    def fork(self, seq):
        runs = self._runs(seq)
        for pool, run in zip(self.pools, runs):
            pool.share(run.table)
        return self._enter([Run(run.table.copy(), run.length) for run in runs])

    def free(self, seq):
        runs = self._runs(seq)
        for pool, run in zip(self.pools, runs):
            pool.release(run.table)
        del self.sequences[int(seq)]

    def length(self, seq):
        return min(run.length for run in self._runs(seq))

    def _enter(self, runs):
        seq = self.next_seq
        self.next_seq += 1
        self.sequences[seq] = runs
        return seq

    def _runs(self, seq):
        seq = as_int(seq, "seq", -math.inf)
        if seq not in self.sequences:
            raise KeyError(seq)
        return self.sequences[seq]

    def _locate(self, seq, layer):
        runs = self._runs(seq)
        layer = as_int(layer, "layer", 0, len(self.pools))
        return self.pools[layer], runs[layer]

    # -- rows in

    def check_rows(self, k, v):
        for array, name in ((k, "k"), (v, "v")):
            check_array(array, name, (self.heads, self.width))
        if k.shape != v.shape:
            raise ValueError("k and v have different shapes")
        self._check_dtype(k.dtype)
        if k.dtype != v.dtype:
            raise TypeError("k and v have different dtypes")

    def _check_dtype(self, dtype):
        if self.dtype is not None and dtype != self.dtype:
            raise TypeError(f"the cache holds {self.dtype}, not {dtype}")

    def _writes_to_shared(self, pool, run):
        """Does the next position go to a page that has other owners?"""
        return run.length % self.block > 0 and int(run.table[-1]) in pool.extra

    def check_room(self, seq, layer, count):
        """MemoryError unless `count` more positions fit."""
        pool, run = self._locate(seq, layer)
        needed = -(-(run.length + count) // self.block) - len(run.table)
        needed += self._writes_to_shared(pool, run)
        if count and needed > pool.room():
            raise MemoryError(f"{needed} pages needed, {pool.room()} free")

    def append(self, seq, layer, k, v):
        pool, run = self._locate(seq, layer)
        self.check_rows(k, v)
        count = len(k)
        if count == 0:
            raise ValueError("nothing to append")
        self.check_room(seq, layer, count)
        parts = self.codec.encode(k) + self.codec.encode(v)
        if self._writes_to_shared(pool, run):
            self._own_last_page(pool, run)
        missing = -(-(run.length + count) // self.block) - len(run.table)
        run.table = np.concatenate([run.table, pool.take(missing)])
        rows = run.rows(np.arange(run.length, run.length + count), self.block)
        pool.put(rows, parts)
        run.length += count
        self.dtype = k.dtype

    def _own_last_page(self, pool, run):
        used = np.arange(run.length - run.length % self.block, run.length)
        parts = pool.get(run.rows(used, self.block))
        pool.release(run.table[-1:])
        run.table[-1:] = pool.take(1)
        pool.put(run.rows(used, self.block), parts)

    # -- rows out

    def view(self, seq, layer):
        pool, run = self._locate(seq, layer)
        if run.length == 0:
            shape = (0, self.heads, self.width)
            dtype = self.dtype or np.dtype(np.float32)
            return np.zeros(shape, dtype), np.zeros(shape, dtype)
        parts = pool.get(run.rows(np.arange(run.length), self.block))
        half = len(parts) // 2
        return self.codec.decode(parts[:half], self.dtype), self.codec.decode(parts[half:], self.dtype)

    def check_queries(self, q):
        check_array(q, "q", (None, self.width))
        self._check_dtype(q.dtype)
        if q.shape[1] == 0 or q.shape[1] % self.heads:
            raise ValueError(f"{q.shape[1]} query heads are no multiple of {self.heads} kv heads")

    def attend(self, seq, layer, q):
        _, run = self._locate(seq, layer)
        self.check_queries(q)
        if len(q) > run.length:
            raise ValueError(f"{len(q)} queries, but only {run.length} positions")
        return attention(q, *self.view(seq, layer))

    # -- fewer rows

    def truncate(self, seq, n):
        runs = self._runs(seq)
        n = as_int(n, "n", 0, self.length(seq) + 1)
        pages = -(-n // self.block)
        for pool, run in zip(self.pools, runs):
            pool.release(run.table[pages:])
            run.table, run.length = run.table[:pages].copy(), n

    def keep(self, seq, indices):
        runs = self._runs(seq)
        length = self.length(seq)
        chosen = [as_int(index, "index", 0, length) for index in indices]
        if len(set(chosen)) < len(chosen):
            raise ValueError("indices must be different")
        if chosen == list(range(len(chosen))):
            self.truncate(seq, len(chosen))
            return
        positions = np.array(chosen)
        if self.block == 1:
            self._keep_pages(runs, positions)
        else:
            self._move_rows(runs, positions)

    def _keep_pages(self, runs, positions):
        for pool, run in zip(self.pools, runs):
            pool.release(np.delete(run.table, positions))
            run.table, run.length = run.table[positions], len(positions)

    def _move_rows(self, runs, positions):
        pages = -(-len(positions) // self.block)
        for pool, run in zip(self.pools, runs):
            if pages > pool.room() + pool.owned_alone(run.table):
                raise MemoryError("no room for the rows of shared pages")
        for pool, run in zip(self.pools, runs):
            parts = pool.get(run.rows(positions, self.block))
            pool.release(run.table)
            run.table, run.length = pool.take(pages), len(positions)
            pool.put(run.rows(np.arange(run.length), self.block), parts)

    def nbytes(self):
        tables = sum(run.table.nbytes for runs in self.sequences.values() for run in runs)
        return tables + sum(pool.nbytes() for pool in self.pools)


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    layers = as_int(num_layers, "num_layers", 1)
    heads = as_int(num_kv_heads, "num_kv_heads", 1)
    width = as_int(head_dim, "head_dim", 1)
    block = as_int(block_size, "block_size", 1)
    blocks = as_int(num_blocks, "num_blocks", 1)
    if kind.endswith("quantized"):
        if as_int(bits, "bits", 1) not in (4, 8):
            raise ValueError("bits must be 8 or 4")
        codec = QuantCodec(int(bits), width)
    else:
        if bits is not None:
            raise ValueError(f"a {kind} cache has no bits")
        codec = PlainCodec()
    if not kind.startswith("paged"):
        block, blocks = 1, block * blocks
    return Cache(layers, heads, width, block, blocks, codec)


# ---------------------------------------------------------------- attention


def attention(q, k, v):
    """Causal attention of q (n, H, D), the last n of the S positions of k and v (S, G, D), in float64."""
    count, heads, width = q.shape
    seen, groups, _ = k.shape
    ratio = heads // groups
    keys = k.astype(np.float64).transpose(1, 2, 0)
    values = v.astype(np.float64).transpose(1, 0, 2)
    out = np.empty(q.shape, q.dtype)
    for start in range(0, count, QUERY_BLOCK):
        block = q[start : start + QUERY_BLOCK].astype(np.float64) * width**-0.5
        rows = len(block)
        last = seen - count + start + np.arange(rows)
        hidden = np.arange(seen) > last[:, None]
        for group in range(groups):
            mine = slice(group * ratio, (group + 1) * ratio)
            for head in range(mine.start, mine.stop):
                scores = block[:, head] @ keys[group]
                scores[hidden] = -np.inf
                scores -= scores.max(axis=1, keepdims=True)
                np.exp(scores, out=scores)
                mixed = scores @ values[group]
                out[start : start + rows, head] = mixed / scores.sum(axis=1, keepdims=True)
    return out


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    chunk = as_int(chunk, "chunk", 1)
    cache.check_room(seq, layer, 0)
    cache.check_rows(k, v)
    cache.check_queries(q)
    if q.dtype != k.dtype:
        raise TypeError("q and k have different dtypes")
    total = len(k)
    if len(q) != total:
        raise ValueError(f"{len(q)} queries for {total} positions")
    cache.check_room(seq, layer, total)
    out = np.empty(q.shape, q.dtype)
    for start in range(0, total, chunk):
        part = slice(start, start + chunk)
        cache.append(seq, layer, k[part], v[part])
        out[part] = cache.attend(seq, layer, q[part])
    return out


# ---------------------------------------------------------------- how much fits


def as_number(value, name):
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite")
    return value


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    names = ("num_layers", "num_kv_heads", "head_dim", "bits")
    for name in names:
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
    elements = 2 * math.prod(as_int(spec[name], name, 1) for name in names[:3])
    bytes_per_token = elements * as_int(spec["bits"], "bits", 1) / 8
    share = as_number(utilization, "utilization")
    if not 0 < share <= 1:
        raise ValueError("utilization must be in (0, 1]")
    amounts = {"gpu_bytes": gpu_bytes, "weight_bytes": weight_bytes, "reserve_bytes": reserve_bytes}
    for name, value in amounts.items():
        if as_number(value, name) < 0:
            raise ValueError(f"{name} must not be negative")
    budget = share * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, int(budget // bytes_per_token))
    return tokens, {"bytes_per_token": bytes_per_token, "budget_bytes": budget, **amounts}
