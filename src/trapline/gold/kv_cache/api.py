"""`KVCache`: the keys and values of many sequences, in four kinds with one behaviour.

Axis letters: n new positions, S positions of a sequence, H query heads, G kv heads, D head width.
"""

from typing import Any, Literal, Protocol, get_args

import numpy as np

from trapline.gold import checks
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.kv_cache.dense import DenseStorage
from trapline.gold.kv_cache.paged import PagedStorage
from trapline.gold.kv_cache.quantized import Codec, Fields, IntCodec, PlainCodec

Kind = Literal["dense", "paged", "quantized", "paged_quantized"]
_MANY = 2**31


class Storage(Protocol):
    """Where encoded rows lie. Every method either does its work or refuses with nothing changed."""

    def allocate(self, empty: Fields) -> None: ...
    def open(self, seq: int) -> None: ...
    def close(self, seq: int) -> None: ...
    def reserve(self, seq: int, layer: int, start: int, n: int) -> None: ...
    def write(self, seq: int, layer: int, start: int, fields: Fields) -> None: ...
    def read(self, seq: int, layer: int, count: int) -> Fields: ...
    def fork(self, seq: int, child: int) -> None: ...
    def gather(self, seq: int, indices: np.ndarray) -> None: ...
    def shrink(self, seq: int, n: int) -> None: ...
    def nbytes(self) -> int: ...


