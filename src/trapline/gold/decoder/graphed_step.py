"""A decoding step on static buffers: eager on a CPU, a captured CUDA graph on a GPU.

The step itself advances tokens, positions and counters on the device. While the same rows run,
nothing is copied to the device and only tokens are copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.decode_step import DecodeStep
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.decoder.sampling import NO_TOKEN, TokenSampler, greedy
from trapline.gold.decoder.step_ops import DecodeBatch, SharedPrefix
from trapline.gold.errors import RangeError

#: Pages from which on a shared prefix is read once instead of with each row.
WORTH_SHARING = 32
#: Tokens of a row that are kept on the device until they are read.
ROOM = 16


class StepRow(NamedTuple):
    """One running sequence and the token to feed next, which is not in its cache yet."""

    sequence: PooledSequence
    token: int
    made: int


@dataclass
class _Buffers:
    """(R,) tensors, page table (R, M), last tokens (R, ROOM); all written in place."""

    ids: Tensor
    positions: Tensor
    made: Tensor
    active: Tensor
    table: Tensor
    history: Tensor

    def first(self, rows: int, pages: int) -> "_Buffers":
        """Views of the first rows, at the same addresses."""
        ids, positions, made, active = self.ids, self.positions, self.made, self.active
        return _Buffers(
            *(ids[:rows], positions[:rows], made[:rows], active[:rows]),
            self.table[:rows, :pages],
            self.history[:rows],
        )

    def advance(self, tokens: Tensor) -> None:
        """Moves to the next step; stores tokens at made % ROOM."""
        self.history.scatter_(1, (self.made % ROOM)[:, None], tokens[:, None])
        self.ids.copy_(tokens.clamp(min=0))
        self.positions.add_(self.active)
        self.made.add_(1)


class GraphedStep:
    """Steps for up to `rows` rows of at most `pages` pages each.

    Joins weights of the decoder in memory; they must not change or move afterwards.
    """

    def __init__(self, decoder: Network, pool: Pool, rows: int, pages: int) -> None:
        self.decoder, self.pool = decoder, pool
        device = decoder.device
        ids, positions, made = torch.zeros((3, rows), dtype=torch.int64, device=device)
        active = torch.zeros(rows, dtype=torch.bool, device=device)
        table = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        history = torch.zeros((rows, ROOM), dtype=torch.int64, device=device)
        self._buffers = _Buffers(ids, positions, made, active, table, history)
        self._step = DecodeStep(decoder, pool, rows)
        self._graphs: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._rows = self._pages = 0
        self._shared_prefixes: list[SharedPrefix] = []

    def load(self, rows: Sequence[StepRow]) -> None:
        """Sets the rows to run. This is the only copy from host to device."""
        ids, positions, made = self._buffers.ids, self._buffers.positions, self._buffers.made
        if len(rows) > len(ids):
            raise RangeError(f"at most {len(ids)} rows fit, got {len(rows)}")
        pages = self._buffers.table.shape[1]
        tables = [row.sequence.table for row in rows]
        if max(map(len, tables), default=0) > pages:
            raise RangeError(f"at most {pages} pages a row fit, got {max(map(len, tables))}")
        self._rows = self._bucket(len(rows), len(ids))
        self._pages = self._bucket(max(map(len, tables), default=0), pages)
        full = [row.sequence.length // self.pool.page_size for row in rows]
        self._shared_prefixes = [] if ids.is_cuda else _shared_prefixes(tables, full)
        spare = [0] * (self._rows - len(rows))
        _fill(ids, [row.token for row in rows] + spare)
        _fill(positions, [row.sequence.length for row in rows] + spare)
        _fill(made, [row.made for row in rows] + spare)
        _fill(self._buffers.active, [1] * len(rows) + spare)
        padded = [table + [0] * (pages - len(table)) for table in tables]
        _fill(self._buffers.table, padded + [[0] * pages for _ in spare])

    def logits(self) -> Tensor:
        """Feeds the tokens; returns logits (R, V) and leaves the buffers as they are."""
        if not self._buffers.ids.is_cuda:
            return self._logits()
        return self._replay(choosing=False)

    def choose(self, chooser: TokenSampler) -> Tensor:
        """Next tokens (R,) of all loaded rows; advances the buffers."""
        if self._buffers.ids.is_cuda and chooser.is_argmax:
            return self._replay(choosing=True)
        logits = self.logits()
        here = self._here()
        count = len(chooser)
        tokens = logits.new_full((len(logits),), NO_TOKEN, dtype=torch.int64)
        tokens[:count] = chooser(logits[:count], here.made[:count])
        here.advance(tokens)
        return tokens

    def choose_ahead(self, chooser: TokenSampler, steps: int) -> Tensor:
        """Next tokens (steps, R) of several steps, without waiting for any of them."""
        for _ in range(steps):
            self.choose(chooser)
        here = self._here()
        number = here.made[:, None] - steps + torch.arange(steps, device=here.made.device)
        return here.history.gather(1, number % ROOM).T

    def _bucket(self, count: int, most: int) -> int:
        """Graphs are captured for powers of two; without graphs nothing is rounded up."""
        if not self._buffers.ids.is_cuda or count == 0:
            return count
        return min(1 << (count - 1).bit_length(), most)

    def _here(self) -> _Buffers:
        return self._buffers.first(self._rows, self._pages)

    def _logits(self) -> Tensor:
        return self._step.logits(self._batch(), self._shared_prefixes)

    @torch.no_grad()
    def _greedy(self) -> Tensor:
        here = self._here()
        if self._step.fused is None:
            tokens = greedy(self._logits())
            here.advance(tokens)
            return tokens
        tokens = torch.empty_like(here.ids)
        self._step.fused.pick(self._batch(), here.made, tokens, here.history)
        return tokens

    def _batch(self) -> DecodeBatch:
        """Rows that share nothing: all their positions are tail."""
        here, size = self._here(), self.pool.page_size
        table, positions = here.table, here.positions
        return DecodeBatch(here.ids, positions, here.active, table, size, table, size, positions)

    def _replay(self, *, choosing: bool) -> Tensor:
        key = (self._rows, self._pages, choosing)
        if key not in self._graphs:
            work, here = self._greedy if choosing else self._logits, self._here()
            made: list[Tensor] = []
            changed = here.ids, here.positions, here.made
            graph = captured(lambda: made.append(work()), changed, here.ids.device)
            self._graphs[key] = graph, made[-1]
        graph, result = self._graphs[key]
        graph.replay()
        return result


def _shared_prefixes(tables: Sequence[list[int]], full: Sequence[int]) -> list[SharedPrefix]:
    """Adjacent rows that begin with the same full pages, if enough to read them once."""
    found: list[SharedPrefix] = []
    first = 0
    for last in range(1, len(tables) + 1):
        if last < len(tables) and tables[last][:1] == tables[first][:1]:
            continue
        shortest = min(full[first:last], default=0)
        columns = zip(*(table[:shortest] for table in tables[first:last]), strict=True)
        same = list(takewhile(lambda column: len(set(column)) == 1, columns))
        if last - first > 1 and len(same) >= WORTH_SHARING:
            found.append(SharedPrefix(first, last, len(same)))
        first = last
    return found


def _fill(buffer: Tensor, rows: Sequence[int] | Sequence[list[int]]) -> None:
    if rows:
        buffer[: len(rows)].copy_(torch.tensor(rows, dtype=buffer.dtype, device="cpu"))
