"""KV caches from codecs (what a row looks like), stores (where rows lie), and the cache itself."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

import numpy as np

KINDS = {
    "dense": (False, False),
    "paged": (True, False),
    "quantized": (False, True),
    "paged_quantized": (True, True),
}


# ---------------------------------------------------------------- codecs


class PlainCodec:
    """Rows as they are."""

    def __init__(self, heads, width):
        self.heads, self.width = heads, width

    def blank(self, count, dtype):
        return [np.zeros((count, self.heads, self.width), dtype)]

    def encode(self, rows):
        return [np.array(rows)]

    def decode(self, parts, dtype):
        return parts[0].astype(dtype)


class IntegerCodec:
    """Rows as integers of 8 or 4 bits with a float32 step for each row and head."""

    def __init__(self, heads, width, bits):
        self.heads, self.width, self.bits = heads, width, bits
        self.top = 2 ** (bits - 1) - 1
        self.packed_width = math.ceil(width * bits / 8)

    def blank(self, count, dtype):
        return [
            np.zeros((count, self.heads, self.packed_width), np.uint8),
            np.zeros((count, self.heads), np.float32),
        ]

    def encode(self, rows):
        largest = np.max(np.abs(rows), axis=2).astype(np.float64)
        step = (largest / self.top).astype(np.float32)
        inverse = np.zeros(step.shape)
        np.divide(1.0, step, out=inverse, where=step > 0)
        levels = np.rint(rows * inverse[:, :, None])
        levels = np.clip(levels, -self.top, self.top) + (self.top + 1)
        return [self._pack(levels.astype(np.uint8)), step]

    def decode(self, parts, dtype):
        levels = self._unpack(parts[0]).astype(dtype) - (self.top + 1)
        return levels * parts[1][:, :, None].astype(dtype)

    def _pack(self, levels):
        if self.bits == 8:
            return levels
        packed = np.zeros((*levels.shape[:2], self.packed_width), np.uint8)
        packed[:, :, :] = levels[:, :, ::2]
        odd = levels[:, :, 1::2]
        packed[:, :, : odd.shape[2]] |= odd << 4
        return packed

    def _unpack(self, packed):
        if self.bits == 8:
            return packed
        levels = np.empty((*packed.shape[:2], 2 * self.packed_width), np.uint8)
        levels[:, :, ::2] = packed & 0x0F
        levels[:, :, 1::2] = packed >> 4
        return levels[:, :, : self.width]


# ---------------------------------------------------------------- stores
#
# A store is the room of one layer. It hands out tracks: the rows of one sequence, a list of parts
# (arrays whose first axis is the position). `blank(count)` makes such parts.


class DenseTrack:
    def __init__(self):
        self.length = 0
        self.parts = None


class DenseStore:
    """One growing block of rows for each track; room is counted by the position."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.used = 0
        self.tracks = set()

    def new_track(self):
        track = DenseTrack()
        self.tracks.add(track)
        return track

    def room_for(self, track, count):
        return self.used + count <= self.capacity

    def room_to_clone(self, track):
        return self.used + track.length <= self.capacity

    def room_to_rewrite(self, track, count):
        return True

    def extend(self, track, parts, blank):
        count = len(parts[0])
        end = track.length + count
        if track.parts is None or end > len(track.parts[0]):
            held = 0 if track.parts is None else len(track.parts[0])
            grown = blank(min(self.capacity, max(end, held + held // 2)))
            for new, old in zip(grown, track.parts or [], strict=False):
                new[: track.length] = old[: track.length]
            track.parts = grown
        for array, part in zip(track.parts, parts, strict=False):
            array[track.length : end] = part
        track.length = end
        self.used += count

    def read(self, track):
        return [array[: track.length] for array in track.parts]

    def clone(self, track):
        twin = self.new_track()
        twin.length = track.length
        if track.length:
            twin.parts = [array[: track.length].copy() for array in track.parts]
        self.used += track.length
        return twin

    def rewrite(self, track, parts, blank):
        self.cut(track, 0)
        self.extend(track, parts, blank)

    def cut(self, track, length):
        self.used -= track.length - length
        track.length = length
        if length == 0:
            track.parts = None

    def drop(self, track):
        self.cut(track, 0)
        self.tracks.discard(track)

    def nbytes(self):
        held = [array.nbytes for track in self.tracks for array in track.parts or []]
        return sum(held) + 16 * len(self.tracks)


class Page:
    """A page of rows and the number of tracks that read it."""

    __slots__ = ("owners", "parts")

    def __init__(self, parts):
        self.owners = 1
        self.parts = parts


class PagedTrack:
    def __init__(self):
        self.length = 0
        self.pages = []


class PagedStore:
    """Pages of a fixed size, shared between forks and copied when one of them writes."""

    def __init__(self, page_size, num_pages):
        self.page_size, self.num_pages = page_size, num_pages
        self.pages = set()

    def new_track(self):
        return PagedTrack()

    def _spare(self):
        return self.num_pages - len(self.pages)

    def _pages_of(self, length):
        return math.ceil(length / self.page_size)

    def _tail_is_shared(self, track):
        return track.length % self.page_size != 0 and track.pages[-1].owners > 1

    def room_for(self, track, count):
        extra = self._pages_of(track.length + count) - len(track.pages)
        return extra + self._tail_is_shared(track) <= self._spare()

    def room_to_clone(self, track):
        return True

    def room_to_rewrite(self, track, count):
        mine = sum(page.owners == 1 for page in track.pages)
        return self._pages_of(count) <= self._spare() + mine

    def _new_page(self, parts):
        page = Page(parts)
        self.pages.add(page)
        return page

    def _let_go(self, page):
        page.owners -= 1
        if page.owners == 0:
            self.pages.discard(page)

    def extend(self, track, parts, blank):
        if self._tail_is_shared(track):
            shared = track.pages[-1]
            track.pages[-1] = self._new_page([array.copy() for array in shared.parts])
            self._let_go(shared)
        done, count = 0, len(parts[0])
        while done < count:
            start = track.length % self.page_size
            if start == 0:
                track.pages.append(self._new_page(blank(self.page_size)))
            take = min(count - done, self.page_size - start)
            for array, part in zip(track.pages[-1].parts, parts, strict=False):
                array[start : start + take] = part[done : done + take]
            track.length += take
            done += take

    def read(self, track):
        columns = zip(*(page.parts for page in track.pages), strict=False)
        return [np.concatenate(column)[: track.length] for column in columns]

    def clone(self, track):
        twin = self.new_track()
        twin.length = track.length
        twin.pages = list(track.pages)
        for page in twin.pages:
            page.owners += 1
        return twin

    def rewrite(self, track, parts, blank):
        self.cut(track, 0)
        self.extend(track, parts, blank)

    def cut(self, track, length):
        wanted = self._pages_of(length)
        for page in track.pages[wanted:]:
            self._let_go(page)
        del track.pages[wanted:]
        track.length = length

    def drop(self, track):
        self.cut(track, 0)

    def nbytes(self):
        return sum(array.nbytes for page in self.pages for array in page.parts) + 4 * len(
            self.pages
        )


# ---------------------------------------------------------------- checks


def whole(value, name, least, most=math.inf):
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is an int")
    if not least <= value <= most:
        raise ValueError(f"{name} is out of range: {value}")
    return int(value)


def float_array(value, name):
    array = np.asarray(value)
    if array.dtype != np.float32 and array.dtype != np.float64:
        raise TypeError(f"{name} is an array of float32 or float64")
    if array.ndim != 3:
        raise ValueError(f"{name} has three axes")
    return array


# ---------------------------------------------------------------- attention


def causal_attention(queries, keys, values, block=32):
    """Attention of queries (n,H,D) that are the last n positions of keys and values (S,G,D)."""
    count, heads, width = queries.shape
    offset = keys.shape[0] - count
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    result = np.zeros_like(queries, order="C", subok=False)
    scale = 1.0 / math.sqrt(width)
    for g in range(kv_heads):
        k_head = np.ascontiguousarray(keys[:, g])
        v_head = np.ascontiguousarray(values[:, g])
        for first in range(0, count, block):
            last = min(first + block, count)
            horizon = offset + last
            q_rows = queries[first:last, g * group : (g + 1) * group].reshape(-1, width)
            scores = (q_rows @ k_head[:horizon].T) * scale
            own = offset + np.repeat(np.arange(first, last), group)
            scores[np.arange(horizon)[None, :] > own[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed = weights @ v_head[:horizon]
            mixed /= weights.sum(axis=1, keepdims=True)
            result[first:last, g * group : (g + 1) * group] = mixed.reshape(
                last - first, group, width
            )
    return result


# ---------------------------------------------------------------- the cache


class KVCache:
    def __init__(self, codec, stores):
        self._codec = codec
        self._stores = stores
        self._sequences = {}
        self._count = 0
        self._dtype = None

    # -- helpers

    def _tracks(self, seq):
        try:
            return self._sequences[seq]
        except KeyError:
            raise KeyError(f"no sequence {seq}") from None

    def _locate(self, seq, layer):
        tracks = self._tracks(seq)
        index = whole(layer, "layer", 0, len(self._stores) - 1)
        return self._stores[index], tracks[index]

    def _blank(self, count):
        return self._codec.blank(count, self._dtype) + self._codec.blank(count, self._dtype)

    def _check_dtype(self, array):
        if self._dtype is not None and array.dtype != self._dtype:
            raise TypeError(f"this cache holds {self._dtype}")

    def _checked_rows(self, k, v):
        k, v = float_array(k, "k"), float_array(v, "v")
        if k.shape != v.shape:
            raise ValueError("k and v have one shape")
        if k.shape[1:] != (self._codec.heads, self._codec.width):
            raise ValueError("k and v do not fit the cache")
        if k.dtype != v.dtype:
            raise TypeError("k and v have one dtype")
        self._check_dtype(k)
        return k, v

    def _checked_queries(self, q):
        q = float_array(q, "q")
        if q.shape[2] != self._codec.width:
            raise ValueError("q does not have the head width of the cache")
        if q.shape[1] < 1 or q.shape[1] % self._codec.heads:
            raise ValueError("the query heads are no multiple of the kv heads")
        self._check_dtype(q)
        return q

    # -- sequences

    def add(self):
        seq = self._count
        self._count += 1
        self._sequences[seq] = [store.new_track() for store in self._stores]
        return seq

    def fork(self, seq):
        tracks = self._tracks(seq)
        pairs = list(zip(self._stores, tracks, strict=False))
        if not all(store.room_to_clone(track) for store, track in pairs):
            raise MemoryError("no room for a copy")
        twin = self._count
        self._count += 1
        self._sequences[twin] = [store.clone(track) for store, track in pairs]
        return twin

    def free(self, seq):
        for store, track in zip(self._stores, self._tracks(seq), strict=False):
            store.drop(track)
        del self._sequences[seq]

    def length(self, seq):
        return min(track.length for track in self._tracks(seq))

    # -- rows

    def append(self, seq, layer, k, v):
        store, track = self._locate(seq, layer)
        k, v = self._checked_rows(k, v)
        if len(k) == 0:
            raise ValueError("nothing to append")
        if not store.room_for(track, len(k)):
            raise MemoryError("the pool is full")
        self._dtype = k.dtype
        store.extend(track, self._codec.encode(k) + self._codec.encode(v), self._blank)

    def view(self, seq, layer):
        store, track = self._locate(seq, layer)
        parts = self._blank(0) if track.length == 0 else store.read(track)
        half = len(parts) // 2
        dtype = self._dtype or np.dtype(np.float64)
        return self._codec.decode(parts[:half], dtype), self._codec.decode(parts[half:], dtype)

    def attend(self, seq, layer, q):
        _, track = self._locate(seq, layer)
        q = self._checked_queries(q)
        if len(q) > track.length:
            raise ValueError("more queries than positions")
        k, v = self.view(seq, layer)
        return causal_attention(q, k, v)

    def keep(self, seq, indices):
        tracks = self._tracks(seq)
        limit = self.length(seq)
        order = [whole(i, "an index", 0, limit - 1) for i in indices]
        if len(set(order)) < len(order):
            raise ValueError("an index occurs twice")
        pairs = list(zip(self._stores, tracks, strict=False))
        if not all(store.room_to_rewrite(track, len(order)) for store, track in pairs):
            raise MemoryError("no room for a rearranged copy")
        for store, track in pairs:
            if not order:
                store.cut(track, 0)
                continue
            chosen = [array[order] for array in store.read(track)]
            store.rewrite(track, chosen, self._blank)

    def truncate(self, seq, n):
        tracks = self._tracks(seq)
        n = whole(n, "n", 0, self.length(seq))
        for store, track in zip(self._stores, tracks, strict=False):
            store.cut(track, n)

    def nbytes(self):
        tables = sum(
            4 * len(track.pages)
            for tracks in self._sequences.values()
            for track in tracks
            if isinstance(track, PagedTrack)
        )
        return tables + sum(store.nbytes() for store in self._stores)

    # -- prefill

    def prefill(self, seq, layer, q, k, v, chunk):
        """Append and attend chunk by chunk; nothing happens unless everything fits."""
        store, track = self._locate(seq, layer)
        chunk = whole(chunk, "chunk", 1)
        q = self._checked_queries(q)
        k, v = self._checked_rows(k, v)
        if len(q) != len(k):
            raise ValueError("q and k differ in length")
        if q.dtype != k.dtype:
            raise TypeError("q and k differ in dtype")
        if len(k) and not store.room_for(track, len(k)):
            raise MemoryError("the pool is full")
        result = np.zeros(q.shape, q.dtype)
        for start in range(0, len(k), chunk):
            part = slice(start, start + chunk)
            self.append(seq, layer, k[part], v[part])
            result[part] = self.attend(seq, layer, q[part])
        return result


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    paged, quantized = KINDS[kind]
    num_layers = whole(num_layers, "num_layers", 1)
    heads = whole(num_kv_heads, "num_kv_heads", 1)
    width = whole(head_dim, "head_dim", 1)
    block_size = whole(block_size, "block_size", 1)
    num_blocks = whole(num_blocks, "num_blocks", 1)
    if quantized:
        if bits not in (4, 8):
            raise ValueError("bits is 8 or 4")
        codec = IntegerCodec(heads, width, int(bits))
    else:
        if bits is not None:
            raise ValueError("bits is None for this kind")
        codec = PlainCodec(heads, width)
    if paged:
        stores = [PagedStore(block_size, num_blocks) for _ in range(num_layers)]
    else:
        stores = [DenseStore(block_size * num_blocks) for _ in range(num_layers)]
    return KVCache(codec, stores)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    return cache.prefill(seq, layer, q, k, v, chunk)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    if not isinstance(spec, Mapping):
        raise TypeError("spec is a mapping")
    elements = 2
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        elements *= whole(spec.get(name), name, 1)
    bits = whole(spec.get("bits"), "bits", 1)
    for name, value in (
        ("gpu_bytes", gpu_bytes),
        ("weight_bytes", weight_bytes),
        ("reserve_bytes", reserve_bytes),
        ("utilization", utilization),
    ):
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is a number")
        if not value >= 0:
            raise ValueError(f"{name} is negative")
    if utilization == 0 or utilization > 1:
        raise ValueError("utilization is in (0, 1]")
    bytes_per_token = elements * bits / 8
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, math.floor(budget / bytes_per_token))
    terms = {"bytes_per_token": bytes_per_token, "budget_bytes": budget}
    return tokens, terms
