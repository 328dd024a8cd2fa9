"""A KV cache family: contiguous or paged storage, elements as they are or as 8 or 4 bit integers.

Two choices are kept apart. A codec says how rows of a key or value are stored; a cache says where.
Axis letters: n new positions, S positions of a sequence, H query heads, G kv heads, D head width,
P positions a page.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: What a row is stored as: arrays whose first axis is the position.
Fields = tuple[np.ndarray, ...]
KINDS = ("dense", "paged", "quantized", "paged_quantized")
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
SPEC = ("num_layers", "num_kv_heads", "head_dim", "bits")
#: A prefill attends with so many queries at a time at most: scores of all pairs are never held.
MOST_QUERIES = 128


# --- how a row is stored ------------------------------------------------------------------------


class PlainCodec:
    """Rows are stored as they come."""

    def encode(self, x: np.ndarray) -> Fields:
        """x (n,G,D) as arrays whose first axis is the position."""
        return (x,)

    def decode(self, fields: Fields, dtype: np.dtype) -> np.ndarray:
        """The rows again, (n,G,D)."""
        return fields[0].astype(dtype)


class IntCodec:
    """Symmetric integers of 8 or 4 bits with one scale a position and head.

    A row is encoded when it arrives and never again: no later token can change its error.
    """

    def __init__(self, bits: int, width: int) -> None:
        """Codes between −top and top."""
        self.bits = bits
        self.width = width
        self.top = 2 ** (bits - 1) - 1

    def encode(self, x: np.ndarray) -> Fields:
        """x (n,G,D) as codes (n,G,D or packed) and float32 scales (n,G,1)."""
        largest = np.abs(x).max(axis=-1, keepdims=True)
        scale = (largest / self.top).astype(np.float32)
        divisor = np.where(scale == 0, 1, scale).astype(x.dtype)
        codes = np.clip(np.rint(x / divisor), -self.top, self.top).astype(np.int8)
        return (pack_nibbles(codes) if self.bits == 4 else codes), scale

    def decode(self, fields: Fields, dtype: np.dtype) -> np.ndarray:
        """code · scale, (n,G,D)."""
        codes, scale = fields
        if self.bits == 4:
            codes = unpack_nibbles(codes, self.width)
        return codes.astype(dtype) * scale.astype(dtype)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes −8…7 (…,D) as bytes (…,⌈D/2⌉): d in the low half, d + ⌈D/2⌉ in the high one."""
    half = -(-codes.shape[-1] // 2)
    low = codes[..., :half].view(np.uint8) & 15
    high = np.zeros_like(low)
    high[..., : codes.shape[-1] - half] = codes[..., half:].view(np.uint8)
    return low | (high << 4)


def unpack_nibbles(packed: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `pack_nibbles`; a nibble of 8 or more stands for a negative code."""
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1)[..., :width]
    return (nibbles ^ 8).astype(np.int8) - np.int8(8)


# --- where rows are stored ----------------------------------------------------------------------


class Cache:
    """What all kinds share: sequences, checks, attention. A subclass says where rows are kept."""

    def __init__(
        self,
        codec: PlainCodec | IntCodec,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
    ) -> None:
        """No sequences, and no storage before the first rows arrive."""
        self.codec = codec
        self.num_layers = num_layers
        self.heads = num_kv_heads
        self.width = head_dim
        self.page_size = block_size
        self.num_pages = num_blocks
        self.dtype: np.dtype | None = None
        self.counts: dict[int, list[int]] = {}
        self.next_seq = 0

    def add(self) -> int:
        """A new, empty sequence."""
        return self._register([0] * self.num_layers)

    def append(self, seq: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Adds n ≥ 1 positions, k and v (n,G,D), at the end of one layer."""
        self._check_place(seq, layer)
        self._check_rows(k, v)
        if len(k) == 0:
            raise ValueError("append needs at least one position")
        self._reserve(seq, layer, len(k))
        self._fix_dtype(k.dtype)
        start = self.counts[seq][layer]
        self._write(seq, layer, start, self.codec.encode(k) + self.codec.encode(v))
        self.counts[seq][layer] = start + len(k)

    def attend(self, seq: int, layer: int, q: np.ndarray) -> np.ndarray:
        """Causal attention of q (n,H,D), the queries of the layer's last n positions."""
        self._check_place(seq, layer)
        self._check_queries(q)
        if len(q) > self.counts[seq][layer]:
            raise ValueError(f"{len(q)} queries for {self.counts[seq][layer]} positions")
        return attention(q, *self.view(seq, layer))

    def view(self, seq: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The layer's keys and values, two arrays (S,G,D)."""
        self._check_place(seq, layer)
        if self.dtype is None:
            empty = np.zeros((0, self.heads, self.width))
            return empty, empty.copy()
        fields = self._read(seq, layer)
        half = len(fields) // 2
        keys = self.codec.decode(fields[:half], self.dtype)
        return keys, self.codec.decode(fields[half:], self.dtype)

    def fork(self, seq: int) -> int:
        """A new sequence that starts with the same positions and then goes its own way."""
        self._check_seq(seq)
        self._check_fork(seq)
        child = self._register(list(self.counts[seq]))
        self._share(seq, child)
        return child

    def keep(self, seq: int, indices: Sequence[int]) -> None:
        """Keeps these positions, in this order, in every layer."""
        self._check_seq(seq)
        indices = self._check_indices(seq, indices)
        if np.array_equal(indices, np.arange(len(indices))):
            self.truncate(seq, len(indices))
        else:
            self._gather(seq, indices)
            self.counts[seq] = [len(indices)] * self.num_layers

    def truncate(self, seq: int, n: int) -> None:
        """Keeps the first n positions of every layer."""
        self._check_seq(seq)
        if not is_int(n) or not 0 <= n <= self.length(seq):
            raise ValueError(f"cannot cut a sequence of {self.length(seq)} positions to {n!r}")
        self._shrink(seq, n)
        self.counts[seq] = [n] * self.num_layers

    def free(self, seq: int) -> None:
        """Forgets the sequence and gives its room back."""
        self._check_seq(seq)
        self._shrink(seq, 0)
        self._forget(seq)
        del self.counts[seq]

    def length(self, seq: int) -> int:
        """How many positions are present in every layer."""
        self._check_seq(seq)
        return min(self.counts[seq])

    def prefill(
        self, seq: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, chunk: int
    ) -> np.ndarray:
        """Appends k, v and attends with q, `chunk` positions at a time: (T,H,D)."""
        self._check_place(seq, layer)
        self._check_queries(q)
        self._check_rows(k, v)
        if len(q) != len(k):
            raise ValueError(f"{len(q)} queries for {len(k)} new positions")
        out = np.empty(q.shape, q.dtype)
        if len(q) == 0:
            return out
        # All the room is taken before the first chunk is written: a full pool changes nothing.
        self._reserve(seq, layer, len(k))
        for start in range(0, len(q), chunk):
            part = slice(start, start + chunk)
            self.append(seq, layer, k[part], v[part])
            out[part] = self.attend(seq, layer, q[part])
        return out

    def _register(self, counts: list[int]) -> int:
        """A sequence under a new number."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.counts[seq] = counts
        self._open(seq)
        return seq

    def _fix_dtype(self, dtype: np.dtype) -> None:
        """The first rows decide what the cache stores."""
        if self.dtype is None:
            self.dtype = dtype
            self._allocate()

    def _row_fields(self) -> Fields:
        """An encoded empty k and v: the shapes and dtypes of what is stored a position."""
        empty = np.zeros((0, self.heads, self.width), self.dtype)
        return self.codec.encode(empty) + self.codec.encode(empty)

    def _check_seq(self, seq: int) -> None:
        """KeyError for a sequence that is unknown or freed."""
        if not is_int(seq) or seq not in self.counts:
            raise KeyError(f"no sequence {seq!r}")

    def _check_place(self, seq: int, layer: int) -> None:
        """A known sequence and a layer that exists."""
        self._check_seq(seq)
        if not is_int(layer) or not 0 <= layer < self.num_layers:
            raise ValueError(f"no layer {layer!r}; there are {self.num_layers}")

    def _check_rows(self, k: np.ndarray, v: np.ndarray) -> None:
        """k and v are (n,G,D), of one dtype, the cache's."""
        for name, rows in (("k", k), ("v", v)):
            check_floats(name, rows)
            if rows.shape[1:] != (self.heads, self.width):
                raise ValueError(f"{name} is {rows.shape}, not (n,{self.heads},{self.width})")
        if len(k) != len(v):
            raise ValueError(f"k has {len(k)} positions, v {len(v)}")
        # Not `in (None, …)`: NumPy takes None for float64 when it compares dtypes.
        if k.dtype != v.dtype or (self.dtype is not None and self.dtype != k.dtype):
            raise TypeError(f"k is {k.dtype}, v is {v.dtype}, the cache holds {self.dtype}")

    def _check_queries(self, q: np.ndarray) -> None:
        """q is (n,H,D), H a multiple of G."""
        check_floats("q", q)
        if q.shape[2] != self.width or q.shape[1] % self.heads:
            raise ValueError(
                f"q is {q.shape}: needs a multiple of {self.heads} heads, {self.width}"
            )

    def _check_indices(self, seq: int, indices: Sequence[int]) -> np.ndarray:
        """Different positions of the sequence, as an int array."""
        indices = np.asarray(indices)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise ValueError("indices must be a flat list of ints")
        indices = indices.astype(np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < self.length(seq):
            raise ValueError(f"indices leave the {self.length(seq)} positions of the sequence")
        if len(np.unique(indices)) < len(indices):
            raise ValueError("a position cannot be kept twice")
        return indices


class DenseCache(Cache):
    """A contiguous, growing array for each sequence, layer and field; room counts in positions."""

    def __init__(self, *shape: Any) -> None:
        """An empty cache."""
        super().__init__(*shape)
        self.rows: dict[int, list[Fields]] = {}

    def nbytes(self) -> int:
        """Bytes of all arrays."""
        held = [fields for layers in self.rows.values() for fields in layers]
        return sum(array.nbytes for fields in held for array in fields)

    def _open(self, seq: int) -> None:
        """No rows yet."""
        self.rows[seq] = [() for _ in range(self.num_layers)]

    def _allocate(self) -> None:
        """Nothing: rows are allocated with the sequences."""

    def _capacity_left(self, layer: int) -> int:
        """How many positions a layer has room for."""
        used = sum(counts[layer] for counts in self.counts.values())
        return self.page_size * self.num_pages - used

    def _reserve(self, _seq: int, layer: int, n: int) -> None:
        """MemoryError unless n further positions fit."""
        if n > self._capacity_left(layer):
            raise MemoryError(f"no room for {n} positions")

    def _check_fork(self, seq: int) -> None:
        """A fork needs room for its copies."""
        for layer, count in enumerate(self.counts[seq]):
            self._reserve(seq, layer, count)

    def _share(self, seq: int, child: int) -> None:
        """The child gets copies."""
        self.rows[child] = [tuple(a.copy() for a in fields) for fields in self.rows[seq]]

    def _write(self, seq: int, layer: int, start: int, fields: Fields) -> None:
        """Stores rows from position `start` on."""
        stop = start + len(fields[0])
        held = self.rows[seq][layer] or self._row_fields()
        if stop > len(held[0]):
            # Half as much again: appending one by one stays linear. Never more than the pool.
            room = min(max(stop, len(held[0]) * 3 // 2), self.page_size * self.num_pages)
            held = tuple(grown(array, start, room) for array in held)
            self.rows[seq][layer] = held
        for array, field in zip(held, fields, strict=True):
            array[start:stop] = field

    def _read(self, seq: int, layer: int) -> Fields:
        """The rows of a layer."""
        held = self.rows[seq][layer] or self._row_fields()
        return tuple(array[: self.counts[seq][layer]] for array in held)

    def _gather(self, seq: int, indices: np.ndarray) -> None:
        """The rows at these positions, encoded as they are."""
        self.rows[seq] = [
            tuple(array[indices] for array in self._read(seq, layer))
            for layer in range(self.num_layers)
        ]

    def _shrink(self, seq: int, n: int) -> None:
        """Drops the rows behind position n."""
        self.rows[seq] = [tuple(a[:n].copy() for a in fields) for fields in self.rows[seq]]

    def _forget(self, seq: int) -> None:
        """The sequence has no rows any more."""
        del self.rows[seq]


class PagedCache(Cache):
    """Pages of P positions over all layers in one pool; a page knows how many sequences hold it.

    A page with one holder may be written. A page with more is copied by the first who writes to it.
    """

    def __init__(self, *shape: Any) -> None:
        """All pages free."""
        super().__init__(*shape)
        self.pools: Fields = ()
        self.tables: dict[int, list[int]] = {}
        self.holders = [0] * self.num_pages
        self.free_pages = list(range(self.num_pages))

    def nbytes(self) -> int:
        """Bytes of the pool, scales included, and of the page tables."""
        tables = 8 * sum(map(len, self.tables.values()))
        return sum(pool.nbytes for pool in self.pools) + tables

    def _open(self, seq: int) -> None:
        """No pages yet."""
        self.tables[seq] = []

    def _allocate(self) -> None:
        """The pool, once the dtype is known."""
        place = (self.num_layers, self.num_pages, self.page_size)
        self.pools = tuple(np.zeros(place + f.shape[1:], f.dtype) for f in self._row_fields())

    def _reserve(self, seq: int, layer: int, n: int) -> None:
        """Pages of its own for n more positions of a layer; or MemoryError, and nothing changed."""
        table, start = self.tables[seq], self.counts[seq][layer]
        needed = self._pages_for(start + n)
        written = range(start // self.page_size, min(needed, len(table)))
        shared = [i for i in written if self.holders[table[i]] > 1]
        missing = max(0, needed - len(table))
        if len(shared) + missing > len(self.free_pages):
            raise MemoryError(f"{len(shared) + missing} pages needed, {len(self.free_pages)} free")
        for i in shared:
            table[i] = self._own_copy(table[i])
        table.extend(self._take() for _ in range(missing))

    def _check_fork(self, seq: int) -> None:
        """Nothing: a fork takes no pages."""

    def _share(self, seq: int, child: int) -> None:
        """The child holds the same pages."""
        self.tables[child] = list(self.tables[seq])
        for page in self.tables[child]:
            self.holders[page] += 1

    def _write(self, seq: int, layer: int, start: int, fields: Fields) -> None:
        """Stores rows in the pages reserved for them."""
        pages, slots = self._address(seq, np.arange(start, start + len(fields[0])))
        for pool, field in zip(self.pools, fields, strict=True):
            pool[layer, pages, slots] = field

    def _read(self, seq: int, layer: int) -> Fields:
        """The rows of a layer, page after page."""
        count = self.counts[seq][layer]
        table = self.tables[seq][: self._pages_for(count)]
        pages = (pool[layer, table] for pool in self.pools)
        return tuple(p.reshape(-1, *p.shape[2:])[:count] for p in pages)

    def _gather(self, seq: int, indices: np.ndarray) -> None:
        """Whole pages in front that stay as they are stay shared; the rest is written afresh."""
        moved = np.flatnonzero(indices != np.arange(len(indices)))
        fixed = int(moved[0]) // self.page_size
        tail = self.tables[seq][fixed:]
        needed = self._pages_for(len(indices)) - fixed
        own = sum(self.holders[page] == 1 for page in tail)
        if needed > len(self.free_pages) + own:
            raise MemoryError(f"{needed} pages needed, {len(self.free_pages) + own} free")
        start = fixed * self.page_size
        pages, slots = self._address(seq, indices[start:])
        kept = [pool[:, pages, slots] for pool in self.pools]
        self._shrink(seq, start)
        self.tables[seq].extend(self._take() for _ in range(needed))
        pages, slots = self._address(seq, np.arange(start, len(indices)))
        for pool, rows in zip(self.pools, kept, strict=True):
            pool[:, pages, slots] = rows

    def _shrink(self, seq: int, n: int) -> None:
        """Releases the pages behind position n."""
        table = self.tables[seq]
        kept = self._pages_for(n)
        for page in table[kept:]:
            self._release(page)
        del table[kept:]

    def _forget(self, seq: int) -> None:
        """The sequence has no table any more."""
        del self.tables[seq]

    def _pages_for(self, n: int) -> int:
        """⌈n / P⌉."""
        return -(-n // self.page_size)

    def _address(self, seq: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where positions of a sequence lie: page numbers and slots."""
        table = np.array(self.tables[seq], dtype=np.int64)
        return table[positions // self.page_size], positions % self.page_size

    def _take(self) -> int:
        """A free page, held once from now on."""
        page = self.free_pages.pop()
        self.holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        """One holder less; free when it was the last."""
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self.free_pages.append(page)

    def _own_copy(self, page: int) -> int:
        """A copy of a shared page, in exchange for the hold on it."""
        copy = self._take()
        for pool in self.pools:
            pool[:, copy] = pool[:, page]
        self._release(page)
        return copy


# --- attention, and what a caller sees ----------------------------------------------------------


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q (n,H,D) of the last n of S positions; k, v (S,G,D); head h reads kv head h // (H/G)."""
    n, heads, width = q.shape
    if n == 0:
        return np.zeros_like(q)
    positions, kv_heads, _ = k.shape
    grouped = q.reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * width**-0.5
    last_visible = np.arange(n)[:, None] + (positions - n)
    scores[..., np.arange(positions) > last_visible] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    out = weights @ v.transpose(1, 0, 2)[:, None] / weights.sum(axis=-1, keepdims=True)
    return np.ascontiguousarray(out.transpose(2, 0, 1, 3).reshape(n, heads, width))


def make_cache(
    kind: str,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
    bits: int | None = None,
) -> Cache:
    """An empty cache of one of the four kinds; quantised kinds need bits 8 or 4."""
    if kind not in KINDS:
        raise ValueError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
    shape = (num_layers, num_kv_heads, head_dim, block_size, num_blocks)
    if not all(is_int(size) and size >= 1 for size in shape):
        raise ValueError(f"sizes must be ints ≥ 1: {shape}")
    quantised = kind in ("quantized", "paged_quantized")
    if quantised and (not is_int(bits) or bits not in (4, 8)):
        raise ValueError(f"bits must be 8 or 4, not {bits!r}")
    codec = IntCodec(bits, head_dim) if quantised else PlainCodec()
    storage = PagedCache if kind in ("paged", "paged_quantized") else DenseCache
    return storage(codec, *shape)


def chunked_prefill(
    cache: Cache, seq: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, chunk: int
) -> np.ndarray:
    """Appends k, v (T,G,D) and returns the attention of q (T,H,D), `chunk` positions at a time."""
    if not is_int(chunk) or chunk < 1:
        raise ValueError(f"chunk must be an int ≥ 1, not {chunk!r}")
    return cache.prefill(seq, layer, q, k, v, min(chunk, MOST_QUERIES))


def max_context(
    spec: Mapping[str, int],
    gpu_bytes: float,
    *,
    utilization: float,
    weight_bytes: float,
    reserve_bytes: float,
) -> tuple[int, dict[str, float]]:
    """How many tokens of cache fit beside weights and reserve, and the terms of that sum."""
    missing = [name for name in SPEC if name not in spec]
    if missing:
        raise ValueError(f"the specification lacks {', '.join(missing)}")
    sizes = [spec[name] for name in SPEC]
    if not all(is_int(size) and size >= 1 for size in sizes):
        raise ValueError(f"the specification needs ints ≥ 1: {spec}")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization must be in (0, 1], not {utilization!r}")
    if min(gpu_bytes, weight_bytes, reserve_bytes) < 0:
        raise ValueError("bytes cannot be negative")
    bytes_per_token = 2 * math.prod(sizes) / 8
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, math.floor(budget / bytes_per_token))
    return tokens, {"bytes_per_token": bytes_per_token, "budget_bytes": budget}


def is_int(value: Any) -> bool:
    """A whole number that is not a truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_floats(name: str, x: Any) -> None:
    """An array of rank 3, float32 or float64."""
    if not isinstance(x, np.ndarray) or x.dtype not in FLOATS:
        raise TypeError(f"{name} must be an array of float32 or float64")
    if x.ndim != 3:
        raise ValueError(f"{name} must have three axes, not {x.ndim}")


def grown(array: np.ndarray, used: int, room: int) -> np.ndarray:
    """The first `used` rows in a new array with `room` rows."""
    new = np.zeros((room, *array.shape[1:]), array.dtype)
    new[:used] = array[:used]
    return new
