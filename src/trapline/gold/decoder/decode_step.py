"""One new token for every row through all layers; `GraphedStep` and beam search repeat it.

On a Hopper GPU most models run `FusedDecodeStep`, five kernels a layer. All others run the same
step in torch: four matrix products a layer with the fused operations of `step_ops` between them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.decoder import step_ops
from trapline.gold.decoder.cpu import compiled_ops
from trapline.gold.decoder.cpu.linear_few_rows import linear
from trapline.gold.decoder.layers import Layer, Norm, join_weights, tensor
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import Pool, StoredLayer
from trapline.gold.decoder.rope import Rope, angles
from trapline.gold.decoder.sampling import ranked
from trapline.gold.decoder.step_ops import DecodeBatch
from trapline.gold.norms.api import rms_norm
from trapline.gold.softmax_topk.api import TopK

if TYPE_CHECKING:
    from trapline.gold.decoder.fused_step import FusedDecodeStep


class DecodeStep:
    """Logits of up to `rows` rows at a time.

    Joins weights of the decoder in memory; they must not change or move afterwards.
    """

    def __init__(self, decoder: Network, pool: Pool, rows: int) -> None:
        self.decoder, self.pool = decoder, pool
        config, cosine, sine = decoder.config, None, None
        if config.rope is not None:
            everywhere = torch.arange(config.context, device=decoder.device)
            cosine, sine = angles(config.rope, config.head_dim, everywhere, decoder.norm.weight)
        self.layers = [_TorchLayer(decoder, layer, cosine, sine) for layer in decoder.layers]
        self.fused = fused_decode_step(self, rows) if _fused_supports(decoder, pool) else None

    @torch.no_grad()
    def logits(self, rows: DecodeBatch, shared: Sequence[step_ops.SharedPrefix] = ()) -> Tensor:
        """Stores keys and values of these tokens; returns logits (B, V).

        `shared` are rows with a common prefix; only the torch path on a CPU uses it.
        """
        if self.fused is not None:
            return self.fused.logits(rows)
        decoder = self.decoder
        table, size = (rows.tails, rows.tail_size) if rows.beams == 1 else _slots(rows)
        page = table.gather(1, (rows.positions // size)[:, None])[:, 0]
        slots = torch.where(rows.active, page * size + rows.positions % size, -1)
        # Padding rows read one position of any page.
        lengths = (rows.positions + 1).int()
        places = _Places(rows.positions, slots, table, lengths, shared)
        x = tensor(decoder.embedding(rows.ids))
        if decoder.position is not None:
            x = x + decoder.position(rows.positions)
        delta = None
        for number, layer in enumerate(self.layers):
            # The table may hold single positions instead of the pool's pages.
            stored = replace(self.pool.layer(number), page_size=size)
            x, delta = layer(x, delta, places, stored)
        assert delta is not None
        hidden, _ = _add_norm(decoder.norm, delta, x)
        return _applied(decoder.head, hidden)

    @torch.no_grad()
    def ranked(self, rows: DecodeBatch, count: int) -> tuple[Tensor, TopK]:
        """Logits in float32, and the `count` likeliest tokens with their log-probabilities."""
        if self.fused is not None:
            return self.fused.ranked(rows, count)
        logits = self.logits(rows).float()
        return logits, ranked(logits, count)


def _slots(rows: DecodeBatch) -> tuple[Tensor, int]:
    """Prefix and tail as one table of pages of one position each."""
    size, device = rows.page_size, rows.pages.device
    room = rows.pages.shape[1] * size
    place = torch.arange(room + rows.tails.shape[1], device=device)
    begin = (rows.pages[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
    begin = begin[:, place.clamp(max=room - 1)].repeat_interleave(rows.beams, dim=0)
    prefix = rows.prefix.repeat_interleave(rows.beams)[:, None]
    own = (place - prefix).clamp(0, rows.tails.shape[1] - 1)
    return torch.where(place < prefix, begin, rows.tails.gather(1, own)).int(), 1


class _Places(NamedTuple):
    """Positions of the new tokens, their cache slots, and the pages that they attend to."""

    positions: Tensor
    slots: Tensor
    table: Tensor
    lengths: Tensor
    shared: Sequence[step_ops.SharedPrefix]


class _TorchLayer:
    """One layer in torch, with q, k, v and gate, up joined into one product each."""

    def __init__(
        self, decoder: Network, layer: nn.Module, cosine: Tensor | None, sine: Tensor | None
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
        self.rope = Rope(cosine, sine, q_norm, k_norm, config.norm_eps)

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        places: _Places,
        stored: StoredLayer,
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream and the term that is still to be added to it."""
        h, x = _add_norm(self.norms[0], delta, x)
        q = step_ops.rope_and_append(self.qkv(h), self.rope, places.positions, places.slots, stored)
        seen = step_ops.decode_attention(
            q, stored, places.table, places.lengths, self.window, places.shared
        )
        h, x = _add_norm(self.norms[1], _applied(self.out, seen.flatten(1)), x)
        up = self.up(h)
        inner = step_ops.swiglu(up) if self.gated else functional.gelu(up, approximate="tanh")
        return x, _applied(self.down, inner)


class _Joined:
    """Linear layers with one input as one product; quantised ones one by one."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = list(parts)
        self._whole: tuple[Tensor, Tensor | None] | None = None
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) == len(self._parts):
            weight, bias = join_weights(*linears), None
            if linears[0].bias is not None:
                bias = torch.cat([linear.bias.detach() for linear in linears])
            self._whole = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._whole is not None:
            return linear(x, *self._whole)
        return torch.cat([part(x) for part in self._parts], dim=-1)


def _applied(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer, by the product for a few rows if it is a plain one."""
    if type(layer) is nn.Linear:
        return linear(x, layer.weight, layer.bias)
    return tensor(layer(x))


def fused_decode_step(forward: DecodeStep, rows: int) -> "FusedDecodeStep":
    """The step in five kernels a layer, with the joined weights."""
    from trapline.gold.decoder.fused_step import FusedDecodeStep, layer_weights

    decoder, pool = forward.decoder, forward.pool
    weights = [
        layer_weights(
            layer,
            layer.attention,
            qk_norm=decoder.config.qk_norm,
            window=decoder.config.window_of(number),
        )
        for number, layer in enumerate(decoder.layers)
    ]
    cosine, sine = forward.layers[0].rope.cosine, forward.layers[0].rope.sine
    assert cosine is not None
    assert sine is not None
    return FusedDecodeStep(decoder, weights, (cosine, sine), pool.keys, pool.values, rows)


def _fused_supports(decoder: Network, pool: Pool) -> bool:
    """Whether `FusedDecodeStep` serves this device, model and unquantised pool."""
    if decoder.device.type != "cuda" or pool.bits is not None:
        return False
    from trapline.gold.decoder.fused_step import suits
    from trapline.gold.device import may_start_early

    # Tile sizes assume the shared memory of a Hopper GPU.
    return may_start_early(decoder.device) and suits(decoder)


def _add_norm(norm: Norm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of x + delta, x + delta)."""
    if delta is None:
        return tensor(norm(x)), x
    if norm.bias is None and x.is_cuda:
        normed = rms_norm(delta, norm.weight, norm.eps, residual=x)
        return tensor(normed.y), tensor(normed.residual)
    if norm.bias is None and compiled_ops.suits(x, delta, norm.weight):
        return compiled_ops.add_norm(x, delta, norm.weight, norm.eps)
    x = x + delta
    if norm.bias is None:
        # For a few rows on a CPU the dispatch of our own operator (0.2 ms) would dominate.
        return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps), x
    return tensor(norm(x)), x
