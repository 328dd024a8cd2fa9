"""A decoding step on buffers that never move: eager on a CPU, a captured graph on a GPU.

One new token for every row. Tokens, positions and page tables are tensors that the step itself
moves on, so as long as the same rows run nothing goes to the device, and all that comes back is the
tokens. A layer is four matrix products and, between them, four fused operations and attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.decoder import fused
from trapline.gold.decoder.layers import Layer, Norm, tensor
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.decoder.rope import angles
from trapline.gold.decoder.sampling import NO_TOKEN, Chooser, greedy
from trapline.gold.errors import RangeError
from trapline.gold.norms.api import rms_norm

if TYPE_CHECKING:
    from trapline.gold.decoder.compact import CompactStep, Rows

#: Pages; a shorter prefix is cheaper to read with the rest.
WORTH_SHARING = 16
#: Tokens of a row that may wait on the device until somebody reads them.
ROOM = 16


class Running(NamedTuple):
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


class StaticStep:
    """The step for up to `rows` rows of at most `pages` pages each.

    It joins the decoder's weights: the decoder stays where it is from now on, and as it is.
    """

    def __init__(self, decoder: Decoder, pool: Pool, rows: int, pages: int) -> None:
        self.decoder, self.pool = decoder, pool
        device = decoder.device
        ids, positions, made = torch.zeros((3, rows), dtype=torch.int64, device=device)
        active = torch.zeros(rows, dtype=torch.bool, device=device)
        table = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        history = torch.zeros((rows, ROOM), dtype=torch.int64, device=device)
        self._buffers = _Buffers(ids, positions, made, active, table, history)
        cosine, sine = _tables(decoder)
        self._layers = [_Fused(decoder, layer, cosine, sine) for layer in decoder.layers]
        self._compact = compact_of(decoder, pool, self._layers, rows)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._rows = self._pages = 0
        self._shared: list[fused.Shared] = []

    def load(self, rows: Sequence[Running]) -> None:
        """Other rows from now on. This is the only way from the host to the device."""
        ids, positions, made = self._buffers.ids, self._buffers.positions, self._buffers.made
        if len(rows) > len(ids):
            raise RangeError(f"{len(rows)} rows are more than {len(ids)}")
        pages = self._buffers.table.shape[1]
        tables = [row.sequence.table for row in rows]
        if max(map(len, tables), default=0) > pages:
            raise RangeError(f"a row has {max(map(len, tables))} pages, there is room for {pages}")
        self._rows = self._bucket(len(rows))
        self._pages = max(map(len, tables), default=0) if not ids.is_cuda else pages
        full = [row.sequence.length // self.pool.page_size for row in rows]
        self._shared = [] if ids.is_cuda else _shared(tables, full)
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
            return self._forward()
        return self._replay(choosing=False)

    def choose(self, chooser: Chooser) -> Tensor:
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

    def choose_ahead(self, chooser: Chooser, steps: int) -> Tensor:
        """Next tokens (steps, R) of that many steps, without a look at any of them."""
        for _ in range(steps):
            self.choose(chooser)
        here = self._here()
        number = here.made[:, None] - steps + torch.arange(steps, device=here.made.device)
        return here.history.gather(1, number % ROOM).T

    def _bucket(self, rows: int) -> int:
        """Graphs are captured for powers of two; without them there is nothing to round up to."""
        if not self._buffers.ids.is_cuda or rows == 0:
            return rows
        return min(1 << (rows - 1).bit_length(), len(self._buffers.ids))

    def _here(self) -> _Buffers:
        return self._buffers.first(self._rows, self._pages)

    @torch.no_grad()
    def _forward(self) -> Tensor:
        decoder, rows = self.decoder, self._here()
        if self._compact is not None:
            return self._compact.logits(self._compact_rows())
        size = self.pool.page_size
        page = rows.table.gather(1, (rows.positions // size)[:, None])[:, 0]
        slots = torch.where(rows.active, page * size + rows.positions % size, -1)
        # A row that only fills up the batch reads one position of whatever is there.
        lengths = (rows.positions + 1).int()
        places = _Places(rows.positions, slots, rows.table, lengths, self._shared)
        x = tensor(decoder.embedding(rows.ids))
        if decoder.position is not None:
            x = x + decoder.position(rows.positions)
        delta = None
        for number, layer in enumerate(self._layers):
            keys, values = self.pool.keys[number], self.pool.values[number]
            x, delta = layer(x, delta, places, keys, values, size)
        assert delta is not None
        hidden, _ = _add_norm(decoder.norm, delta, x)
        return decoder.logits(hidden)

    @torch.no_grad()
    def _greedy(self) -> Tensor:
        here = self._here()
        if self._compact is None:
            tokens = greedy(self._forward())
            here.advance(tokens)
            return tokens
        tokens = torch.empty_like(here.ids)
        self._compact.pick(self._compact_rows(), here.made, tokens, here.history)
        return tokens

    def _compact_rows(self) -> "Rows":
        """Rows that share nothing: all their positions are tail."""
        from trapline.gold.decoder.compact import Rows

        here, size = self._here(), self.pool.page_size
        table, positions = here.table, here.positions
        return Rows(here.ids, positions, here.active, table, size, table, size, positions)

    def _replay(self, *, choosing: bool) -> Tensor:
        key = (self._rows, choosing)
        if key not in self._graphs:
            self._graphs[key] = self._captured(choosing=choosing)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _captured(self, *, choosing: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Records the step once. The runs before it compile; what they moved is put back."""
        work = self._greedy if choosing else self._forward
        here = self._here()
        moved = [(buffer, buffer.clone()) for buffer in (here.ids, here.positions, here.made)]
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
                for buffer, before in moved:
                    buffer.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = work()
        return graph, result


