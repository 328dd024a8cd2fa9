"""One pool of pages for many sequences, shared by forks.

`kv_cache`'s `BlockManager` tracks which sequence holds which page. The tensors here never move, so
captured CUDA graphs may use their addresses.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trapline.gold.attention.paged.api import paged_append
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.block_manager import BlockManager
from trapline.gold.kv_cache.torch_backend import codec

#: Storage of quantised codes; 4-bit codes are packed two to a byte.
_CODES = {8: torch.int8, 4: torch.uint8, "fp8": torch.uint8}


@dataclass(frozen=True)
class StoredLayer:
    """One layer: rows (slots, G, …), or codes with one float16 scale a slot and head."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None
    bits: int | str | None
    width: int
    page_size: int

    def pages(self) -> dict[str, Any]:
        """Arguments of the paged functions: views (pages, G, P, …) and scales."""
        given = {"k_pages": self.keys, "v_pages": self.values}
        if self.bits == "fp8":
            given = {name: codes.view(torch.float8_e4m3fn) for name, codes in given.items()}
        if self.scales is not None:
            given |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        shape = (-1, self.page_size)
        return {
            name: rows.view(*shape, *rows.shape[1:]).transpose(1, 2) for name, rows in given.items()
        }

    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores rows (n, G, D), quantised if the pool is.

        Rows that cannot be quantised, such as NaN, read back as NaN: an error here would affect the
        whole batch.
        """
        if self.scales is None:
            self.keys.index_copy_(0, slots, k)
            self.values.index_copy_(0, slots, v)
        elif k.is_cuda:
            paged_append(k, v, slots=slots, **self.pages())
        else:
            self._put_codes(slots, k, v)

    def _put_codes(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        assert self.scales is not None
        code = codec(self.bits, self.width, fitted=False, refusing=False)
        (keys, k_scale), (values, v_scale) = code.encode(k), code.encode(v)
        # Paged attention treats NaN scores as those of a query without keys. A NaN key must
        # therefore make its value NaN too, or the error would go unnoticed.
        v_scale = torch.where(k_scale.isnan(), k_scale, v_scale)
        stored = (self.keys, self.values, *self.scales)
        for rows, new in zip(stored, (keys, values, k_scale[..., 0], v_scale[..., 0]), strict=True):
            rows.index_copy_(0, slots, new)

    def get(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows as they are read back."""
        if self.scales is None:
            return self.keys[slots], self.values[slots]
        code = codec(self.bits, self.width, fitted=False)
        both = zip((self.keys, self.values), self.scales, strict=True)
        keys, values = (code.decode((x[slots], s[slots][..., None]), dtype) for x, s in both)
        return keys, values


class Pool:
    """Keys and values of all sequences, (layers, pages · P, G, D) each.

    With `bits` (8, 4 or "fp8") they are quantised, with `scales`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        bits: int | str | None = None,
    ) -> None:
        if bits is not None and bits not in _CODES:
            raise RangeError(f"bits must be 8, 4, 'fp8' or None, got {bits!r}")
        if pages < 1 or page_size < 1:
            raise RangeError(f"pages and page_size must be at least 1, got {pages}, {page_size}")
        columns = config.head_dim // 2 if bits == 4 else config.head_dim
        shape = (config.layers, pages * page_size, config.kv_heads, columns)
        kind = dtype if bits is None else _CODES[bits]
        self.keys = torch.zeros(shape, dtype=kind, device=device)
        self.values = torch.zeros(shape, dtype=kind, device=device)
        self.bits, self.dtype, self._width = bits, dtype, config.head_dim
        self.scales: tuple[Tensor, ...] = ()
        if bits is not None:
            self.scales = tuple(torch.zeros((2, *shape[:3]), dtype=torch.float16, device=device))
        self.book = BlockManager(pages, page_size)
        self._opened = 0

    @property
    def page_size(self) -> int:
        return self.book.page_size

    def nbytes(self) -> int:
        """Bytes of storage, including scales."""
        return sum(one.nbytes for one in (self.keys, self.values, *self.scales))

    def layer(self, number: int) -> StoredLayer:
        """The storage of one layer."""
        keys, values = self.keys[number], self.values[number]
        scales = (self.scales[0][number], self.scales[1][number]) if self.scales else None
        return StoredLayer(keys, values, scales, self.bits, self._width, self.page_size)

    def open(self) -> "PooledSequence":
        """A new, empty sequence."""
        self._opened += 1
        self.book.tables[self._opened] = []
        return PooledSequence(self, self._opened, 0)

    def reserve(self, seq: int, start: int, count: int) -> None:
        """Reserves positions for writing; copies shared pages first."""
        self.copy(self.book.reserve(seq, start, count))

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copies pages (from, to) in all layers."""
        if not pages:
            return
        sources, targets = torch.tensor(pages, device=self.keys.device).T
        for stored in (self.keys, self.values, *self.scales):
            paged = stored.view(len(stored), self.book.num_pages, self.page_size, -1)
            paged[:, targets] = paged[:, sources]


class PooledSequence:
    """One sequence of a pool, as a cache for the network."""

    def __init__(self, pool: Pool, seq: int, length: int) -> None:
        self.pool, self.seq, self.length = pool, seq, length

    @property
    def table(self) -> list[int]:
        """Its pages, in order."""
        return self.pool.book.tables[self.seq]

    def slots(self, start: int, end: int) -> Tensor:
        """Slots of positions in the pool, on the host."""
        size = self.pool.page_size
        at = torch.arange(start, end, device="cpu")
        return (
            torch.tensor(self.table, dtype=torch.int64, device="cpu")[at // size] * size + at % size
        )

    def reserve(self, count: int) -> None:
        """Reserves `count` positions in all; on MemoryError nothing changes."""
        self.pool.reserve(self.seq, self.length, count - self.length)

    def advance(self, count: int) -> None:
        """Call after every layer has stored its rows."""
        self.length += count

    def keep(self, positions: Sequence[int]) -> None:
        """Keeps only these positions, in this order, for instance the accepted branch of a tree."""
        wanted = [int(position) for position in positions]
        if len(set(wanted)) < len(wanted) or not all(0 <= p < self.length for p in wanted):
            raise RangeError(f"positions to keep must be distinct and below {self.length}")
        # The prefix usually stays where it is; only positions that move are copied.
        fixed = next((i for i, p in enumerate(wanted) if i != p), len(wanted))
        if fixed < len(wanted):
            self.pool.reserve(self.seq, fixed, len(wanted) - fixed)
            slots = self.slots(0, self.length).to(self.pool.keys.device)
            source = slots[torch.tensor(wanted[fixed:], device=slots.device)]
            for stored in (self.pool.keys, self.pool.values, *self.pool.scales):
                stored[:, slots[fixed : len(wanted)]] = stored[:, source]
        self.pool.book.shrink(self.seq, len(wanted))
        self.length = len(wanted)

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> None:
        """Starts with the published pages of the longest common prefix of these tokens."""
        self.length = self.pool.book.adopt(self.seq, tokens, salt)

    def publish(self, tokens: Sequence[int], salt: Hashable = None) -> None:
        """Publishes this sequence's full pages under its tokens, for others to adopt."""
        self.pool.book.publish(self.seq, tokens, salt)

    def fork(self) -> "PooledSequence":
        """A sequence with the same past; pages are copied on write."""
        twin = self.pool.open()
        self.pool.book.fork(self.seq, twin.seq)
        twin.length = self.length
        return twin

    def free(self) -> None:
        """Returns its pages to the pool."""
        self.pool.book.shrink(self.seq, 0)
        del self.pool.book.tables[self.seq]
