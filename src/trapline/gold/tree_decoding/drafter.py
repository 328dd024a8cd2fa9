"""DFlash: a small model that drafts a whole block of tokens in one pass.

It sees the target through its hidden states: the outputs of several target layers at every
committed token, fused into one vector, become keys and values in each of its layers. A block is the
last committed token (the anchor) and masks behind it; inside it everything sees everything, and
slot k says what token k of the block is. Embedding and head are the target's.

Letters: R rows, T committed tokens, K slots of a block, A anchors, C channels, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold import checks
from trapline.gold.decoder.cache import SequenceCache
from trapline.gold.decoder.config import DecoderConfig, RopeConfig
from trapline.gold.decoder.layers import Feedforward, Norm, tensor
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.rope import frequencies
from trapline.gold.errors import RangeError, ShapeError

#: Cosine and sine of rotary angles.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter. `body` has the target's vocabulary and width, and its own depth."""

    body: DecoderConfig
    #: Target layers, counted from 0, whose outputs it sees.
    target_layers: tuple[int, ...]
    #: Slots of a block, the anchor included: it drafts one fewer.
    block: int
    #: The token that stands for "not known yet"; it may not be in a prompt.
    mask_id: int

    def __post_init__(self) -> None:
        checks.integer_between(2, 4096, block=self.block)
        checks.integer_between(0, self.body.vocab - 1, mask_id=self.mask_id)
        if not self.target_layers:
            raise RangeError("a drafter needs at least one of the target's layers")


def drafter_config(
    target: DecoderConfig,
    *,
    layers: int = 2,
    block: int = 8,
    mask_id: int,
    seen: int | None = None,
    hidden: int | None = None,
) -> DrafterConfig:
    """A drafter for this target: heads and widths of the target, fewer layers.

    `seen` target layers are looked at, by default as many as it has itself; `hidden` is the inner
    width of its feed-forward, by default the target's.
    """
    checks.integer_between(1, 64, layers=layers)
    body = replace(
        target,
        family="qwen3",
        layers=layers,
        hidden=hidden or target.hidden,
        rope=RopeConfig(theta=(target.rope or RopeConfig()).theta),
        window=None,
        qk_norm=True,
        attention_bias=False,
        mlp_bias=False,
    )
    return DrafterConfig(body, spread_layers(target.layers, seen or layers), block, mask_id)


def spread_layers(depth: int, count: int) -> tuple[int, ...]:
    """Evenly from the second layer to the third from the end; of a shallow target, to the end."""
    low = min(1, depth - 1)
    high = depth - 3 if depth >= 8 else depth - 1
    count = min(count, high - low + 1)
    if count == 1:
        return (high,)
    return tuple(round(low + i * (high - low) / (count - 1)) for i in range(count))


