"""`KVCache`: the keys and values of many sequences, in four kinds with one behaviour.

Axis letters: n new positions, S positions of a sequence, H query heads, G kv heads, D head width,
P positions a page.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from trapline.gold import checks
from trapline.gold.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from trapline.gold.kv_cache.backend import (
    Backend,
    Bits,
    backend_for,
    cached_attention,
    floats,
    same_dtype,
)
from trapline.gold.kv_cache.calibrated_codec import Calibration
from trapline.gold.kv_cache.codecs import Fields, hadamard
from trapline.gold.kv_cache.dense import DenseStorage
from trapline.gold.kv_cache.paged import PagedStorage, Rows
from trapline.gold.kv_cache.recent import Recent

Kind = Literal["dense", "paged", "quantized", "paged_quantized"]
_MANY = 2**31


class Storage(Protocol):
    """Where encoded rows lie. Every method either does its work or refuses with nothing changed."""

    def allocate(self, empty: Fields, rows: Rows) -> None: ...
    def open(self, seq: int) -> None: ...
    def close(self, seq: int) -> None: ...
    def adopt(self, seq: int, tokens: Sequence[int], salt: Hashable) -> int: ...
    def publish(self, seq: int, tokens: Sequence[int], salt: Hashable) -> None: ...
    def reserve(self, seq: int, layer: int, start: int, n: int, behind: int = 0) -> None: ...
    def write(self, seq: int, layer: int, start: int, fields: Fields) -> None: ...
    def read(self, seq: int, layer: int, count: int) -> Fields: ...
    def fork(self, seq: int, child: int) -> None: ...
    def gather(self, seq: int, indices: np.ndarray) -> None: ...
    def shrink(self, seq: int, n: int) -> None: ...
    def first(self, seq: int) -> int: ...
    def nbytes(self) -> int: ...


class Pages(NamedTuple):
    """One layer in the layout of `paged_attention`: views of the storage, never copies.

    Pages are (pages, G, P, D), or (pages, G, P, D/2) for 4 bits; scales (pages, G, P) or None.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class KVCache:
    """A pool of num_blocks · block_size positions in every layer, of NumPy arrays or of tensors.

    Unquantised kinds give back exactly what was appended; quantised ones (`bits` 8, 4 or "fp8")
    give it back within half a step of each row's own scale, the same for ever. The newest `recent`
    rows of a sequence come back with about a tenth of the error (of fp8, and with outliers, more):
    a second code of 4 bits lies beside the pool, where no kernel sees it. `rotate` spreads
    outlying channels over a row before it is quantised; a `calibration` of the model (bits 4)
    gives more of them to directions in which its rows vary most, in codes that no kernel reads, and
    takes a row's number at its arrival for the position it was turned to. Both fit a row's scale to
    the least squared error, and may clip an element further. Paged kinds share pages
    between forks, copy on write, and find the pages of a known prefix again. With a `window` a
    position sees that many, itself included, and paged kinds give the pages behind it back. An
    unknown sequence is a KeyError, an exhausted pool a MemoryError; a call that raises changes
    nothing. With `like`, an array or tensor, storage is allocated at once
    for its dtype and device; otherwise by the first append. It never moves in paged kinds.
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
        bits: Bits | None = None,
        rotate: bool = False,
        calibration: Calibration | None = None,
        recent: int = 0,
        window: int | None = None,
        like: Any = None,
    ) -> None:
        checks.integer_between(
            1,
            _MANY,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            window=1 if window is None else window,
        )
        checks.integer_between(0, _MANY, recent=recent)
        _check_kind(kind, bits, rotate, calibration, recent, head_dim)
        self.kind, self.bits, self.rotate, self.window = kind, bits, rotate, window
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self._calibration = self._checked(calibration)
        self._storage: Storage = (
            PagedStorage(num_layers, num_blocks, block_size)
            if kind in ("paged", "paged_quantized")
            else DenseStorage(num_layers, num_blocks * block_size)
        )
        self._recent = Recent(num_layers, recent)
        self._counts: dict[int, list[int]] = {}
        self._next_seq = 0
        self._backend: Backend | None = None
        if like is not None:
            row = like.reshape(-1)[:0].reshape(0, num_kv_heads, head_dim)
            self._settle(self._backend_for(row), row)

    def add(self, tokens: Sequence[int] | None = None, *, salt: Hashable = None) -> int:
        """A new sequence. Numbers are never given out twice.

        It is empty; or, given the tokens of a prompt, it begins with the pages of the longest
        published prefix of the same `salt`, whole pages and never the last token: `length` says how
        much is there, and the rest is to be computed.
        """
        seq = self._new_number()
        self._storage.open(seq)
        self._recent.open(seq)
        self._counts[seq] = [0] * self.num_layers
        if tokens is not None:
            try:
                known = self._storage.adopt(seq, tokens, salt)
            except TypeError:  # tokens or a salt that nothing can be found by
                self.free(seq)
                raise
            self._counts[seq] = [known] * self.num_layers
        return seq

    def publish(self, seq: int, tokens: Sequence[int], *, salt: Hashable = None) -> None:
        """Lets later prompts find this sequence's whole pages: its positions hold these tokens.

        `salt` is whatever else the rows depend on (an adapter, a tenant). Tokens that have no
        position yet are ignored.
        """
        self._storage.publish(seq, list(tokens)[: self.length(seq)], salt)

    def append(self, seq: int, layer: int, k: Any, v: Any) -> None:
        """Adds n ≥ 1 positions, k and v (n,G,D), at the end of one layer."""
        self.check_rows(k, v)
        if len(k) == 0:
            raise RangeError("append needs at least one position")
        start = self._count(seq, layer)
        backend = self._backend or self._backend_for(k)
        fields = backend.codec.encode(layer, start, k, v)
        second = self._recent.encode(backend, layer, fields, k, v)
        self.reserve(seq, layer, len(k))
        if self._backend is None:
            self._settle(backend, k)
        self._storage.write(seq, layer, start, fields)
        self._recent.append(seq, layer, second)
        self._counts[seq][layer] = start + len(k)

    def attend(self, seq: int, layer: int, q: Any) -> Any:
        """Causal attention of q (n,H,D), the queries of the layer's last n positions."""
        self.check_queries(q)
        count = self._count(seq, layer)
        if len(q) > count:
            raise RangeError(f"{len(q)} queries for {count} positions")
        self._require_window(seq, count - len(q))
        attention = cached_attention if self._backend is None else self._backend.attention
        return attention(q, *self.view(seq, layer), window=self.window)

    def view(self, seq: int, layer: int) -> tuple[Any, Any]:
        """The layer's keys and values, (S,G,D) each, from position `first(seq)` on."""
        count = self._count(seq, layer)
        if self._backend is None:
            empty = np.zeros((0, self.num_kv_heads, self.head_dim))
            return empty, empty.copy()
        fields = self._storage.read(seq, layer, count)
        k, v = self._backend.codec.decode(layer, fields, self._backend.dtype)
        self._recent.refine(self._backend, seq, layer, k, v)
        return k, v

    def fork(self, seq: int) -> int:
        """A new sequence with the same positions. Paged kinds share them and take no pages."""
        counts = list(self._known(seq))
        child = self._next_seq
        self._storage.fork(seq, child)
        self._recent.fork(seq, child)
        self._counts[self._new_number()] = counts
        return child

    def keep(self, seq: int, indices: Any) -> None:
        """Keeps these positions in this order, in every layer."""
        wanted = self._positions(seq, indices)
        if np.array_equal(wanted, np.arange(len(wanted))):
            self.truncate(seq, len(wanted))
            return
        self._storage.gather(seq, wanted)
        self._recent.keep(seq, wanted, self._counts[seq])
        self._counts[seq] = [len(wanted)] * self.num_layers

    def truncate(self, seq: int, n: int) -> None:
        """Keeps the first n positions of every layer."""
        checks.integer_between(0, self.length(seq), n=n)
        self._require_window(seq, n)
        self._storage.shrink(seq, n)
        self._recent.keep(seq, np.arange(n), self._counts[seq])
        self._counts[seq] = [int(n)] * self.num_layers

    def free(self, seq: int) -> None:
        """Forgets the sequence and gives its room back."""
        self._known(seq)
        self._storage.close(seq)
        self._recent.close(seq)
        del self._counts[seq]

    def length(self, seq: int) -> int:
        """Positions present in every layer."""
        return min(self._known(seq))

    def first(self, seq: int) -> int:
        """The first position whose rows are still stored: 0, unless there is a window."""
        self._known(seq)
        return self._storage.first(seq)

    def nbytes(self) -> int:
        """Bytes of all rows and scales that are allocated, of constants and of the bookkeeping."""
        constants = 0 if self._calibration is None else self._calibration.nbytes
        rows = self._storage.nbytes() + self._recent.nbytes()
        return rows + constants + 8 * self.num_layers * len(self._counts)

    def reserve(self, seq: int, layer: int, n: int) -> None:
        """Takes room for n further positions of a layer; or MemoryError, and nothing changed."""
        count = self._count(seq, layer)
        self._storage.reserve(seq, layer, count, n, self._behind(self.length(seq)))

    def extend(self, seq: int, n: int) -> np.ndarray:
        """Takes n positions in every layer and answers their slots, page · P + place (int64).

        For kernels that write rows themselves, into `pages`; until they have, the rows are stale.
        """
        storage, count = self._for_kernels(), self.length(seq)
        checks.integer_between(1, _MANY, n=n)
        if max(self._counts[seq]) != count:
            raise RangeError("the layers of the sequence differ in length")
        self.reserve(seq, 0, n)
        self._counts[seq] = [count + n] * self.num_layers
        return storage.book.slots(seq, np.arange(count, count + n))

    def pages(self, layer: int) -> Pages:
        """The pools of a layer, as `paged_attention` takes them. Their addresses never change."""
        storage = self._for_kernels()
        checks.integer_between(0, self.num_layers - 1, layer=layer)
        pools = [pool[layer].swapaxes(1, 2) for pool in storage.pools]
        if len(pools) == 2:
            return Pages(pools[0], pools[1], None, None)
        k, k_scale, v, v_scale = pools
        return Pages(k, v, k_scale[..., 0], v_scale[..., 0])

    def block_table(self, seqs: Sequence[int]) -> np.ndarray:
        """The pages of several sequences, int32, one row each, filled up with 0."""
        tables = [self._paged().book.tables[seq] for seq in seqs if self._known(seq) is not None]
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, pages in zip(table, tables, strict=True):
            row[: len(pages)] = np.maximum(pages, 0)
        return table

    def check_rows(self, k: Any, v: Any) -> None:
        """k and v are two arrays (n,G,D) of the cache's dtype."""
        checks.arrays(k=k, v=v)
        sizes = checks.axes(k=(k, "n G D"), v=(v, "n G D"))
        checks.floating(*floats(k), k=k, v=v)
        if (sizes["G"], sizes["D"]) != (self.num_kv_heads, self.head_dim):
            shape = tuple(k.shape)
            raise ShapeError(f"k is {shape}, not (n, {self.num_kv_heads}, {self.head_dim})")
        if self._backend is not None and not same_dtype(k.dtype, self._backend.dtype):
            raise ShapeError(f"k is {k.dtype}, but the cache holds {self._backend.dtype}")

    def check_queries(self, q: Any) -> None:
        """q is an array (n,H,D), H a multiple of G."""
        checks.arrays(q=q)
        sizes = checks.axes(q=(q, "n H D"))
        checks.floating(*floats(q), q=q)
        if self._backend is not None and type(q.dtype) is not type(self._backend.dtype):
            raise DTypeError(f"q is {q.dtype}, but the cache holds {self._backend.dtype}")
        if sizes["D"] != self.head_dim or sizes["H"] == 0 or sizes["H"] % self.num_kv_heads:
            shape = tuple(q.shape)
            raise ShapeError(
                f"q is {shape}: needs a multiple of {self.num_kv_heads} heads of {self.head_dim}"
            )

    def _settle(self, backend: Backend, rows: Any) -> None:
        empty = backend.codec.encode(0, 0, rows[:0], rows[:0])
        self._storage.allocate(empty, backend.rows)
        self._backend = backend

    def _backend_for(self, rows: Any) -> Backend:
        return backend_for(
            rows, self.bits, self.head_dim, rotate=self.rotate, calibration=self._calibration
        )

    def _for_kernels(self) -> PagedStorage:
        if self._calibration is not None:
            raise UnsupportedError("kernels do not read or write calibrated codes")
        if self._recent.most:
            raise UnsupportedError("kernels do not see second codes: pages need recent=0")
        return self._paged()

    def _paged(self) -> PagedStorage:
        if not isinstance(self._storage, PagedStorage):
            raise UnsupportedError(f"a {self.kind} cache has no pages")
        if self._backend is None:
            raise RangeError("pages are not allocated yet: pass `like`, or append first")
        return self._storage

    def _checked(self, calibration: Calibration | None) -> Calibration | None:
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        if calibration is not None and calibration.shape != shape:
            raise ShapeError(f"the calibration is of {calibration.shape}, the cache of {shape}")
        return calibration

    def _behind(self, position: int) -> int:
        """How many positions a query here, and every later one, cannot see."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _require_window(self, seq: int, position: int) -> None:
        if self.window is not None and self.first(seq) > self._behind(position):
            first = self.first(seq)
            raise RangeError(f"the window of position {position} is gone: {first} is the first")

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


def _check_kind(
    kind: str, bits: Any, rotate: bool, calibration: Any, recent: int, width: int
) -> None:
    if kind not in get_args(Kind):
        raise RangeError(f"no kind {kind!r}; there are {', '.join(get_args(Kind))}")
    if kind in ("dense", "paged"):
        if bits is not None or rotate or calibration is not None:
            raise RangeError(
                f"{kind} stores rows as they are: it takes no bits, rotation or calibration"
            )
        if recent:
            raise RangeError(f"recent needs a quantised kind: {kind} stores rows exactly")
        return
    if isinstance(bits, bool) or bits not in get_args(Bits):
        raise RangeError(f"bits must be 8, 4 or 'fp8', got {bits!r}")
    if calibration is not None and (bits != 4 or rotate):
        raise RangeError("a calibration is for bits=4, and turns rows itself: no rotation")
    if rotate:
        hadamard(width)
