"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

A position of one layer is an opaque *record* of bytes: its key rows and its value rows, packed by a codec
together with their scales. Storage (`_Strip`, `_PageList`) moves records and never looks into them, hence
what was quantised once stays as it is, whatever happens to the position.
"""

import operator
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

KINDS = {"dense": (False, False), "paged": (True, False),
         "quantized": (False, True), "paged_quantized": (True, True)}
SCORES = 1 << 19        # attention scores held at once, unless those of one query are more


# ---------------------------------------------------------------------------------------- checks

def _integer(value, name, low, high=None):
    """`value` as an int in [low, high], or an error."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, not a bool")
    value = operator.index(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is out of range: {value}")
    return value


def _floats(array, name, heads, width):
    """An array (any, heads, width) of float32 or float64 in the machine's byte order; heads may be None."""
    array = np.asarray(array)
    if array.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if array.ndim != 3 or array.shape[2] != width or heads not in (None, array.shape[1]):
        raise ValueError(f"{name} has the wrong shape {array.shape}")
    return array.astype(array.dtype.type, copy=False)


# ---------------------------------------------------------------------------------------- records

class _Codec:
    """Packs rows of keys and values into records (positions, 2, heads, width) of bytes, and back."""

    def __init__(self, dtype, head_dim, bits):
        self.dtype, self.bits, self.head_dim = np.dtype(dtype), bits, head_dim
        self.scale_dtype = self.dtype
        self.peak = None if bits is None else 2 ** (bits - 1) - 1

    def pack(self, k, v):
        rows = np.ascontiguousarray(np.stack((k, v), axis=1))
        if self.bits is None:
            return rows.view(np.uint8)
        scale = np.abs(rows).max(axis=-1, keepdims=True) / self.dtype.type(self.peak)
        codes = np.divide(rows, scale, out=np.zeros_like(rows), where=scale > 0)
        codes = np.rint(codes).clip(-self.peak, self.peak).astype(np.int8)
        if self.bits == 4:
            nibbles = (codes + 8).astype(np.uint8)
            if self.head_dim % 2:
                nibbles = np.concatenate((nibbles, np.zeros_like(nibbles[..., :1])), axis=-1)
            body = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        else:
            body = codes.view(np.uint8)
        return np.concatenate((body, scale.astype(self.scale_dtype).view(np.uint8)), axis=-1)

    def unpack(self, records):
        """(k, v), which may be views of the records."""
        if self.bits is None:
            rows = records.view(self.dtype)
            return rows[:, 0], rows[:, 1]
        split = records.shape[-1] - self.scale_dtype.itemsize
        body = np.ascontiguousarray(records[..., :split])
        scale = np.ascontiguousarray(records[..., split:]).view(self.scale_dtype).astype(self.dtype)
        if self.bits == 4:
            pairs = np.stack((body & 15, body >> 4), axis=-1).reshape(*body.shape[:-1], -1)
            codes = pairs[..., :self.head_dim].astype(np.int8) - np.int8(8)
        else:
            codes = body.view(np.int8)
        rows = codes.astype(self.dtype) * scale
        return rows[:, 0], rows[:, 1]


# ---------------------------------------------------------------------------------------- storage

class _Room:
    """What is left of one layer's pool: pages, or positions where there are no pages."""

    def __init__(self, units):
        self.units = units
        self.free = units


class _Strip:
    """One layer of a dense sequence: records in one array that grows by doubling, up to the whole pool."""

    def __init__(self, room):
        self.room, self.length, self.data = room, 0, None

    def append_cost(self, n):
        return n

    def fork_cost(self):
        return self.length

    def keep_cost(self, order):
        return len(order) - self.length

    def append(self, records):
        end = self.length + len(records)
        if self.data is None or end > len(self.data):
            grown = np.empty((min(max(end, 2 * self.length), self.room.units), *records.shape[1:]), np.uint8)
            if self.length:
                grown[:self.length] = self.records()
            self.data = grown
        self.data[self.length:end] = records
        self.room.free -= len(records)
        self.length = end

    def records(self):
        return self.data[:self.length]

    def keep(self, order):
        data = self.data[order] if len(order) else None
        self.room.free += self.length - len(order)
        self.length, self.data = len(order), data

    def fork(self):
        twin = _Strip(self.room)
        if self.length:
            twin.append(self.records())
        return twin

    def storage(self):
        """(key, bytes) of the pieces of storage, and the bytes of metadata."""
        return [] if self.data is None else [(id(self.data), self.data.nbytes)], 0


class _Page:
    """A page of records, and how many sequences hold it."""

    def __init__(self, data):
        self.data, self.owners = data, 1


class _PageList:
    """One layer of a paged sequence: a table of pages, shared with forks until somebody writes."""

    def __init__(self, room, size):
        self.room, self.size, self.length, self.pages = room, size, 0, []

    def _pages_of(self, positions):
        return -(-positions // self.size)

    def _copies_tail(self):
        """Whether the next position goes into a page that others hold, too."""
        return self.length % self.size > 0 and self.pages[-1].owners > 1

    def append_cost(self, n):
        return self._pages_of(self.length + n) - len(self.pages) + self._copies_tail()

    def fork_cost(self):
        return 0

    def _untouched(self, order):
        """How many leading pages `keep` can leave as they are."""
        same = order == np.arange(len(order))
        return self._pages_of(len(order)) if same.all() else int(same.argmin()) // self.size

    def keep_cost(self, order):
        stay = self._untouched(order)
        released = sum(page.owners == 1 for page in self.pages[stay:])
        return self._pages_of(len(order)) - stay - released

    def _fresh(self, data):
        self.room.free -= 1
        return _Page(data)

    def append(self, records):
        if self._copies_tail():
            self.pages[-1].owners -= 1
            self.pages[-1] = self._fresh(self.pages[-1].data.copy())
        while len(records):
            page, at = divmod(self.length, self.size)
            if page == len(self.pages):
                self.pages.append(self._fresh(np.empty((self.size, *records.shape[1:]), np.uint8)))
            part, records = records[:self.size - at], records[self.size - at:]
            self.pages[page].data[at:at + len(part)] = part
            self.length += len(part)

    def records(self):
        return np.concatenate([page.data for page in self.pages])[:self.length]

    def keep(self, order):
        stay = self._untouched(order)
        kept = min(len(order), stay * self.size)
        rest = self.records()[order[kept:]] if kept < len(order) else None
        for page in self.pages[stay:]:
            page.owners -= 1
            self.room.free += page.owners == 0
        self.length, self.pages = kept, self.pages[:stay]
        if rest is not None:
            self.append(rest)

    def fork(self):
        twin = _PageList(self.room, self.size)
        twin.length, twin.pages = self.length, list(self.pages)
        for page in twin.pages:
            page.owners += 1
        return twin

    def storage(self):
        """(key, bytes) of the pieces of storage, and the bytes of metadata."""
        return [(id(page), page.data.nbytes + 8) for page in self.pages], 8 * len(self.pages)


# ---------------------------------------------------------------------------------------- attention

def _attention(q, k, v, block):
    """Causal attention of q (n, H, D), the last n of S positions, at most `block` queries at a time."""
    n, heads, width = q.shape
    total, groups, _ = k.shape
    share = heads // groups
    out = np.empty_like(q, order="C")
    if n == 0:
        return out
    keys = np.ascontiguousarray(k.transpose(1, 2, 0), dtype=np.float64)
    values = np.ascontiguousarray(v.transpose(1, 0, 2), dtype=np.float64)
    block = max(1, min(n, block, SCORES // (heads * total)))
    for low in range(0, n, block):
        part = q[low:low + block].astype(np.float64) * width ** -0.5
        count = len(part)
        seen = total - n + low + count              # positions that the last of these queries sees
        part = part.reshape(count, groups, share, width).transpose(1, 0, 2, 3)
        scores = part.reshape(groups, count * share, width) @ keys[:, :, :seen]
        future = np.triu(np.ones((count, count), bool), 1)[:, None, :]
        corner = scores.reshape(groups, count, share, seen)[..., seen - count:]
        np.copyto(corner, -np.inf, where=future)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values[:, :seen] / scores.sum(axis=-1, keepdims=True)
        mixed = mixed.reshape(groups, count, share, width).transpose(1, 0, 2, 3)
        out[low:low + count] = mixed.reshape(count, heads, width)
    return out


# ---------------------------------------------------------------------------------------- the cache

class _Cache:
    """Sequences, each with one store of records a layer."""

    def __init__(self, paged, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits):
        self._heads, self._width, self._bits = num_kv_heads, head_dim, bits
        self._page = block_size if paged else None
        units = num_blocks if paged else num_blocks * block_size
        self._rooms = [_Room(units) for _ in range(num_layers)]
        self._codec = None              # known with the first append, which brings the dtype
        self._sequences = {}
        self._next = 0

    def add(self):
        if self._page is None:
            return self._register([_Strip(room) for room in self._rooms])
        return self._register([_PageList(room, self._page) for room in self._rooms])

    def append(self, seq, layer, k, v):
        store, k, v = self._store(seq, layer), *self._rows(k, v)
        if len(k) == 0:
            raise ValueError("nothing to append")
        codec = self._codec or _Codec(k.dtype, self._width, self._bits)
        self._require([(store, store.append_cost(len(k)))])
        store.append(codec.pack(k, v))
        self._codec = codec

    def attend(self, seq, layer, q):
        store, q = self._store(seq, layer), self._queries(q)
        if len(q) > store.length:
            raise ValueError(f"{len(q)} queries for {store.length} positions")
        return _attention(q, *self._read(store, q.dtype), block=len(q))

    def view(self, seq, layer):
        k, v = self._read(self._store(seq, layer), np.float32)
        return k.copy(), v.copy()

    def fork(self, seq):
        stores = self._stores(seq)
        self._require([(store, store.fork_cost()) for store in stores])
        return self._register([store.fork() for store in stores])

    def keep(self, seq, indices):
        stores = self._stores(seq)
        last = self.length(seq) - 1
        order = [_integer(index, "an index", 0, last) for index in indices]
        if len(set(order)) < len(order):
            raise ValueError("an index occurs twice")
        self._keep(stores, np.array(order, np.int64))

    def truncate(self, seq, n):
        stores = self._stores(seq)
        n = _integer(n, "n", 0, self.length(seq))
        self._keep(stores, np.arange(n))

    def free(self, seq):
        self._keep(self._stores(seq), np.arange(0))
        del self._sequences[seq]

    def length(self, seq):
        return min(store.length for store in self._stores(seq))

    def nbytes(self):
        pieces, metadata = {}, 0
        for stores in self._sequences.values():
            for store in stores:
                held, extra = store.storage()
                pieces.update(held)
                metadata += extra
        return sum(pieces.values()) + metadata

    # What `chunked_prefill` needs, too.

    def _store(self, seq, layer):
        return self._stores(seq)[_integer(layer, "layer", 0, len(self._rooms) - 1)]

    def _rows(self, k, v):
        k = _floats(k, "k", self._heads, self._width)
        v = _floats(v, "v", self._heads, self._width)
        if k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError("k and v differ in shape or dtype")
        self._same_dtype(k)
        return k, v

    def _queries(self, q):
        q = _floats(q, "q", None, self._width)
        if q.shape[1] == 0 or q.shape[1] % self._heads:
            raise ValueError(f"{q.shape[1]} query heads for {self._heads} kv heads")
        self._same_dtype(q)
        return q

    def _read(self, store, default):
        """(k, v) of a store, maybe views into it; `default` is the dtype of a cache that never held anything."""
        if store.length == 0:
            empty = np.empty((0, self._heads, self._width), self._codec.dtype if self._codec else default)
            return empty, empty
        return self._codec.unpack(store.records())

    # Helpers.

    def _stores(self, seq):
        if seq not in self._sequences:
            raise KeyError(seq)
        return self._sequences[seq]

    def _register(self, stores):
        seq = self._next
        self._next += 1
        self._sequences[seq] = stores
        return seq

    def _same_dtype(self, array):
        if self._codec and array.dtype != self._codec.dtype:
            raise ValueError(f"{array.dtype} in a cache of {self._codec.dtype}")

    def _keep(self, stores, order):
        self._require([(store, store.keep_cost(order)) for store in stores])
        for store in stores:
            store.keep(order)

    @staticmethod
    def _require(costs):
        """Raises before anything has changed; every store of `costs` is in a layer of its own."""
        if any(cost > max(store.room.free, 0) for store, cost in costs):
            raise MemoryError("the pool is full")


# ---------------------------------------------------------------------------------------- entry points

def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    paged, quantised = KINDS[kind]
    if quantised:
        if _integer(bits, "bits", 4, 8) not in (4, 8):
            raise ValueError("bits must be 8 or 4")
    elif bits is not None:
        raise ValueError(f"kind {kind!r} takes no bits")
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
             "block_size": block_size, "num_blocks": num_blocks}
    sizes = {name: _integer(size, name, 1) for name, size in sizes.items()}
    return _Cache(paged, **sizes, bits=bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    chunk = _integer(chunk, "chunk", 1)
    store, q, (k, v) = cache._store(seq, layer), cache._queries(q), cache._rows(k, v)
    if len(q) != len(k) or q.dtype != k.dtype:
        raise ValueError("q does not fit k and v")
    if len(k) == 0:
        return np.empty_like(q, order="C")
    # One append is all or nothing; the causal mask keeps a query from what came in with it.
    cache.append(seq, layer, k, v)
    return _attention(q, *cache._read(store, q.dtype), block=chunk)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    per_token = Fraction(2, 8)
    for name in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if name not in spec:
            raise ValueError(f"spec lacks {name}")
        per_token *= _integer(spec[name], name, 1)
    share = _amount(utilization, "utilization")
    if not 0 < share <= 1:
        raise ValueError("utilization must be in (0, 1]")
    budget = (share * _amount(gpu_bytes, "gpu_bytes")
              - _amount(weight_bytes, "weight_bytes") - _amount(reserve_bytes, "reserve_bytes"))
    tokens = max(0, budget // per_token)
    return tokens, {"bytes_per_token": _plain(per_token), "budget_bytes": _plain(budget),
                    "utilization": _plain(share)}


def _amount(value, name):
    """A number >= 0 as the fraction it is written as: 0.9 is nine tenths."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{name} must be a number")
    amount = Fraction(str(value))
    if amount < 0:
        raise ValueError(f"{name} must not be negative")
    return amount


def _plain(number):
    return int(number) if number.denominator == 1 else float(number)
