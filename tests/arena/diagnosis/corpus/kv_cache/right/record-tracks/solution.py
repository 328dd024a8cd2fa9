"""KV caches: dense, paged, quantised; chunked prefill; maximal context.

Two halves that know nothing of each other: a *format* turns keys and values into records, one for each
position, and back; a *track* stores the records of one sequence in one layer, whatever is in them.
The four kinds are the four pairs of a format and a track.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from fractions import Fraction
from operator import index as as_int

import numpy as np

QUERY_TILE = 128  # queries whose scores are held at a time

# ---------------------------------------------------------------- formats: arrays to records and back


class PlainFormat:
    """Records that hold keys and values as they are."""

    def __init__(self, heads: int, dim: int, dtype: np.dtype):
        self.record = np.dtype([("kv", dtype, (2, heads, dim))])

    def encode(self, kv: np.ndarray) -> np.ndarray:
        """Records of kv (n, 2, G, D)."""
        records = np.empty(len(kv), self.record)
        records["kv"] = kv
        return records

    def decode(self, records: np.ndarray) -> np.ndarray:
        """A new array (n, 2, G, D)."""
        return records["kv"].copy()


class QuantizedFormat:
    """Records of small codes, with a scale for each head of the key and of the value."""

    def __init__(self, heads: int, dim: int, dtype: np.dtype, bits: int):
        self.dtype, self.dim, self.packed = dtype, dim, bits == 4
        self.limit = 2 ** (bits - 1) - 1  # codes are in [-limit, limit], stored plus limit
        width = (dim + 1) // 2 if self.packed else dim
        self.record = np.dtype([("codes", np.uint8, (2, heads, width)), ("scale", dtype, (2, heads))])

    def encode(self, kv: np.ndarray) -> np.ndarray:
        """Records of kv (n, 2, G, D)."""
        scale = np.abs(kv).max(axis=-1) / self.limit
        divisor = np.where(scale > 0, scale, 1)[..., None]
        levels = np.clip(np.rint(kv / divisor), -self.limit, self.limit)
        codes = (levels + self.limit).astype(np.uint8)
        records = np.empty(len(kv), self.record)
        records["codes"] = _pack(codes) if self.packed else codes
        records["scale"] = scale
        return records

    def decode(self, records: np.ndarray) -> np.ndarray:
        """A new array (n, 2, G, D)."""
        codes = records["codes"]
        if self.packed:
            codes = _unpack(codes, self.dim)
        return (codes.astype(self.dtype) - self.limit) * records["scale"][..., None]


def _pack(codes: np.ndarray) -> np.ndarray:
    """Two codes below 16 to a byte; an odd one at the end gets a byte of its own."""
    packed = codes[..., 0::2].copy()
    high = codes[..., 1::2]
    packed[..., : high.shape[-1]] |= high << 4
    return packed


def _unpack(packed: np.ndarray, dim: int) -> np.ndarray:
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    return codes[..., :dim]


# ---------------------------------------------------------------- tracks: where records lie


class Room:
    """The positions of one layer that dense tracks share."""

    def __init__(self, capacity: int):
        self.capacity = self.vacant = capacity

    def track(self) -> "DenseTrack":
        return DenseTrack(self)

    def nbytes(self) -> int:
        return 0


class DenseTrack:
    """Records of one sequence in one layer, in one array with some slack at its end."""

    def __init__(self, room: Room):
        self.room, self.length, self.buffer = room, 0, None

    def append(self, records: np.ndarray) -> None:
        end = self.length + len(records)
        if len(records) > self.room.vacant:
            raise MemoryError("no room for the new positions")
        if self.buffer is None or end > len(self.buffer):
            roomy = min(self.room.capacity, self.length + self.length // 2)
            buffer = np.empty(max(end, roomy), records.dtype)
            if self.length:
                buffer[: self.length] = self.buffer[: self.length]
            self.buffer = buffer
        self.buffer[self.length : end] = records
        self.room.vacant -= len(records)
        self.length = end

    def records(self) -> np.ndarray:
        return self.buffer[: self.length]

    def can_fork(self) -> bool:
        return self.length <= self.room.vacant

    def fork(self) -> "DenseTrack":
        other = DenseTrack(self.room)
        if self.length:
            other.append(self.records())
        return other

    def can_become(self, length: int) -> bool:
        return length <= self.length + self.room.vacant

    def truncate(self, length: int) -> None:
        self.room.vacant += self.length - length
        if length < self.length:
            self.buffer = self.buffer[:length].copy() if length else None
        self.length = length

    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes


class PagePool:
    """The pages of one layer; storage grows as pages come into use, up to the size of the pool."""

    def __init__(self, block_size: int, num_blocks: int):
        self.block_size, self.num_blocks = block_size, num_blocks
        self.slots = None  # records, (pages, block_size)
        self.holders = np.zeros(0, np.int32)  # how many tracks hold a page
        self.idle = array("i")  # pages with storage that nobody holds

    @property
    def vacant(self) -> int:
        """Pages that can still be taken."""
        return self.num_blocks - len(self.holders) + len(self.idle)

    def track(self) -> "PagedTrack":
        return PagedTrack(self)

    def take(self, count: int, record: np.dtype) -> array:
        """`count` pages for one holder."""
        if count > self.vacant:
            raise MemoryError("no room for the new pages")
        if count > len(self.idle):
            self._grow(count - len(self.idle), record)
        cut = len(self.idle) - count
        taken = self.idle[cut:]
        del self.idle[cut:]
        for page in taken:
            self.holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder lets go; a page without holders is idle again."""
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.idle.append(page)

    def _grow(self, missing: int, record: np.dtype) -> None:
        old = len(self.holders)
        new = max(old + missing, min(self.num_blocks, old + old // 2))
        slots = np.empty((new, self.block_size), record)
        if old:
            slots[:old] = self.slots
        self.slots = slots
        self.holders = np.concatenate([self.holders, np.zeros(new - old, np.int32)])
        self.idle.extend(range(old, new))

    def nbytes(self) -> int:
        slots = 0 if self.slots is None else self.slots.nbytes
        return slots + self.holders.nbytes + self.idle.itemsize * len(self.idle)


class PagedTrack:
    """Records of one sequence in one layer, in pages that other tracks may hold as well."""

    def __init__(self, pool: PagePool):
        self.pool, self.length, self.pages = pool, 0, array("i")

    def append(self, records: np.ndarray) -> None:
        size = self.pool.block_size
        end = self.length + len(records)
        used = self.length % size  # records in a last page that is not full
        private_tail = bool(used) and self.pool.holders[self.pages[-1]] > 1
        growth = self._pages_for(end) - len(self.pages)
        fresh = self.pool.take(growth + private_tail, records.dtype)
        if private_tail:
            shared, own = self.pages[-1], fresh.pop()
            self.pool.slots[own, :used] = self.pool.slots[shared, :used]
            self.pool.drop([shared])
            self.pages[-1] = own
        self.pages.extend(fresh)
        places = np.arange(self.length, end)
        pages = np.array(self.pages)[places // size]
        self.pool.slots[pages, places % size] = records
        self.length = end

    def records(self) -> np.ndarray:
        return self.pool.slots[np.array(self.pages)].reshape(-1)[: self.length]

    def can_fork(self) -> bool:
        return True

    def fork(self) -> "PagedTrack":
        other = PagedTrack(self.pool)
        self.pool.share(self.pages)
        other.pages, other.length = self.pages[:], self.length
        return other

    def can_become(self, length: int) -> bool:
        """Whether there is room for `length` new records once the present ones are gone."""
        own = sum(1 for page in self.pages if self.pool.holders[page] == 1)
        return self._pages_for(length) <= own + self.pool.vacant

    def truncate(self, length: int) -> None:
        kept = self._pages_for(length)
        self.pool.drop(self.pages[kept:])
        del self.pages[kept:]
        self.length = length

    def nbytes(self) -> int:
        return self.pages.itemsize * len(self.pages)

    def _pages_for(self, length: int) -> int:
        return -(-length // self.pool.block_size)


# ---------------------------------------------------------------- the cache


class Cache:
    """Keys and values of many sequences; made by `make_cache`."""

    def __init__(self, layers: list[Room | PagePool], heads: int, dim: int, bits: int | None):
        self.heads, self.dim, self.bits = heads, dim, bits
        self._layers = layers
        self._sequences: dict[int, list[DenseTrack | PagedTrack]] = {}
        self._added = 0
        self._format: PlainFormat | QuantizedFormat | None = None
        self._dtype = np.dtype(np.float32)

    def add(self) -> int:
        return self._register([layer.track() for layer in self._layers])

    def append(self, seq: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        track = self.track(seq, layer)
        k, v = self.check_rows(k, v)
        if len(k) == 0:
            return
        form = self._format or self._make_format(k.dtype)
        track.append(form.encode(np.stack([k, v], axis=1)))
        self._format, self._dtype = form, k.dtype  # only now: the append may have failed

    def attend(self, seq: int, layer: int, q: np.ndarray) -> np.ndarray:
        track = self.track(seq, layer)
        q = self.check_queries(q)
        if len(q) > track.length:
            raise ValueError(f"{len(q)} queries, but only {track.length} positions")
        return causal_attention(q, *self._decoded(track))

    def view(self, seq: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        return self._decoded(self.track(seq, layer))

    def fork(self, seq: int) -> int:
        tracks = self._tracks(seq)
        if not all(track.can_fork() for track in tracks):
            raise MemoryError("no room for a copy")
        return self._register([track.fork() for track in tracks])

    def keep(self, seq: int, indices: Iterable[int]) -> None:
        tracks = self._tracks(seq)
        kept = _distinct_indices(indices, self.length(seq))
        if not kept:
            self.truncate(seq, 0)
            return
        if not all(track.can_become(len(kept)) for track in tracks):
            raise MemoryError("no room for the kept positions")
        for track in tracks:
            records = track.records()[kept]
            track.truncate(0)
            track.append(records)

    def truncate(self, seq: int, n: int) -> None:
        tracks = self._tracks(seq)
        n = as_int(n)
        if not 0 <= n <= self.length(seq):
            raise ValueError(f"n must be between 0 and {self.length(seq)}, not {n}")
        for track in tracks:
            track.truncate(n)

    def free(self, seq: int) -> None:
        for track in self._tracks(seq):
            track.truncate(0)
        del self._sequences[as_int(seq)]

    def length(self, seq: int) -> int:
        return min(track.length for track in self._tracks(seq))

    def nbytes(self) -> int:
        tracks = (track for tracks in self._sequences.values() for track in tracks)
        return sum(layer.nbytes() for layer in self._layers) + sum(track.nbytes() for track in tracks)

    def track(self, seq: int, layer: int) -> DenseTrack | PagedTrack:
        tracks = self._tracks(seq)
        layer = as_int(layer)
        if not 0 <= layer < len(tracks):
            raise ValueError(f"layer must be between 0 and {len(tracks) - 1}, not {layer}")
        return tracks[layer]

    def check_rows(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = _floats("k", k), _floats("v", v)
        if k.dtype != v.dtype:
            raise TypeError(f"k is {k.dtype} and v is {v.dtype}")
        if k.shape != v.shape or k.shape[1:] != (self.heads, self.dim):
            raise ValueError(f"k {k.shape} and v {v.shape} must be (n, {self.heads}, {self.dim})")
        if self._format is not None and k.dtype != self._dtype:
            raise TypeError(f"the cache holds {self._dtype}, not {k.dtype}")
        return k, v

    def check_queries(self, q: np.ndarray) -> np.ndarray:
        q = _floats("q", q)
        if q.shape[1] < 1 or q.shape[1] % self.heads or q.shape[2] != self.dim:
            raise ValueError(f"q {q.shape} must be (n, multiple of {self.heads}, {self.dim})")
        return q

    def _make_format(self, dtype: np.dtype) -> PlainFormat | QuantizedFormat:
        if self.bits is None:
            return PlainFormat(self.heads, self.dim, dtype)
        return QuantizedFormat(self.heads, self.dim, dtype, self.bits)

    def _decoded(self, track: DenseTrack | PagedTrack) -> tuple[np.ndarray, np.ndarray]:
        if track.length == 0:
            shape = (0, self.heads, self.dim)
            return np.empty(shape, self._dtype), np.empty(shape, self._dtype)
        kv = self._format.decode(track.records())
        return kv[:, 0], kv[:, 1]

    def _tracks(self, seq: int) -> list[DenseTrack | PagedTrack]:
        return self._sequences[as_int(seq)]

    def _register(self, tracks: list[DenseTrack | PagedTrack]) -> int:
        seq = self._added
        self._added += 1
        self._sequences[seq] = tracks
        return seq


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
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if not isinstance(kind, str) or kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError(f"unknown kind {kind!r}")
    layers = _size("num_layers", num_layers)
    heads = _size("num_kv_heads", num_kv_heads)
    dim = _size("head_dim", head_dim)
    block_size, num_blocks = _size("block_size", block_size), _size("num_blocks", num_blocks)
    if kind.endswith("quantized"):
        bits = _size("bits", bits)
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
    elif bits is not None:
        raise ValueError(f"bits must be None for the kind {kind!r}")
    if kind.startswith("paged"):
        return Cache([PagePool(block_size, num_blocks) for _ in range(layers)], heads, dim, bits)
    return Cache([Room(block_size * num_blocks) for _ in range(layers)], heads, dim, bits)


# ---------------------------------------------------------------- attention


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of q (n, H, D), the last n of S positions, over k, v (S, G, D)."""
    (n, heads, dim), (held, groups, _) = q.shape, k.shape
    share = heads // groups
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    out = np.empty(q.shape, q.dtype)
    for start in range(0, n, QUERY_TILE):
        stop = min(start + QUERY_TILE, n)
        count = stop - start
        end = held - n + stop  # keys that the last query of the tile sees
        rows = q[start:stop].reshape(count, groups, share, dim).transpose(1, 2, 0, 3)
        rows = rows.reshape(groups, share * count, dim) * q.dtype.type(dim**-0.5)
        scores = (rows @ keys[:, :, :end]).reshape(groups, share, count, end)
        own = held - n + np.arange(start, stop)  # the position of each query
        np.copyto(scores, -np.inf, where=np.arange(end) > own[:, None])
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        total = weights.sum(axis=-1, keepdims=True)
        blend = weights.reshape(groups, share * count, end) @ values[:, :end]
        answer = blend.reshape(groups, share, count, dim) / total
        out[start:stop] = answer.transpose(2, 0, 1, 3).reshape(count, heads, dim)
    return out


def chunked_prefill(
    cache: Cache, seq: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, chunk: int
) -> np.ndarray:
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    cache.track(seq, layer)
    q = cache.check_queries(q)
    k, v = cache.check_rows(k, v)
    chunk = _size("chunk", chunk)
    if len(q) != len(k):
        raise ValueError(f"{len(q)} queries, but {len(k)} keys")
    out = np.empty(q.shape, q.dtype)
    # Everything is appended at once, so that a lack of room shows before anything has changed.
    cache.append(seq, layer, k, v)
    keys, values = cache.view(seq, layer)
    before = len(keys) - len(k)
    for start in range(0, len(q), chunk):
        stop = min(start + chunk, len(q))
        seen = before + stop
        out[start:stop] = causal_attention(q[start:stop], keys[:seen], values[:seen])
    return out


# ---------------------------------------------------------------- the sum


def max_context(
    spec: Mapping[str, int],
    gpu_bytes: float,
    *,
    utilization: float,
    weight_bytes: float,
    reserve_bytes: float,
) -> tuple[int, dict[str, float]]:
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec must be a mapping")
    names = ("num_layers", "num_kv_heads", "head_dim", "bits")
    missing = [name for name in names if name not in spec]
    if missing:
        raise ValueError(f"spec lacks {missing}")
    per_token = Fraction(2 * math.prod(_size(name, spec[name]) for name in names), 8)
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization must be in (0, 1], not {utilization}")
    gpu = _amount("gpu_bytes", gpu_bytes)
    taken = _amount("weight_bytes", weight_bytes) + _amount("reserve_bytes", reserve_bytes)
    budget = _fraction_of(gpu, utilization) - taken
    terms = {"bytes_per_token": _plain(per_token), "budget_bytes": _plain(budget)}
    return max(0, math.floor(budget / per_token)), terms


def _fraction_of(amount: Fraction, utilization: float) -> Fraction:
    """The product: as floats give it (0.95 of 20 is 19) up to 32 TiB, exactly beyond."""
    if amount > 2**45:
        return Fraction(utilization) * amount
    return Fraction(float(utilization) * float(amount))


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


# ---------------------------------------------------------------- checks


def _size(name: str, value: int) -> int:
    value = as_int(value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _amount(name: str, value: float) -> Fraction:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, not {value}")
    return Fraction(value)


def _floats(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {values.dtype}")
    if values.ndim != 3:
        raise ValueError(f"{name} must have 3 axes, not {values.ndim}")
    return values


def _distinct_indices(indices: Iterable[int], length: int) -> list[int]:
    kept = [as_int(index) for index in indices]
    if any(not 0 <= index < length for index in kept):
        raise ValueError(f"indices must be between 0 and {length - 1}")
    if len(set(kept)) != len(kept):
        raise ValueError("indices must be different")
    return kept