class DraftLayer(nn.Module):
    """One layer: queries of the block over context and block, then feed-forward.

    Keys and values of the context come from the fused features by the block's own projections.
    """

    def __init__(self, body: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = body.head_dim
        wide, narrow = body.heads * body.head_dim, body.kv_heads * body.head_dim
        self.attention_norm = Norm(body.dim, body.norm_eps, bias=False)
        self.q = nn.Linear(body.dim, wide, bias=False)
        self.k = nn.Linear(body.dim, narrow, bias=False)
        self.v = nn.Linear(body.dim, narrow, bias=False)
        self.out = nn.Linear(wide, body.dim, bias=False)
        self.q_norm = Norm(body.head_dim, body.norm_eps, bias=False)
        self.k_norm = Norm(body.head_dim, body.norm_eps, bias=False)
        self.feedforward_norm = Norm(body.dim, body.norm_eps, bias=False)
        self.feedforward = Feedforward(body)

    def queries(self, normed: Tensor, angles: Angles) -> Tensor:
        """(…, H, D) of normed block rows (…, C)."""
        return turned(self.q_norm(self._heads(self.q(normed))), angles)

    def rows(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values (…, G, D) of context or normed block rows (…, C)."""
        return turned(self.k_norm(self._heads(self.k(x))), angles), self._heads(self.v(x))

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """What attention saw, (…, H, D), and the feed-forward, added to the stream."""
        x = x + self.out(seen.flatten(-2))
        return tensor(x + self.feedforward(self.feedforward_norm(x)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class DFlash(nn.Module):
    """The drafter's own weights; what it borrows of the target comes as an argument."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        body = config.body
        self.fuse = nn.Linear(len(config.target_layers) * body.dim, body.dim, bias=False)
        self.fuse_norm = Norm(body.dim, body.norm_eps, bias=False)
        self.stack = nn.ModuleList(DraftLayer(body) for _ in range(body.layers))
        self.norm = Norm(body.dim, body.norm_eps, bias=False)
        #: Radians a position, by device. No buffer: a model in 16 bits still needs them in 32.
        self._turns: dict[torch.device, Tensor] = {}

    @property
    def layers(self) -> list[DraftLayer]:
        return [layer for layer in self.stack if isinstance(layer, DraftLayer)]

    def check_fits(self, target: Decoder) -> None:
        """Drafter and target must speak of the same tokens in vectors of the same width."""
        body, theirs = self.config.body, target.config
        if body.vocab != theirs.vocab:
            raise ShapeError(
                f"the drafter's vocabulary of {body.vocab} is not the target's {theirs.vocab}"
            )
        if body.dim != theirs.dim:
            raise ShapeError(f"the drafter's width of {body.dim} is not the target's {theirs.dim}")
        if max(self.config.target_layers) >= theirs.layers:
            raise RangeError(
                f"the drafter reads layer {max(self.config.target_layers)}, "
                f"the target has {theirs.layers}"
            )

    def context(self, features: Tensor) -> Tensor:
        """(…, layers · C) hidden states of committed tokens to (…, C)."""
        return tensor(self.fuse_norm(self.fuse(features)))

    def angles(self, positions: Tensor) -> Angles:
        """Cosine and sine at positions (…), each (…, 1, D/2)."""
        if positions.device not in self._turns:
            body = self.config.body
            turns = frequencies(body.rope or RopeConfig(), body.head_dim)
            self._turns[positions.device] = turns.to(positions.device)
        angles = positions[..., None, None].float() * self._turns[positions.device]
        dtype = self.norm.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def new_cache(self) -> SequenceCache:
        """Keys and values of one row's committed tokens."""
        weight = self.norm.weight
        return SequenceCache(self.config.body, weight.dtype, weight.device)

    def remember(self, features: Sequence[Tensor], caches: Sequence[SequenceCache]) -> None:
        """Takes in newly committed tokens: (n, layers · C) features for each cache, n ≥ 1."""
        counts = [len(one) for one in features]
        context = self.context(torch.cat(list(features)))
        spans = [
            torch.arange(cache.length, cache.length + count, device=context.device)
            for cache, count in zip(caches, counts, strict=True)
        ]
        angles = self.angles(torch.cat(spans))
        for number, layer in enumerate(self.layers):
            pieces = (torch.split(rows, counts) for rows in layer.rows(context, angles))
            for cache, *rows in zip(caches, *pieces, strict=True):
                cache.append(number, *rows)
        for cache, count in zip(caches, counts, strict=True):
            cache.advance(count)

    def hidden(self, blocks: Tensor, caches: Sequence[SequenceCache]) -> Tensor:
        """(R, K, C) for embedded blocks (R, K, C). The caches stay as they are."""
        starts = torch.tensor([cache.length for cache in caches], device=blocks.device)
        angles = self.angles(starts[:, None] + torch.arange(blocks.shape[1], device=blocks.device))
        x = blocks
        for number, layer in enumerate(self.layers):
            normed = tensor(layer.attention_norm(x))
            q, (k, v) = layer.queries(normed, angles), layer.rows(normed, angles)
            # Appended without advancing: the next round writes over the block.
            stored = [cache.append(number, k[i], v[i]) for i, cache in enumerate(caches)]
            seen = [
                attend(one[None], keys[None], values[None])
                for one, (keys, values) in zip(q, stored, strict=True)
            ]
            x = layer.finish(x, torch.cat(seen))
        return tensor(self.norm(x))

    def train_hidden(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """What `hidden` says for many anchors of whole rows at once, differentiable.

        features (R, T, layers · C), blocks (R, A, K, C) embedded, anchors (R, A) positions; the
        answer is (R, A, K, C). A block sees the context strictly before its anchor, and itself.
        """
        slots, length = blocks.shape[2], features.shape[1]
        context = self.context(features)
        past = self.angles(torch.arange(length, device=anchors.device))
        places = anchors[:, :, None] + torch.arange(slots, device=anchors.device)
        here = self.angles(places.flatten(1))
        mask = training_mask(anchors, length, slots)
        x = blocks.flatten(1, 2)
        for layer in self.layers:
            normed = tensor(layer.attention_norm(x))
            own, old = layer.rows(normed, here), layer.rows(context, past)
            k, v = (torch.cat(both, dim=1) for both in zip(old, own, strict=True))
            x = layer.finish(x, attend(layer.queries(normed, here), k, v, mask))
        return tensor(self.norm(x)).view(blocks.shape)


def training_mask(anchors: Tensor, length: int, slots: int) -> Tensor:
    """bool (R, A·K, T + A·K): context before the anchor, not at it; slots of the same block."""
    rows, count = anchors.shape
    own = anchors.repeat_interleave(slots, dim=1)  # (R, A·K)
    context = torch.arange(length, device=anchors.device) < own[:, :, None]
    block = torch.arange(count, device=anchors.device).repeat_interleave(slots)
    same = (block[:, None] == block).expand(rows, -1, -1)
    return torch.cat((context, same), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """q (R, n, H, D) over k, v (R, S, G, D) where mask (R, n, S) is True; everywhere if None."""
    if mask is not None and q.is_cuda:
        # Of the kernels that take a mask none knows shared heads: the slow one would be taken.
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    shown = None if mask is None else mask[:, None]
    seen = functional.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
    return seen.transpose(1, 2)


def turned(x: Tensor, angles: Angles) -> Tensor:
    """x (…, heads, D) turned by its rows' angles."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = angles
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class DFlashDrafter:
    """`generate.Drafter` by a DFlash model and the target it was trained for."""

    def __init__(self, model: DFlash, target: Decoder) -> None:
        model.check_fits(target)
        self.model, self._decoder = model, target
        self.vocab = target.config.vocab
        self.target_layers = model.config.target_layers

    def refuses(self, prompt: Sequence[int]) -> str | None:
        """The mask means "not known yet" and would be read as such."""
        mask = self.model.config.mask_id
        return f"it contains the drafter's mask id {mask}" if mask in prompt else None

    def draft(self, rows: Sequence[Any]) -> Tensor:
        """Log-probabilities (R, K − 1, V) of what follows each row's root."""
        self._take_in(rows)
        ids = torch.full((len(rows), self.model.config.block), self.model.config.mask_id)
        ids[:, 0] = torch.tensor([row.tokens[-1] for row in rows])
        blocks = tensor(self._decoder.embedding(ids.to(self._decoder.device)))
        hidden = self.model.hidden(blocks, [row.drafter for row in rows])
        # Slot 0 holds the anchor itself: it predicts nothing.
        return torch.log_softmax(self._decoder.logits(hidden[:, 1:]).float(), dim=-1)

    def _take_in(self, rows: Sequence[Any]) -> None:
        for row in rows:
            if row.drafter is None:
                row.drafter = self.model.new_cache()
        waiting = [row for row in rows if row.fresh]
        if waiting:
            features = [torch.cat(row.fresh) for row in waiting]
            self.model.remember(features, [row.drafter for row in waiting])
            for row in waiting:
                row.fresh = []
