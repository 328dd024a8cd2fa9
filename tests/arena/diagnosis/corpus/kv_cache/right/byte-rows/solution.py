"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

A position of a layer is one row of bytes (its keys, then its values), written by a codec. What
holds rows, contiguous strips or chains of pages, knows nothing of what is in them; what attends
knows nothing of where they lie.
"""

import operator
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
QUERY_TILE = 256
KEY_TILE = 512


def _whole(value, name, low, high=None):
    """`value` as an int in [low, high]."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int")
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} = {number} is out of range")
    return number


def _array(x, name, width):
    """`x` as an array of three axes, the last of them `width` long."""
    x = np.asarray(x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32 or float64, not {x.dtype}")
    if x.ndim != 3 or x.shape[2] != width:
        raise ValueError(f"{name} of shape {x.shape} does not fit")
    return x


# ---------------------------- codecs: (n, G, D) pairs to rows of bytes and back


class PlainCodec:
    """Rows hold the numbers as they are."""

    def __init__(self, heads, width, dtype):
        self.shape = (heads, width)
        self.dtype = dtype
        self.half = heads * width * dtype.itemsize
        self.row_bytes = 2 * self.half

    def encode(self, k, v):
        return np.concatenate([self._pack(k), self._pack(v)], axis=1)

    def decode(self, rows):
        return self._unpack(rows[:, : self.half]), self._unpack(rows[:, self.half :])

    def _pack(self, x):
        return np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)

    def _unpack(self, rows):
        return np.array(rows, order="C").view(self.dtype).reshape(-1, *self.shape)


class QuantCodec:
    """Rows hold signed codes of 8 or 4 bits and one scale a head, in the dtype of the data."""

    def __init__(self, heads, width, dtype, bits):
        self.heads, self.width, self.dtype, self.bits = heads, width, dtype, bits
        self.top = 2 ** (bits - 1) - 1
        self.code_bytes = heads * ((bits * width + 7) // 8)
        self.half = self.code_bytes + heads * dtype.itemsize
        self.row_bytes = 2 * self.half

    def encode(self, k, v):
        return np.concatenate([self._pack(k), self._pack(v)], axis=1)

    def decode(self, rows):
        return self._unpack(rows[:, : self.half]), self._unpack(rows[:, self.half :])

    def _pack(self, x):
        scale = np.abs(x).max(axis=2, keepdims=True) / self.dtype.type(self.top)
        ratio = x / np.where(scale > 0, scale, 1).astype(self.dtype)
        codes = np.clip(np.rint(ratio), -self.top, self.top).astype(np.int8)
        if self.bits == 4:
            codes = self._pair(codes)
        raw_codes = codes.reshape(len(x), -1).view(np.uint8)
        raw_scale = np.ascontiguousarray(scale[:, :, 0]).view(np.uint8)
        return np.concatenate([raw_codes, raw_scale], axis=1)

    def _unpack(self, rows):
        codes = np.array(rows[:, : self.code_bytes], order="C").reshape(len(rows), self.heads, -1)
        scale = np.array(rows[:, self.code_bytes :], order="C").view(self.dtype)
        codes = self._split(codes) if self.bits == 4 else codes.view(np.int8)
        return codes * scale[:, :, None]

    def _pair(self, codes):
        """Two codes a byte, the even one in the low half; shifted by 8 to be positive."""
        shifted = (codes + 8).astype(np.uint8)
        if self.width % 2:
            shifted = np.concatenate([shifted, np.zeros_like(shifted[:, :, :1])], axis=2)
        return shifted[:, :, 0::2] | (shifted[:, :, 1::2] << 4)

    def _split(self, packed):
        both = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)
        return both[:, :, : self.width].astype(np.int8) - np.int8(8)


# ---------------------------- who holds the rows of one sequence in one layer


class Ledger:
    """How many units of room (positions or pages) of one layer are taken."""

    def __init__(self, units):
        self.units = units
        self.used = 0

    def demand(self, extra):
        if self.used + extra > self.units:
            raise MemoryError(f"{extra} more units of room wanted, {self.units - self.used} free")