class _Places(NamedTuple):
    """Where this step's tokens stand and what they see."""

    positions: Tensor
    slots: Tensor
    table: Tensor
    lengths: Tensor
    shared: list[fused.Shared]


class _Fused:
    """A layer's weights, joined where one matrix product can do the work of several."""

    def __init__(
        self, decoder: Decoder, layer: nn.Module, cosine: Tensor | None, sine: Tensor | None
    ) -> None:
        assert isinstance(layer, Layer)
        config = decoder.config
        attention, feedforward = layer.attention, layer.feedforward
        self.norms = layer.attention_norm, layer.feedforward_norm
        self.window = attention.window
        self.qkv = _Joined([attention.q, attention.k, attention.v])
        self.out, self.down = attention.out, feedforward.down
        gates = [] if feedforward.gate is None else [feedforward.gate]
        self.up = _Joined([*gates, feedforward.up])
        self.gated = feedforward.gate is not None
        q_norm, k_norm = None, None
        if config.qk_norm:
            q_norm, k_norm = attention.q_norm.weight, attention.k_norm.weight
        self.turn = fused.Turn(cosine, sine, q_norm, k_norm, config.norm_eps)

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        places: _Places,
        keys: Tensor,
        values: Tensor,
        page_size: int,
    ) -> tuple[Tensor, Tensor]:
        """The stream so far and what is still to be added to it; the same after this layer."""
        h, x = _add_norm(self.norms[0], delta, x)
        q = fused.turn_and_append(
            self.qkv(h), self.turn, places.positions, places.slots, keys, values
        )
        seen = fused.decode_attention(
            q, keys, values, places.table, places.lengths, page_size, self.window, places.shared
        )
        h, x = _add_norm(self.norms[1], tensor(self.out(seen.flatten(1))), x)
        up = self.up(h)
        inner = fused.swiglu(up) if self.gated else functional.gelu(up, approximate="tanh")
        return x, tensor(self.down(inner))


class _Joined:
    """Linear layers with one input as one product; others (quantised ones, say) one by one.

    The weights of the parts become views of the joined one: nothing is kept twice.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = list(parts)
        self._whole: tuple[Tensor, Tensor | None] | None = None
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) == len(self._parts):
            weight = torch.cat([linear.weight.detach() for linear in linears])
            bias = None
            if linears[0].bias is not None:
                bias = torch.cat([linear.bias.detach() for linear in linears])
            sizes = [linear.out_features for linear in linears]
            for linear, piece in zip(linears, torch.split(weight, sizes), strict=True):
                linear.weight.data = piece
            self._whole = weight, bias

    @property
    def weight(self) -> Tensor:
        """The joined one; only plain layers have it."""
        assert self._whole is not None
        return self._whole[0]

    def __call__(self, x: Tensor) -> Tensor:
        if self._whole is not None:
            return functional.linear(x, *self._whole)
        return torch.cat([part(x) for part in self._parts], dim=-1)


def compact_of(
    decoder: Decoder, pool: Pool, layers: Sequence[_Fused], rows: int
) -> "CompactStep | None":
    """The step in five kernels a layer, for the models and devices that it serves."""
    if decoder.device.type != "cuda":
        return None
    from trapline.gold.decoder import compact

    if not compact.suits(decoder):
        return None
    weights = [
        compact.Weights(
            qkv=one.qkv.weight,
            out=tensor(one.out.weight),
            up=one.up.weight,
            down=tensor(one.down.weight),
            norms=(one.norms[0].weight, one.norms[1].weight),
            q_norm=one.turn.q_norm,
            k_norm=one.turn.k_norm,
            window=one.window,
        )
        for one in layers
    ]
    cosine, sine = layers[0].turn.cosine, layers[0].turn.sine
    assert cosine is not None
    assert sine is not None
    return compact.CompactStep(decoder, weights, (cosine, sine), pool.keys, pool.values, rows)


def _tables(decoder: Decoder) -> tuple[Tensor | None, Tensor | None]:
    """Cosine and sine of every position of the context."""
    config = decoder.config
    if config.rope is None:
        return None, None
    everywhere = torch.arange(config.context)
    cosine, sine = angles(config.rope, config.head_dim, everywhere, decoder.norm.weight)
    return cosine, sine


def _add_norm(norm: Norm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of x + delta, x + delta)."""
    if delta is None:
        return tensor(norm(x)), x
    if norm.bias is None:
        normed = rms_norm(delta, norm.weight, norm.eps, residual=x)
        return tensor(normed.y), tensor(normed.residual)
    x = x + delta
    return tensor(norm(x)), x


def _shared(tables: Sequence[list[int]], full: Sequence[int]) -> list[fused.Shared]:
    """Neighbours that begin with the same full pages, where it is worth a product of its own."""
    found: list[fused.Shared] = []
    first = 0
    for last in range(1, len(tables) + 1):
        if last < len(tables) and tables[last][:1] == tables[first][:1]:
            continue
        shortest = min(full[first:last], default=0)
        columns = zip(*(table[:shortest] for table in tables[first:last]), strict=True)
        same = list(takewhile(lambda column: len(set(column)) == 1, columns))
        if last - first > 1 and len(same) >= WORTH_SHARING:
            found.append(fused.Shared(first, last, len(same)))
        first = last
    return found


def _fill(buffer: Tensor, rows: Sequence[int] | Sequence[list[int]]) -> None:
    if rows:
        buffer[: len(rows)].copy_(torch.tensor(rows, dtype=buffer.dtype))
