"""One pool of pages for many sequences: storage that never moves, shared by forks.

Who holds which page is `kv_cache`'s `BlockManager`; here are the rows, as tensors whose addresses a
captured CUDA graph may rely on.
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

#: What codes are stored as; four bits are two to a byte.
_CODES = {8: torch.int8, 4: torch.uint8, "fp8": torch.uint8}


@dataclass(frozen=True)
class StoredLayer:
    """One layer: rows (slots, G, …) as they are, or codes with a float16 scale a slot and head."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None
    bits: int | str | None
    width: int
    page_size: int

    def pages(self) -> dict[str, Any]:
        """What the paged functions read: (pages, G, P, …) views, and the scales' names."""
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
        """Stores rows (n, G, D), each element quantised once.

        Rows that no code can stand for, NaN say, come back as NaN: they are one sequence's matter,
        and an error here would be that of all in the batch.
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
        # Paged attention takes scores of NaN for those of a query that sees nothing: a key that is
        # lost would pass as one nobody looked at, were its value not lost with it.
        v_scale = torch.where(k_scale.isnan(), k_scale, v_scale)
        stored = (self.keys, self.values, *self.scales)
        for rows, new in zip(stored, (keys, values, k_scale[..., 0], v_scale[..., 0]), strict=True):
            rows.index_copy_(0, slots, new)

    def get(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows as they are read back."""
        if self.scales is None:
            return self.keys[slots], self.values[slots]
        code = codec(self.bits, self.width, fitted=False)
        both = zip((self.keys, self.values), self.scales, strict=True)
        keys, values = (code.decode((x[slots], s[slots][..., None]), dtype) for x, s in both)
        return keys, values


class Pool:
    """Keys and values of all sequences, (layers, pages · P, G, D) each.

    With `bits` (8, 4 or "fp8") they are codes, and `scales` says what they stand for.
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
            raise RangeError(f"a pool stores 8, 4 or 'fp8' bits, or rows as they are, not {bits!r}")
        if pages < 1 or page_size < 1:
            raise RangeError(f"a pool needs pages and room in them, got {pages} of {page_size}")
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
        """Scales included."""
        return sum(one.nbytes for one in (self.keys, self.values, *self.scales))

    def layer(self, number: int) -> StoredLayer:
        """One layer's part."""
        keys, values = self.keys[number], self.values[number]
        scales = (self.scales[0][number], self.scales[1][number]) if self.scales else None
        return StoredLayer(keys, values, scales, self.bits, self._width, self.page_size)

    def open(self) -> "PooledSequence":
        """A new, empty sequence."""
        self._opened += 1
        self.book.tables[self._opened] = []
        return PooledSequence(self, self._opened, 0)

    def reserve(self, seq: int, start: int, count: int) -> None:
        """Makes positions the sequence's own to write; shared pages are copied first."""
        self.copy(self.book.reserve(seq, start, count))

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copies pages (from, to) in all layers, all at once."""
        if not pages:
            return
        sources, targets = torch.tensor(pages, device=self.keys.device).T
        for stored in (self.keys, self.values, *self.scales):
            paged = stored.view(len(stored), self.book.num_pages, self.page_size, -1)
            paged[:, targets] = paged[:, sources]


class PooledSequence:
    """One sequence in a pool; has what the decoder asks of a cache."""

    def __init__(self, pool: Pool, seq: int, length: int) -> None:
        self.pool, self.seq, self.length = pool, seq, length

    @property
    def table(self) -> list[int]:
        """Its pages, in order."""
        return self.pool.book.tables[self.seq]

    def slots(self, start: int, end: int) -> Tensor:
        """Where positions lie in the pool, told on the host, which has the table."""
        size = self.pool.page_size
        at = torch.arange(start, end, device="cpu")
        return (
            torch.tensor(self.table, dtype=torch.int64, device="cpu")[at // size] * size + at % size
        )

    def reserve(self, count: int) -> None:
        """Room for so many positions in all; or MemoryError, and nothing changed."""
        self.pool.reserve(self.seq, self.length, count - self.length)

    def advance(self, count: int) -> None:
        """After every layer has stored its rows."""
        self.length += count

    def keep(self, positions: Sequence[int]) -> None:
        """Keeps these positions in this order: what a verified tree leaves of its branches."""
        wanted = [int(position) for position in positions]
        if len(set(wanted)) < len(wanted) or not all(0 <= p < self.length for p in wanted):
            raise RangeError(f"positions to keep must be distinct and below {self.length}")
        # The prefix mostly stays where it is, and only what moves is copied.
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
        """Begins with the pages of others that start with these tokens, as many as there are."""
        self.length = self.pool.book.adopt(self.seq, tokens, salt)

    def publish(self, tokens: Sequence[int], salt: Hashable = None) -> None:
        """Lets others begin with this sequence's whole pages: these are its tokens."""
        self.pool.book.publish(self.seq, tokens, salt)

    def fork(self) -> "PooledSequence":
        """A sequence with the same past; nothing is copied until one of them writes there."""
        twin = self.pool.open()
        self.pool.book.fork(self.seq, twin.seq)
        twin.length = self.length
        return twin

    def free(self) -> None:
        """Gives its pages back."""
        self.pool.book.shrink(self.seq, 0)
        del self.pool.book.tables[self.seq]