class Strip:
    """Contiguous rows; room is counted by the position."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.count = 0
        self.rows = None

    def cost_of_put(self, extra):
        return extra

    def cost_of_keep(self, kept):
        return kept - self.count

    def cost_of_fork(self):
        return self.count

    def put(self, new):
        need = self.count + len(new)
        self.ledger.used += len(new)
        if self.rows is None or need > len(self.rows):
            grown = min(self.ledger.units, max(need, self.count * 3 // 2))
            rows = np.empty((grown, new.shape[1]), dtype=np.uint8)
            if self.count:
                rows[: self.count] = self.rows[: self.count]
            self.rows = rows
        self.rows[self.count : need] = new
        self.count = need

    def read(self, low, high):
        return self.rows[low:high]

    def keep(self, indices):
        kept = self.rows[indices] if len(indices) else None
        self.drop()
        if kept is not None:
            self.put(kept)

    def cut(self, n):
        self.ledger.used -= self.count - n
        self.count = n
        if n == 0:
            self.rows = None
        elif n < len(self.rows) // 2:
            self.rows = self.rows[:n].copy()

    def drop(self):
        self.cut(0)

    def fork(self):
        twin = Strip(self.ledger)
        if self.count:
            twin.put(self.rows[: self.count])
        return twin

    def nbytes(self):
        return 16 + (0 if self.rows is None else self.rows.nbytes)


class Page:
    """Some rows, and how many chains they are part of."""

    def __init__(self, rows):
        self.rows = rows
        self.owners = 1


class Chain:
    """A list of pages, maybe shared; room is counted by the page, a shared one once."""

    def __init__(self, ledger, page_size):
        self.ledger = ledger
        self.page_size = page_size
        self.count = 0
        self.pages = []

    def _pages_for(self, n):
        return -(-n // self.page_size)

    def _tail_is_shared(self):
        return self.count % self.page_size != 0 and self.pages[-1].owners > 1

    def cost_of_put(self, extra):
        return self._pages_for(self.count + extra) - len(self.pages) + self._tail_is_shared()

    def cost_of_keep(self, kept):
        return self._pages_for(kept) - sum(page.owners == 1 for page in self.pages)

    def cost_of_fork(self):
        return 0

    def put(self, new):
        if self._tail_is_shared():
            self.pages[-1].owners -= 1
            self.pages[-1] = Page(self.pages[-1].rows.copy())
            self.ledger.used += 1
        done = 0
        while done < len(new):
            at = self.count % self.page_size
            if at == 0:
                self.pages.append(Page(np.zeros((self.page_size, new.shape[1]), dtype=np.uint8)))
                self.ledger.used += 1
            step = min(self.page_size - at, len(new) - done)
            self.pages[-1].rows[at : at + step] = new[done : done + step]
            self.count += step
            done += step

    def read(self, low, high):
        first, last = low // self.page_size, self._pages_for(high)
        rows = np.concatenate([page.rows for page in self.pages[first:last]])
        return rows[low - first * self.page_size : high - first * self.page_size]

    def keep(self, indices):
        kept = self.read(0, self.count)[indices] if len(indices) else None
        self.drop()
        if kept is not None:
            self.put(kept)

    def cut(self, n):
        stay = self._pages_for(n)
        for page in self.pages[stay:]:
            page.owners -= 1
            self.ledger.used -= page.owners == 0
        del self.pages[stay:]
        self.count = n

    def drop(self):
        self.cut(0)

    def fork(self):
        twin = Chain(self.ledger, self.page_size)
        twin.count = self.count
        twin.pages = list(self.pages)
        for page in self.pages:
            page.owners += 1
        return twin

    def nbytes(self):
        """The entries of the table; the cache counts the pages, each once."""
        return 16 + 8 * len(self.pages)


# ---------------------------- the cache


class Cache:
    """Sequences, each a list of one holder of rows for each layer."""

    def __init__(self, paged, bits, layers, heads, width, block_size, num_blocks):
        self.paged, self.bits = paged, bits
        self.layers, self.heads, self.width, self.block_size = layers, heads, width, block_size
        units = num_blocks if paged else num_blocks * block_size
        self.ledgers = [Ledger(units) for _ in range(layers)]
        self.sequences = {}
        self.next_seq = 0
        self.codec = None

    def add(self):
        if self.paged:
            return self._register([Chain(ledger, self.block_size) for ledger in self.ledgers])
        return self._register([Strip(ledger) for ledger in self.ledgers])

    def append(self, seq, layer, k, v):
        holder = self._holder(seq, layer)
        k, v = self.checked_rows(k, v)
        if len(k) < 1:
            raise ValueError("append needs at least one position")
        holder.ledger.demand(holder.cost_of_put(len(k)))
        if self.codec is None:
            self.codec = self._make_codec(k.dtype)
        holder.put(self.codec.encode(k, v))

    def attend(self, seq, layer, q):
        holder = self._holder(seq, layer)
        q = self.checked_queries(q)
        n = len(q)
        if n > holder.count:
            raise ValueError(f"{n} queries, but only {holder.count} positions")
        out = np.empty(q.shape, dtype=q.dtype)
        for low in range(0, n, QUERY_TILE):
            part = q[low : low + QUERY_TILE]
            out[low : low + len(part)] = self._attend_tile(holder, part, holder.count - n + low)
        return out

    def view(self, seq, layer):
        holder = self._holder(seq, layer)
        if holder.count == 0:
            dtype = np.dtype(np.float32) if self.codec is None else self.codec.dtype
            return tuple(np.empty((0, self.heads, self.width), dtype=dtype) for _ in range(2))
        return self.codec.decode(holder.read(0, holder.count))

    def fork(self, seq):
        holders = self._holders(seq)
        for holder in holders:
            holder.ledger.demand(holder.cost_of_fork())
        return self._register([holder.fork() for holder in holders])

    def keep(self, seq, indices):
        holders = self._holders(seq)
        length = self.length(seq)
        chosen = [_whole(i, "index", 0, length - 1) for i in indices]
        if len(set(chosen)) != len(chosen):
            raise ValueError("indices must be different")
        for holder in holders:
            holder.ledger.demand(holder.cost_of_keep(len(chosen)))
        for holder in holders:
            holder.keep(chosen)

    def truncate(self, seq, n):
        holders = self._holders(seq)
        n = _whole(n, "n", 0, self.length(seq))
        for holder in holders:
            holder.cut(n)

    def free(self, seq):
        for holder in self._holders(seq):
            holder.drop()
        del self.sequences[seq]

    def length(self, seq):
        return min(holder.count for holder in self._holders(seq))

    def nbytes(self):
        total = sum(holder.nbytes() for holders in self.sequences.values() for holder in holders)
        if self.paged and self.codec is not None:
            page_bytes = self.block_size * self.codec.row_bytes + 8
            total += page_bytes * sum(ledger.used for ledger in self.ledgers)
        return total

    # ---- what chunked_prefill needs beyond that

    def check_room(self, seq, layer, extra):
        holder = self._holder(seq, layer)
        holder.ledger.demand(holder.cost_of_put(extra) if extra else 0)

    def checked_rows(self, k, v):
        k, v = _array(k, "k", self.width), _array(v, "v", self.width)
        if k.shape != v.shape or k.shape[1] != self.heads:
            raise ValueError(f"k {k.shape} and v {v.shape} do not fit {self.heads} heads")
        if k.dtype != v.dtype or (self.codec is not None and k.dtype != self.codec.dtype):
            raise TypeError("one dtype for all arrays of a cache")
        return k, v

    def checked_queries(self, q):
        q = _array(q, "q", self.width)
        if q.shape[1] == 0 or q.shape[1] % self.heads:
            raise ValueError(f"{q.shape[1]} query heads are no multiple of {self.heads}")
        if self.codec is not None and q.dtype != self.codec.dtype:
            raise TypeError("one dtype for all arrays of a cache")
        return q

    # ---- inner workings

    def _register(self, holders):
        seq = self.next_seq
        self.next_seq += 1
        self.sequences[seq] = holders
        return seq

    def _holders(self, seq):
        if not isinstance(seq, (int, np.integer)) or seq not in self.sequences:
            raise KeyError(seq)
        return self.sequences[seq]

    def _holder(self, seq, layer):
        return self._holders(seq)[_whole(layer, "layer", 0, self.layers - 1)]

    def _make_codec(self, dtype):
        if self.bits is None:
            return PlainCodec(self.heads, self.width, dtype)
        return QuantCodec(self.heads, self.width, dtype, self.bits)

    def _attend_tile(self, holder, q, start):
        """Attention of a few queries, the first at position `start`, over key tiles."""
        n, query_heads, width = q.shape
        sharing = query_heads // self.heads
        # (G, sharing * n, D): all queries that read one kv head are rows of one matrix.
        rows = (
            (q * q.dtype.type(width**-0.5))
            .reshape(n, self.heads, sharing, width)
            .transpose(1, 2, 0, 3)
        )
        rows = np.ascontiguousarray(rows).reshape(self.heads, sharing * n, width)
        own = np.tile(np.arange(start, start + n), sharing)
        peak = np.full(rows.shape[:2], -np.inf, dtype=q.dtype)
        total = np.zeros(rows.shape[:2], dtype=q.dtype)
        mixed = np.zeros(rows.shape, dtype=q.dtype)
        for low in range(0, start + n, KEY_TILE):
            high = min(low + KEY_TILE, start + n)
            k, v = self.codec.decode(holder.read(low, high))
            scores = rows @ k.transpose(1, 2, 0)
            if high - 1 > start:
                np.copyto(scores, -np.inf, where=np.arange(low, high) > own[:, None])
            # Position 0 is seen by all and lies in the first tile, so the new maximum is finite.
            new_peak = np.maximum(peak, scores.max(axis=2))
            fade = np.exp(peak - new_peak)
            scores -= new_peak[:, :, None]
            weights = np.exp(scores, out=scores)
            total = total * fade + weights.sum(axis=2)
            mixed = mixed * fade[:, :, None] + weights @ v.transpose(1, 0, 2)
            peak = new_peak
        mixed /= total[:, :, None]
        return (
            mixed.reshape(self.heads, sharing, n, width)
            .transpose(2, 0, 1, 3)
            .reshape(n, query_heads, width)
        )


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind {kind!r}")
    if kind.endswith("quantized"):
        if _whole(bits, "bits", 4, 8) not in (4, 8):
            raise ValueError("bits must be 8 or 4")
    elif bits is not None:
        raise ValueError(f"{kind} has no bits")
    sizes = {
        "layers": _whole(num_layers, "num_layers", 1),
        "heads": _whole(num_kv_heads, "num_kv_heads", 1),
        "width": _whole(head_dim, "head_dim", 1),
        "block_size": _whole(block_size, "block_size", 1),
        "num_blocks": _whole(num_blocks, "num_blocks", 1),
    }
    return Cache(kind.startswith("paged"), bits, **sizes)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    chunk = _whole(chunk, "chunk", 1)
    q = cache.checked_queries(q)
    k, v = cache.checked_rows(k, v)
    if len(q) != len(k) or q.dtype != k.dtype:
        raise ValueError("q and k must have the same number of positions and the same dtype")
    # Everything that can fail is tried before the first write.
    cache.check_room(seq, layer, len(k))
    out = np.empty(q.shape, dtype=q.dtype)
    for low in range(0, len(k), chunk):
        part = slice(low, low + chunk)
        cache.append(seq, layer, k[part], v[part])
        out[part] = cache.attend(seq, layer, q[part])
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    names = ("num_layers", "num_kv_heads", "head_dim", "bits")
    missing = [name for name in names if name not in spec]
    if missing:
        raise ValueError(f"spec lacks {missing}")
    layers, heads, width, bits = (_whole(spec[name], name, 1) for name in names)
    if not 0 < utilization <= 1:
        raise ValueError("utilization must be in (0, 1]")
    for amount in (gpu_bytes, weight_bytes, reserve_bytes):
        if not 0 <= amount < float("inf"):
            raise ValueError("bytes must not be negative")
    per_token = Fraction(2 * layers * heads * width * bits, 8)
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, Fraction(budget) // per_token)
    return int(tokens), {"bytes_per_token": float(per_token), "budget_bytes": budget}
