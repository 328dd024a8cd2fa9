"""A decoding step on buffers that never move: eager on a CPU, a captured graph on a GPU.

One new token for every row. Tokens, positions and page tables are tensors that the step itself
moves on, so as long as the same rows run nothing goes to the device, and all that comes back is the
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.decode_batch import DecodeBatch
from trapline.gold.decoder.decode_step import DecodeStep
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.decoder.sampling import NO_TOKEN, TokenSampler, greedy
from trapline.gold.decoder.step_ops import SharedPrefix
from trapline.gold.errors import RangeError

#: Pages; a shorter prefix is cheaper to read with the rest.
WORTH_SHARING = 32
#: Tokens of a row that may wait on the device until somebody reads them.
ROOM = 16


class StepRow(NamedTuple):
    """A row as the step needs it: the token to feed, which is not in its cache yet."""

    sequence: PooledSequence
    token: int
    made: int


@dataclass
class _Buffers:
    """(R,) tensors, the table (R, M), and the last tokens (R, ROOM); all written in place."""

    ids: Tensor
    positions: Tensor
    made: Tensor
    active: Tensor
    table: Tensor
    history: Tensor

    def first(self, rows: int, pages: int) -> "_Buffers":
        """Views of the first rows; they have the buffers' addresses."""
        ids, positions, made, active = self.ids, self.positions, self.made, self.active
        return _Buffers(
            *(ids[:rows], positions[:rows], made[:rows], active[:rows]),
            self.table[:rows, :pages],
            self.history[:rows],
        )

    def advance(self, tokens: Tensor) -> None:
        """To the next step; the tokens are remembered by the number that each row made."""
        self.history.scatter_(1, (self.made % ROOM)[:, None], tokens[:, None])
        self.ids.copy_(tokens.clamp(min=0))
        self.positions.add_(self.active)
        self.made.add_(1)


class GraphedStep:
    """The step for up to `rows` rows of at most `pages` pages each.

    It joins the decoder's weights: the decoder stays where it is from now on, and as it is.
    """

    def __init__(self, decoder: Network, pool: Pool, rows: int, pages: int) -> None:
        self.decoder, self.pool = decoder, pool
        device = decoder.device
        ids, positions, made = torch.zeros((3, rows), dtype=torch.int64, device=device)
        active = torch.zeros(rows, dtype=torch.bool, device=device)
        table = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        history = torch.zeros((rows, ROOM), dtype=torch.int64, device=device)
        self._buffers = _Buffers(ids, positions, made, active, table, history)
        self._forward = DecodeStep(decoder, pool, rows)
        self._graphs: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._rows = self._pages = 0
        self._shared_prefixes: list[SharedPrefix] = []

    def load(self, rows: Sequence[StepRow]) -> None:
        """Other rows from now on. This is the only way from the host to the device."""
        ids, positions, made = self._buffers.ids, self._buffers.positions, self._buffers.made
        if len(rows) > len(ids):
            raise RangeError(f"{len(rows)} rows are more than {len(ids)}")
        pages = self._buffers.table.shape[1]
        tables = [row.sequence.table for row in rows]
        if max(map(len, tables), default=0) > pages:
            raise RangeError(f"a row has {max(map(len, tables))} pages, there is room for {pages}")
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
        """(R, V) after this step's tokens, which go into the cache; the buffers stay."""
        if not self._buffers.ids.is_cuda:
            return self._logits()
        return self._replay(choosing=False)

    def choose(self, chooser: TokenSampler) -> Tensor:
        """Next tokens (R,) of all loaded rows; the buffers are ready for the step after."""
        if self._buffers.ids.is_cuda and chooser.all_greedy:
            return self._replay(choosing=True)
        logits = self.logits()
        here = self._here()
        count = len(chooser)
        tokens = logits.new_full((len(logits),), NO_TOKEN, dtype=torch.int64)
        tokens[:count] = chooser(logits[:count], here.made[:count])
        here.advance(tokens)
        return tokens

    def choose_ahead(self, chooser: TokenSampler, steps: int) -> Tensor:
        """Next tokens (steps, R) of that many steps, without a look at any of them."""
        for _ in range(steps):
            self.choose(chooser)
        here = self._here()
        number = here.made[:, None] - steps + torch.arange(steps, device=here.made.device)
        return here.history.gather(1, number % ROOM).T

    def _bucket(self, count: int, most: int) -> int:
        """Graphs are captured for powers of two; without them there is nothing to round up to."""
        if not self._buffers.ids.is_cuda or count == 0:
            return count
        return min(1 << (count - 1).bit_length(), most)

    def _here(self) -> _Buffers:
        return self._buffers.first(self._rows, self._pages)

    def _logits(self) -> Tensor:
        return self._forward.logits(self._alone(), self._shared_prefixes)

    @torch.no_grad()
    def _greedy(self) -> Tensor:
        here = self._here()
        if self._forward.compact is None:
            tokens = greedy(self._logits())
            here.advance(tokens)
            return tokens
        tokens = torch.empty_like(here.ids)
        self._forward.compact.pick(self._alone(), here.made, tokens, here.history)
        return tokens

    def _alone(self) -> DecodeBatch:
        """Rows that share nothing: all their positions are tail."""
        here, size = self._here(), self.pool.page_size
        table, positions = here.table, here.positions
        return DecodeBatch(here.ids, positions, here.active, table, size, table, size, positions)

    def _replay(self, *, choosing: bool) -> Tensor:
        key = (self._rows, self._pages, choosing)
        if key not in self._graphs:
            self._graphs[key] = self._captured(choosing=choosing)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _captured(self, *, choosing: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Records the step once."""
        work, here = self._greedy if choosing else self._logits, self._here()
        result: list[Tensor] = []
        graph = captured(lambda: result.append(work()), (here.ids, here.positions, here.made))
        return graph, result[-1]


def _shared_prefixes(tables: Sequence[list[int]], full: Sequence[int]) -> list[SharedPrefix]:
    """Neighbours that begin with the same full pages, where it is worth a product of its own."""
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
        buffer[: len(rows)].copy_(torch.tensor(rows, dtype=buffer.dtype))
