"""One new token for every row through all layers; `GraphedStep` and beam search repeat it.

On a Hopper GPU most models run `FusedDecodeStep`, five kernels a layer. All others run the same
step in torch (`JoinedLayer`): four matrix products a layer, and `step_ops` between them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trapline.gold.decoder import step_ops
from trapline.gold.decoder.joined_layer import JoinedLayer, add_norm, apply_linear
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import Pool
from trapline.gold.decoder.rope import Rope, angles
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.decoder.sampling import ranked
from trapline.gold.decoder.step_ops import DecodeBatch
from trapline.gold.softmax_topk.api import TopK

if TYPE_CHECKING:
    from trapline.gold.decoder.fused_step import FusedDecodeStep


class DecodeStep:
    """Logits of up to `rows` rows at a time.

    Joins weights of the decoder in memory; they must not change or move afterwards.
    """

    def __init__(self, decoder: Network, pool: Pool, rows: int) -> None:
        self.decoder, self.pool = decoder, pool
        config = decoder.config
        self.layers = [JoinedLayer(layer) for layer in decoder.layers]
        self.rules = [config.rules_of(number) for number in range(config.layers)]
        everywhere = torch.arange(config.context, device=decoder.device)
        tables: dict[RopeConfig | None, tuple[Tensor, ...] | tuple[None, None]]
        tables = {None: (None, None)}
        for rope in {rule.rope for rule in self.rules}:
            if rope is not None:
                tables[rope] = angles(rope, config.head_dim, everywhere, decoder.norm.weight)
        self.ropes: list[Rope] = []
        for layer, rule in zip(self.layers, self.rules, strict=True):
            cosine, sine = tables[rule.rope]
            self.ropes.append(Rope(cosine, sine, layer.q_norm, layer.k_norm, config.norm_eps))
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
        x = decoder.embed(rows.ids)
        if decoder.position is not None:
            x = x + decoder.position(rows.positions)
        delta = None

        def attend(number: int, qkv: Tensor, _: Tensor) -> Tensor:
            # The table may hold single positions instead of the pool's pages.
            stored = replace(self.pool.layer(number), page_size=size)
            rope, rules = self.ropes[number], self.rules[number]
            q = step_ops.rope_and_append(qkv, rope, rows.positions, slots, stored)
            return step_ops.decode_attention(q, stored, table, lengths, rules, shared).flatten(1)

        for number, layer in enumerate(self.layers):
            x, delta = layer(x, delta, partial(attend, number))
        assert delta is not None
        hidden, _ = add_norm(decoder.norm, delta, x)
        return decoder.capped(apply_linear(decoder.head, hidden))

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


def fused_decode_step(forward: DecodeStep, rows: int) -> "FusedDecodeStep":
    """The step in five kernels a layer, with the joined weights."""
    from trapline.gold.decoder.fused_step import FusedDecodeStep

    decoder, pool = forward.decoder, forward.pool
    weights = [layer.weights() for layer in forward.layers]
    cosine, sine = forward.ropes[0].cosine, forward.ropes[0].sine
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
