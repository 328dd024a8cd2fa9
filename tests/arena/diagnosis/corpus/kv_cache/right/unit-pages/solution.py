"""KV caches: dense, paged, quantised; chunked prefill; maximal context. See prompt.md.

One allocator serves all four kinds: a dense cache is a paged one whose pages hold a single position.
Every layer has a pool of its own; a sequence owns one array of page numbers (a table) per layer. A
codec turns rows into what the pool stores and back, so moving stored rows never encodes them again.
"""

import math
import operator
from array import array
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real

import numpy as np

QUERY_ROWS = 64  # queries that are scored at a time: bounds the score matrix


# ---------------------------------------------------------------- checking input


def _whole(name, value, least, most=None):
    """`value` as a Python int in [least, most]."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, not a bool")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} is out of range: {number}")
    return number


def _rows(name, values):
    """`values` as a float array of three axes."""
    values = np.asarray(values)
    if values.dtype.kind != "f" or values.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} must be float32 or float64, not {values.dtype}")
    if values.ndim != 3:
        raise ValueError(f"{name} must have three axes, not {values.ndim}")
    return values


def _index_array(indices, length):
    """`indices` as an int64 array of different numbers in [0, length)."""
    if not isinstance(indices, np.ndarray):
        indices = list(indices)
    found = np.asarray(indices)
    if found.ndim != 1:
        raise ValueError("indices must be a flat list")
    if found.size == 0:
        return np.zeros(0, dtype=np.int64)
    if found.dtype.kind not in "iu":
        raise TypeError("indices must be ints")
    if found.min() < 0 or found.max() >= length:
        raise ValueError("an index is out of range")
    found = found.astype(np.int64)
    if np.unique(found).size != found.size:
        raise ValueError("indices must be different")
    return found


# ---------------------------------------------------------------- codecs: rows <-> stored parts


class PlainCodec:
    """Rows as they are."""

    def __init__(self, heads, width):
        self.heads, self.width = heads, width

    def empty(self, positions, dtype):
        """Storage for one tensor: a list of arrays with a row for each position."""
        return [np.empty((positions, self.heads, self.width), dtype=dtype)]

    def encode(self, rows):
        """The parts to store for rows (n, G, D)."""
        return [rows]

    def decode(self, parts, dtype):
        """Rows (n, G, D) from stored parts."""
        return parts[0].astype(dtype, copy=False)


class ScaledCodec:
    """Signed codes of 8 or 4 bits, and one float32 step for each position and head."""

    def __init__(self, heads, width, bits):
        self.heads, self.width, self.bits = heads, width, bits
        self.top = 2 ** (bits - 1) - 1

    def empty(self, positions, dtype):
        """Storage for one tensor: packed codes and steps (dtype is that of the rows)."""
        code_bytes = -(-self.width * self.bits // 8)
        codes = np.empty((positions, self.heads, code_bytes), dtype=np.uint8)
        steps = np.empty((positions, self.heads), dtype=np.float32)
        return [codes, steps]

    def encode(self, rows):
        """Packed codes and steps of rows (n, G, D)."""
        rows = rows.astype(np.float64)
        steps = (np.abs(rows).max(axis=-1) / self.top).astype(np.float32)
        divisor = np.where(steps > 0, steps, 1).astype(np.float64)
        codes = np.rint(rows / divisor[..., None]).clip(-self.top, self.top).astype(np.int8)
        codes = codes.view(np.uint8)
        if self.bits == 4:
            if self.width % 2:
                codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
            codes = (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)
        return [codes, steps]

    def decode(self, parts, dtype):
        """Rows (n, G, D) from packed codes and steps."""
        codes, steps = parts
        if self.bits == 4:
            low, high = codes << 4, codes
            count, heads, code_bytes = codes.shape
            codes = np.stack([low, high], axis=-1).reshape(count, heads, 2 * code_bytes)
            signed = codes[..., : self.width].view(np.int8) >> 4
        else:
            signed = codes.view(np.int8)
        return signed.astype(dtype) * steps[..., None].astype(dtype)


# ---------------------------------------------------------------- the pool of one layer


class Pool:
    """Pages of one layer: stored rows, free pages, and who holds a page more than once."""

    def __init__(self, codec, pages, page_size):
        self.codec, self.pages, self.page_size = codec, pages, page_size
        self.fresh = 0  # pages from here on were never handed out
        self.returned = array("i")  # pages that came back
        self.extra_holders = {}  # page -> holders beyond the first, for shared pages only
        self.tensors = None  # the parts of k and the parts of v, made at the first append
        self.dtype = np.dtype(np.float32)

    def room(self):
        """Pages that are free."""
        return self.pages - self.fresh + len(self.returned)

    def take(self, count):
        """`count` free pages; the caller has looked at room()."""
        taken = []
        for _ in range(count):
            if self.returned:
                taken.append(self.returned.pop())
            else:
                taken.append(self.fresh)
                self.fresh += 1
        return np.array(taken, dtype=np.int32)

    def hold(self, pages):
        """One more holder for each of the pages."""
        for page in pages.tolist():
            self.extra_holders[page] = self.extra_holders.get(page, 0) + 1

    def release(self, pages):
        """One holder fewer for each of the pages; a page without holders is free."""
        for page in pages.tolist():
            extra = self.extra_holders.pop(page, 0)
            if extra > 1:
                self.extra_holders[page] = extra - 1
            elif extra == 0:
                self.returned.append(page)

    def is_shared(self, page):
        """Whether more than one table names the page."""
        return int(page) in self.extra_holders

    def slots(self, table, start, stop):
        """Row numbers in the storage of the positions start..stop of a table."""
        first_page = start // self.page_size
        pages = table[first_page : -(-stop // self.page_size)].astype(np.int64)
        every = (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        skipped = first_page * self.page_size
        return every[start - skipped : stop - skipped]

    def ensure_storage(self, dtype):
        """Allocate the rows at the first use."""
        if self.tensors is None:
            positions = self.pages * self.page_size
            self.tensors = [self.codec.empty(positions, dtype) for _ in range(2)]
            self.dtype = dtype

    def gather(self, slots):
        """Copies of the stored parts of these rows, for k and v."""
        return [[part[slots] for part in parts] for parts in self.tensors]

    def scatter(self, slots, stored):
        """Write stored parts to these rows, for k and v."""
        for parts, new_parts in zip(self.tensors, stored):
            for part, new in zip(parts, new_parts):
                part[slots] = new

    def nbytes(self):
        """Bytes of rows and of what keeps track of the pages."""
        row_bytes = sum(part.nbytes for parts in self.tensors or [] for part in parts)
        return row_bytes + self.returned.itemsize * len(self.returned) + 16 * len(self.extra_holders)


class Track:
    """What one sequence holds in one layer: its pages, and how many positions they hold."""

    def __init__(self, table=None, length=0):
        self.table = np.zeros(0, dtype=np.int32) if table is None else table
        self.length = length


# ---------------------------------------------------------------- the cache


class Cache:
    """Keys and values of many sequences; see the table in prompt.md."""

    def __init__(self, codec, num_layers, pages, page_size):
        self._codec = codec
        self._page_size = page_size
        self._pools = [Pool(codec, pages, page_size) for _ in range(num_layers)]
        self._sequences = {}
        self._next = 0

    def _enter(self, tracks):
        seq = self._next
        self._next += 1
        self._sequences[seq] = tracks
        return seq

    def _place(self, seq, layer):
        """The track and the pool of one layer of a sequence."""
        tracks = self._sequences[seq]
        layer = _whole("layer", layer, 0, len(self._pools) - 1)
        return tracks[layer], self._pools[layer]

    def add(self):
        """A new, empty sequence."""
        return self._enter([Track() for _ in self._pools])

    def check_pair(self, k, v):
        """k and v as arrays (n, G, D) that fit this cache and each other."""
        k, v = _rows("k", k), _rows("v", v)
        if k.dtype != v.dtype:
            raise TypeError("k and v must have one dtype")
        if k.shape != v.shape or k.shape[1:] != (self._codec.heads, self._codec.width):
            raise ValueError(f"k {k.shape} and v {v.shape} do not fit the cache")
        return k, v

    def check_queries(self, q):
        """q as an array (n, H, D) that fits this cache."""
        q = _rows("q", q)
        if q.shape[2] != self._codec.width or q.shape[1] % self._codec.heads:
            raise ValueError(f"q {q.shape} does not fit the cache")
        return q

    def check_room(self, seq, layer, count):
        """(new pages, whether the last page must be copied) to append `count` positions."""
        track, pool = self._place(seq, layer)
        new_pages = -(-(track.length + count) // self._page_size) - len(track.table)
        inside = count > 0 and track.length % self._page_size > 0
        copies_last = inside and pool.is_shared(track.table[-1])
        if new_pages + copies_last > pool.room():
            raise MemoryError("the pool is full")
        return new_pages, copies_last

    def append(self, seq, layer, k, v):
        """Add n positions to one layer."""
        track, pool = self._place(seq, layer)
        k, v = self.check_pair(k, v)
        count = len(k)
        if count == 0:
            return
        new_pages, copies_last = self.check_room(seq, layer, count)
        stored = [self._codec.encode(k), self._codec.encode(v)]
        pool.ensure_storage(k.dtype)
        if copies_last:
            old_page = track.table[-1:]
            own_page = pool.take(1)
            size = self._page_size
            pool.scatter(pool.slots(own_page, 0, size), pool.gather(pool.slots(old_page, 0, size)))
            pool.release(old_page)
            track.table = np.concatenate([track.table[:-1], own_page])
        track.table = np.concatenate([track.table, pool.take(new_pages)])
        pool.scatter(pool.slots(track.table, track.length, track.length + count), stored)
        track.length += count

    def view(self, seq, layer):
        """Copies of k and v (S, G, D) of one layer."""
        track, pool = self._place(seq, layer)
        if pool.tensors is None:
            empty = np.zeros((0, self._codec.heads, self._codec.width), dtype=pool.dtype)
            return empty, empty.copy()
        k, v = pool.gather(pool.slots(track.table, 0, track.length))
        return self._codec.decode(k, pool.dtype), self._codec.decode(v, pool.dtype)

    def attend(self, seq, layer, q):
        """Causal attention of the queries of the last n positions of one layer."""
        track, _ = self._place(seq, layer)
        q = self.check_queries(q)
        held = track.length
        if len(q) > held:
            raise ValueError("more queries than positions")
        k, v = self.view(seq, layer)
        return _attention(q, k, v, held)

    def fork(self, seq):
        """A new sequence with the same positions; the pages are shared."""
        tracks = []
        for track, pool in zip(self._sequences[seq], self._pools):
            pool.hold(track.table)
            tracks.append(Track(track.table, track.length))
        return self._enter(tracks)

    def keep(self, seq, indices):
        """Keep these positions in this order, in every layer."""
        tracks = self._sequences[seq]
        chosen = _index_array(indices, self.length(seq))
        plans = [self._plan_keep(track, pool, chosen) for track, pool in zip(tracks, self._pools)]
        for track, pool, plan in zip(tracks, self._pools, plans):
            self._carry_out(track, pool, chosen, *plan)

    def _plan_keep(self, track, pool, chosen):
        """(source page of each kept page or -1, own pages to write to, pages to take).

        A page whose rows stay together and in place within the page is kept as it is, shared or not.
        """
        size = self._page_size
        if chosen.size == 0:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, 0
        position = np.arange(chosen.size)
        starts = position[::size]
        sources = chosen[starts] // size
        fits = (chosen % size == position % size) & (chosen // size == sources[position // size])
        sources = np.where(np.logical_and.reduceat(fits, starts), sources, -1)
        others = np.setdiff1d(np.arange(len(track.table)), sources)
        own = [page for page in others.tolist() if not pool.is_shared(track.table[page])]
        missing = int((sources < 0).sum())
        own = np.array(own[:missing], dtype=np.int64)
        to_take = missing - len(own)
        if to_take > pool.room():
            raise MemoryError("the pool is full")
        return sources, own, to_take

    def _carry_out(self, track, pool, chosen, sources, own, to_take):
        """Do what _plan_keep planned for one layer."""
        moved = np.repeat(sources < 0, self._page_size)[: chosen.size]
        stored = None
        if moved.any():
            stored = pool.gather(pool.slots(track.table, 0, track.length)[chosen[moved]])
        table = track.table[sources]
        table[sources < 0] = np.concatenate([track.table[own], pool.take(to_take)])
        pool.release(np.delete(track.table, np.union1d(sources[sources >= 0], own)))
        if stored is not None:
            pool.scatter(pool.slots(table, 0, chosen.size)[moved], stored)
        track.table, track.length = table, chosen.size

    def truncate(self, seq, n):
        """Keep the first n positions of every layer."""
        n = _whole("n", n, 0, self.length(seq))
        self.keep(seq, range(n))

    def free(self, seq):
        """Drop the sequence and give back its pages."""
        for track, pool in zip(self._sequences.pop(seq), self._pools):
            pool.release(track.table)

    def length(self, seq):
        """Positions that are present in every layer."""
        return min(track.length for track in self._sequences[seq])

    def nbytes(self):
        """Bytes allocated for rows, with all metadata."""
        tables = sum(track.table.nbytes for tracks in self._sequences.values() for track in tracks)
        return tables + sum(pool.nbytes() for pool in self._pools)


def _attention(q, k, v, held):
    """Attention of q (n, H, D), the last n of `held` positions, over k, v (held, G, D)."""
    count, heads, width = q.shape
    groups = k.shape[1]
    keys = k.transpose(1, 2, 0)
    values = v.transpose(1, 0, 2)
    out = np.empty(q.shape, dtype=q.dtype)
    for low in range(0, count, QUERY_ROWS):
        high = min(low + QUERY_ROWS, count)
        first, seen = held - count + low, held - count + high
        rows = (q[low:high] * q.dtype.type(width**-0.5)).transpose(1, 0, 2)
        rows = rows.reshape(groups, -1, width)  # never empty: low < high
        scores = np.matmul(rows, keys[:, :, :seen])
        scores = scores.reshape(groups, heads // groups, high - low, seen)
        hidden = np.arange(seen) > np.arange(first, seen)[:, None]
        np.copyto(scores, -np.inf, where=hidden)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        mixed = np.matmul(scores.reshape(groups, -1, seen), values[:, :seen])
        mixed = mixed.reshape(groups, heads // groups, high - low, width) / total
        out[low:high] = mixed.reshape(heads, high - low, width).transpose(1, 0, 2)
    return out


# ---------------------------------------------------------------- the three functions


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind: {kind!r}")
    num_layers = _whole("num_layers", num_layers, 1)
    heads = _whole("num_kv_heads", num_kv_heads, 1)
    width = _whole("head_dim", head_dim, 1)
    page_size = _whole("block_size", block_size, 1)
    pages = _whole("num_blocks", num_blocks, 1)
    if kind.endswith("quantized"):
        bits = _whole("bits", bits, 4, 8)
        if bits not in (4, 8):
            raise ValueError("bits must be 8 or 4")
        codec = ScaledCodec(heads, width, bits)
    elif bits is not None:
        raise ValueError("bits are for quantised kinds")
    else:
        codec = PlainCodec(heads, width)
    if not kind.startswith("paged"):
        pages, page_size = pages * page_size, 1
    return Cache(codec, num_layers, pages, page_size)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T, G, D) and return the attention of q (T, H, D), `chunk` positions at a time."""
    cache.length(seq)  # an unknown sequence: KeyError
    k, v = cache.check_pair(k, v)
    q = cache.check_queries(q)
    chunk = _whole("chunk", chunk, 1)
    if len(q) != len(k):
        raise ValueError("q and k must have as many positions")
    cache.check_room(seq, layer, len(k))  # all or nothing
    out = np.empty(q.shape, dtype=q.dtype)
    for low in range(0, len(q), chunk):
        part = slice(low, low + chunk)
        cache.append(seq, layer, k[part], v[part])
        out[part] = cache.attend(seq, layer, q[part])
    return out


def _amount(name, value):
    """A finite number ≥ 0 as an exact fraction."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number")
    exact = Fraction(value) if isinstance(value, (int, Fraction)) else None
    if exact is None:
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite")
        exact = Fraction(value.item() if isinstance(value, np.generic) else value)
    if exact < 0:
        raise ValueError(f"{name} must not be negative")
    return exact


def _number(exact):
    """A fraction as an int where it is whole, else as a float."""
    return int(exact) if exact.denominator == 1 else float(exact)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    names = ("num_layers", "num_kv_heads", "head_dim", "bits")
    for name in names:
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
    bytes_per_token = Fraction(2 * math.prod(_whole(name, spec[name], 1) for name in names), 8)
    share = _amount("utilization", utilization)
    if not 0 < share <= 1:
        raise ValueError("utilization must be in (0, 1]")
    taken = _amount("weight_bytes", weight_bytes) + _amount("reserve_bytes", reserve_bytes)
    budget = share * _amount("gpu_bytes", gpu_bytes) - taken
    tokens = max(0, budget // bytes_per_token)
    return tokens, {"bytes_per_token": _number(bytes_per_token), "budget_bytes": _number(budget)}