class KVCache:
    """A pool of num_blocks · block_size positions in every layer.

    Unquantised kinds give back exactly what was appended; quantised ones (`bits` 8 or 4) give it
    back within half a step of each row's own scale, the same for ever. Paged kinds share pages
    between forks and copy on write. An unknown sequence is a KeyError, an exhausted pool a
    MemoryError; a call that raises changes nothing.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        bits: int | None = None,
    ) -> None:
        checks.integer_between(
            1,
            _MANY,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
        )
        self.kind = kind
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self._codec = _codec(kind, bits, head_dim)
        self._storage: Storage = (
            PagedStorage(num_layers, num_blocks, block_size)
            if kind in ("paged", "paged_quantized")
            else DenseStorage(num_layers, num_blocks * block_size)
        )
        self._counts: dict[int, list[int]] = {}
        self._next_seq = 0
        self._dtype: np.dtype[np.floating] | None = None

    def add(self) -> int:
        """A new, empty sequence. Numbers are never given out twice."""
        seq = self._new_number()
        self._storage.open(seq)
        self._counts[seq] = [0] * self.num_layers
        return seq

    def append(self, seq: int, layer: int, k: Any, v: Any) -> None:
        """Adds n ≥ 1 positions, k and v (n,G,D), at the end of one layer."""
        self.check_rows(k, v)
        if len(k) == 0:
            raise RangeError("append needs at least one position")
        start = self._count(seq, layer)
        fields = (*self._codec.encode(k), *self._codec.encode(v))
        self.reserve(seq, layer, len(k))
        if self._dtype is None:
            self._dtype = k.dtype
            self._storage.allocate(tuple(field[:0] for field in fields))
        self._storage.write(seq, layer, start, fields)
        self._counts[seq][layer] = start + len(k)

    def attend(self, seq: int, layer: int, q: Any) -> np.ndarray:
        """Causal attention of q (n,H,D), the queries of the layer's last n positions."""
        self.check_queries(q)
        count = self._count(seq, layer)
        if len(q) > count:
            raise RangeError(f"{len(q)} queries for {count} positions")
        return cached_attention(q, *self.view(seq, layer))

    def view(self, seq: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The layer's keys and values, (S,G,D) each."""
        count = self._count(seq, layer)
        if self._dtype is None:
            empty = np.zeros((0, self.num_kv_heads, self.head_dim))
            return empty, empty.copy()
        fields = self._storage.read(seq, layer, count)
        half = len(fields) // 2
        keys, values = fields[:half], fields[half:]
        return self._codec.decode(keys, self._dtype), self._codec.decode(values, self._dtype)

    def fork(self, seq: int) -> int:
        """A new sequence with the same positions. Paged kinds share them and take no pages."""
        counts = list(self._known(seq))
        child = self._next_seq
        self._storage.fork(seq, child)
        self._counts[self._new_number()] = counts
        return child

    def keep(self, seq: int, indices: Any) -> None:
        """Keeps these positions in this order, in every layer."""
        wanted = self._positions(seq, indices)
        if np.array_equal(wanted, np.arange(len(wanted))):
            self.truncate(seq, len(wanted))
            return
        self._storage.gather(seq, wanted)
        self._counts[seq] = [len(wanted)] * self.num_layers

    def truncate(self, seq: int, n: int) -> None:
        """Keeps the first n positions of every layer."""
        checks.integer_between(0, self.length(seq), n=n)
        self._storage.shrink(seq, n)
        self._counts[seq] = [int(n)] * self.num_layers

    def free(self, seq: int) -> None:
        """Forgets the sequence and gives its room back."""
        self._known(seq)
        self._storage.close(seq)
        del self._counts[seq]

    def length(self, seq: int) -> int:
        """Positions present in every layer."""
        return min(self._known(seq))

    def nbytes(self) -> int:
        """Bytes of all rows and scales that are allocated, and of the bookkeeping."""
        return self._storage.nbytes() + 8 * self.num_layers * len(self._counts)

    def reserve(self, seq: int, layer: int, n: int) -> None:
        """Takes room for n further positions of a layer; or MemoryError, and nothing changed."""
        self._storage.reserve(seq, layer, self._count(seq, layer), n)

    def check_rows(self, k: Any, v: Any) -> None:
        """k and v are two arrays (n,G,D) of the cache's dtype."""
        checks.arrays(k=k, v=v)
        sizes = checks.axes(k=(k, "n G D"), v=(v, "n G D"))
        checks.floating(*checks.FLOATS, k=k, v=v)
        if (sizes["G"], sizes["D"]) != (self.num_kv_heads, self.head_dim):
            raise ShapeError(f"k is {k.shape}, not (n, {self.num_kv_heads}, {self.head_dim})")
        if self._dtype is not None and k.dtype != self._dtype:
            raise ShapeError(f"k is {k.dtype}, but the cache holds {self._dtype}")

    def check_queries(self, q: Any) -> None:
        """q is an array (n,H,D), H a multiple of G."""
        checks.arrays(q=q)
        sizes = checks.axes(q=(q, "n H D"))
        checks.floating(*checks.FLOATS, q=q)
        if sizes["D"] != self.head_dim or sizes["H"] == 0 or sizes["H"] % self.num_kv_heads:
            raise ShapeError(
                f"q is {q.shape}: needs a multiple of {self.num_kv_heads} heads of {self.head_dim}"
            )

    def _new_number(self) -> int:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return seq

    def _known(self, seq: int) -> list[int]:
        if isinstance(seq, bool) or seq not in self._counts:
            raise KeyError(f"no sequence {seq!r}")
        return self._counts[seq]

    def _count(self, seq: int, layer: int) -> int:
        counts = self._known(seq)
        checks.integer_between(0, self.num_layers - 1, layer=layer)
        return counts[layer]

    def _positions(self, seq: int, indices: Any) -> np.ndarray:
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise ShapeError("indices must be a flat list of ints")
        wanted = wanted.astype(np.int64)
        length = self.length(seq)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < length:
            raise RangeError(f"indices leave the {length} positions of the sequence")
        if len(np.unique(wanted)) < len(wanted):
            raise RangeError("a position cannot be kept twice")
        return wanted


def make_cache(kind: Kind, **sizes: Any) -> KVCache:
    """The challenge's name for `KVCache(kind, …)`."""
    return KVCache(kind, **sizes)


def cached_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q (n,H,D) of the last n of S positions; k, v (S,G,D); head h reads kv head h // (H/G)."""
    n, heads, width = q.shape
    if n == 0:
        return np.zeros_like(q)
    positions, kv_heads, _ = k.shape
    grouped = q.reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * width**-0.5  # (G, H/G, n, S)
    last_visible = np.arange(n)[:, None] + (positions - n)
    scores[..., np.arange(positions) > last_visible] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights @ v.transpose(1, 0, 2)[:, None] / weights.sum(axis=-1, keepdims=True)
    return np.ascontiguousarray(out.transpose(2, 0, 1, 3).reshape(n, heads, width))


def _codec(kind: str, bits: int | None, width: int) -> Codec:
    if kind not in get_args(Kind):
        raise RangeError(f"no kind {kind!r}; there are {', '.join(get_args(Kind))}")
    if kind in ("dense", "paged"):
        if bits is not None:
            raise RangeError(f"{kind} stores rows as they are and takes no bits, got {bits!r}")
        return PlainCodec()
    if isinstance(bits, bool) or bits not in (4, 8):
        raise RangeError(f"bits must be 8 or 4, got {bits!r}")
    return IntCodec(bits, width)
