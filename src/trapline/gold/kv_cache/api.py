"""`KVCache` stores the keys and values of many sequences; its four kinds share one interface.

Axis letters: n new positions, S positions of a sequence, H query heads, G kv heads, D head width,
P positions per page.
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
from trapline.gold.page_layout import PageLayout, check_layout

Kind = Literal["dense", "paged", "quantized", "paged_quantized"]
_MANY = 2**31


class Storage(Protocol):
    """Stores encoded rows. A method that raises changes nothing."""

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
    """Views of one layer's storage in the layout of `paged_attention`.

    Pages are (pages, G, P, D), or (pages, G, P, D/2) for 4 bits; scales (pages, G, P) or None.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class KVCache:
    """A pool of num_blocks · block_size positions per layer, in NumPy arrays or torch tensors.

    Unquantised kinds return exactly what was appended. Quantised kinds (`bits` 8, 4 or "fp8")
    return it within half a step of each row's scale, and a row never changes later. `recent`: the
    newest rows of a sequence get a second 4 bit code outside the pool, which reduces their error to
    about a tenth (less for fp8 and outliers); kernels do not read it. `rotate` spreads outlier
    channels over the row before quantisation. A `calibration` of the model (bits 4) assigns more
    bits to directions of high variance, in codes that no kernel reads; it takes the index at which
    a row arrives as its rotary position. Both choose the scale of least squared error, which may
    clip elements. Paged kinds share pages between forks, copy on write, and reuse the pages of a
    published prefix. With a `window` each position sees that many, itself included, and paged kinds
    free the pages behind it. An unknown sequence raises KeyError, an exhausted pool MemoryError; a
    call that raises changes nothing. `like`, an array or tensor, allocates the storage at once for
    its dtype and device; otherwise the first append does. The storage of paged kinds never moves;
    `layout` is its order in memory, see `trapline.gold.page_layout`.
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
        layout: PageLayout = "bshd",
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
        check_layout(layout)
        paged = kind in ("paged", "paged_quantized")
        if layout != "bshd" and (not paged or calibration is not None):
            raise RangeError(f"layout {layout!r} needs a paged kind without a calibration")
        self.kind, self.bits, self.rotate, self.window = kind, bits, rotate, window
        self.layout = layout
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        shape = (num_layers, num_kv_heads, head_dim)
        if calibration is not None and not isinstance(calibration, Calibration):
            raise DTypeError(f"calibration must be a Calibration, got {calibration!r}")
        if calibration is not None and calibration.shape != shape:
            raise ShapeError(f"the calibration is of {calibration.shape}, the cache of {shape}")
        self._calibration = calibration
        self._storage: Storage = (
            PagedStorage(num_layers, num_blocks, block_size, layout)
            if paged
            else DenseStorage(num_layers, num_blocks * block_size)
        )
        self._recent = Recent(num_layers, recent)
        self._counts: dict[int, list[int]] = {}
        self._next_seq = 0
        self._backend: Backend | None = None
        if like is not None:
            checks.arrays(like=like)
            row = like.reshape(-1)[:0].reshape(0, num_kv_heads, head_dim)
            self._settle(self._backend_for(row), row)

    def add(self, tokens: Sequence[int] | None = None, *, salt: Hashable = None) -> int:
        """Creates a sequence and returns its number, which is never reused.

        Given the tokens of a prompt, the sequence begins with the whole pages of the longest
        published prefix with the same `salt`, never with the last token; `length` says how many
        positions that is, and the caller computes the rest.
        """
        seq = self._new_number()
        self._storage.open(seq)
        self._recent.open(seq)
        self._counts[seq] = [0] * self.num_layers
        if tokens is not None:
            try:
                known = self._storage.adopt(seq, tokens, salt)
            except TypeError:  # tokens or salt cannot be hashed
                self.free(seq)
                raise
            self._counts[seq] = [known] * self.num_layers
        return seq

    def publish(self, seq: int, tokens: Sequence[int], *, salt: Hashable = None) -> None:
        """Makes this sequence's whole pages available to later prompts with the same tokens.

        `salt` identifies what else the rows depend on (an adapter, a tenant). Tokens without a
        position are ignored.
        """
        self._storage.publish(seq, list(tokens)[: self.length(seq)], salt)

    def append(self, seq: int, layer: int, k: Any, v: Any) -> None:
        """Appends n ≥ 1 positions, k and v (n,G,D), to one layer."""
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
        """Creates a sequence with the same positions. Paged kinds share the pages."""
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
        """Deletes the sequence and frees its storage."""
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
        """Allocated bytes: rows, scales, constants and bookkeeping."""
        constants = 0 if self._calibration is None else self._calibration.nbytes
        rows = self._storage.nbytes() + self._recent.nbytes()
        return rows + constants + 8 * self.num_layers * len(self._counts)

    def reserve(self, seq: int, layer: int, n: int) -> None:
        """Allocates n further positions of a layer, or raises MemoryError and changes nothing."""
        count = self._count(seq, layer)
        self._storage.reserve(seq, layer, count, n, self._behind(self.length(seq)))

    def extend(self, seq: int, n: int) -> np.ndarray:
        """Allocates n positions in every layer and returns their slots, page · P + offset (int64).

        For kernels that write the rows into `pages` themselves; until then the rows are stale.
        """
        storage, count = self._for_kernels(), self.length(seq)
        checks.integer_between(1, _MANY, n=n)
        if max(self._counts[seq]) != count:
            raise RangeError("the layers of the sequence differ in length")
        self.reserve(seq, 0, n)
        self._counts[seq] = [count + n] * self.num_layers
        return storage.book.slots(seq, np.arange(count, count + n))

    def pages(self, layer: int) -> Pages:
        """The pools of a layer for `paged_attention`. Their addresses never change."""
        storage = self._for_kernels()
        checks.integer_between(0, self.num_layers - 1, layer=layer)
        pools = [pool[layer].swapaxes(1, 2) for pool in storage.pools]
        if len(pools) == 2:
            return Pages(pools[0], pools[1], None, None)
        k, k_scale, v, v_scale = pools
        return Pages(k, v, k_scale[..., 0], v_scale[..., 0])

    def block_table(self, seqs: Sequence[int]) -> np.ndarray:
        """The pages of several sequences, int32, one row each, padded with 0."""
        tables = [self._paged().book.tables[seq] for seq in seqs if self._known(seq) is not None]
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, pages in zip(table, tables, strict=True):
            row[: len(pages)] = np.maximum(pages, 0)
        return table

    def check_rows(self, k: Any, v: Any) -> None:
        """Raises unless k and v are arrays (n,G,D) of the cache's dtype."""
        checks.arrays(k=k, v=v)
        sizes = checks.axes(k=(k, "n G D"), v=(v, "n G D"))
        checks.floating(*floats(k), k=k, v=v)
        if (sizes["G"], sizes["D"]) != (self.num_kv_heads, self.head_dim):
            shape = tuple(k.shape)
            raise ShapeError(f"k is {shape}, not (n, {self.num_kv_heads}, {self.head_dim})")
        if self._backend is not None and not same_dtype(k.dtype, self._backend.dtype):
            raise ShapeError(f"k is {k.dtype}, but the cache holds {self._backend.dtype}")

    def check_queries(self, q: Any) -> None:
        """Raises unless q is an array (n,H,D) with H a multiple of G."""
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

    def _behind(self, position: int) -> int:
        """The number of positions that no query from this position on can see."""
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
    """`KVCache(kind, …)` under the name that the challenge asks for."""
    return KVCache(kind, **sizes)


def chunked_prefill(
    cache: KVCache, seq: int, layer: int, q: Any, k: Any, v: Any, chunk: int
) -> Any:
    """Appends k, v (T,G,D) to a sequence chunk by chunk and returns the attention of q (T,H,D).

    Every chunk size gives the result of one append and one attend, with chunk·S·H scores in memory
    instead of T·S·H. (With `recent` rows smaller chunks are more accurate.) A prompt that does not
    fit raises MemoryError and changes nothing.
    """
    checks.integer_between(1, 2**62, chunk=chunk)
    cache.check_rows(k, v)
    cache.check_queries(q)
    if len(q) != len(k):
        raise ShapeError(f"q has {len(q)} positions, k has {len(k)}")
    out = np.empty_like(q) if isinstance(q, np.ndarray) else q.new_empty(q.shape)
    if len(q) > 0:
        cache.reserve(seq, layer, len(k))
    for start in range(0, len(q), chunk):
        part = slice(start, start + chunk)
        cache.append(seq, layer, k[part], v[part])
        out[part] = cache.attend(seq, layer, q[part])
    return out


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
