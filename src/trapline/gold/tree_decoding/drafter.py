"""DFlash: a small model that drafts a whole block of tokens in one pass.

It sees the target through its hidden states: the outputs of several target layers at every
committed token, fused into one vector, become keys and values in each of its layers. A block is the
last committed token (the anchor) and masks behind it; inside it everything sees everything, and
slot k says what token k of the block is. Embedding and head are the target's.

Letters: R rows, T committed tokens, K slots of a block, A anchors, C channels, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold import checks
from trapline.gold.decoder.cache import SequenceCache
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.layers import Feedforward, Norm, tensor
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.rope import frequencies
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.errors import RangeError, ShapeError

#: Cosine and sine of rotary angles.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter. `body` has the target's vocabulary and width, and its own depth."""

    body: DecoderConfig
    #: Target layers, counted from 0, whose outputs it reads.
    target_layers: tuple[int, ...]
    #: Slots of a block with its anchor; it drafts one token fewer.
    block: int
    #: The token of undrafted slots; a prompt must not contain it.
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
    """The config of a drafter for this target: its heads and widths, fewer layers.

    `seen` target layers are looked at, by default as many as it has itself; `hidden` is the inner
    width of its feed-forward, by default the target's.
    """
    checks.integer_between(1, 64, layers=layers)
    body = DecoderConfig(
        family="qwen3",
        vocab=target.vocab,
        dim=target.dim,
        layers=layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        hidden=hidden or target.hidden,
        context=target.context,
        norm_eps=target.norm_eps,
        tied=target.tied,
        rope=RopeConfig(theta=(target.rope or RopeConfig()).theta),
        qk_norm=True,
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
    """One layer: attention of the block over context and block, then feed-forward.

    The projections of the block also give keys and values of the context's fused features.
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

    def queries(self, rows: Tensor, angles: Angles) -> Tensor:
        """(…, H, D) of normed block rows (…, C)."""
        return turned(normed(self.q_norm, self._heads(self.q(rows))), angles)

    def rows(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values (…, G, D) of context or normed block rows (…, C)."""
        keys = normed(self.k_norm, self._heads(self.k(x)))
        return turned(keys, angles), self._heads(self.v(x))

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """Add the attention output (…, H, D) and the feed-forward to the stream."""
        x = x + self.out(seen.flatten(-2))
        return tensor(x + self.feedforward(normed(self.feedforward_norm, x)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class DFlash(nn.Module):
    """The drafter's own weights; embedding and head are the target's and are passed in."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        body = config.body
        self.fuse = nn.Linear(len(config.target_layers) * body.dim, body.dim, bias=False)
        self.fuse_norm = Norm(body.dim, body.norm_eps, bias=False)
        self.stack = nn.ModuleList(DraftLayer(body) for _ in range(body.layers))
        self.norm = Norm(body.dim, body.norm_eps, bias=False)
        #: Radians per position, by device. Not a buffer: they stay float32 in a 16-bit model.
        self._turns: dict[torch.device, Tensor] = {}
        self._train_layer: Callable[..., Tensor] = train_layer

    @property
    def layers(self) -> list[DraftLayer]:
        return [layer for layer in self.stack if isinstance(layer, DraftLayer)]

    def check_fits(self, target: Network) -> None:
        """Raise unless the target has the same vocabulary and width and enough layers."""
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
        return normed(self.fuse_norm, tensor(self.fuse(features)))

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
        """Append newly committed tokens: features (n, layers · C), n ≥ 1, for each cache."""
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
        """Hidden states (R, K, C) of embedded blocks (R, K, C); the caches keep their length."""
        starts = torch.tensor([cache.length for cache in caches], device=blocks.device)
        angles = self.angles(starts[:, None] + torch.arange(blocks.shape[1], device=blocks.device))
        x = blocks
        for number, layer in enumerate(self.layers):
            rows = normed(layer.attention_norm, x)
            q, (k, v) = layer.queries(rows, angles), layer.rows(rows, angles)
            # Appended without advancing: the next round overwrites the block.
            stored = [cache.append(number, k[i], v[i]) for i, cache in enumerate(caches)]
            seen = [
                attend(one[None], keys[None], values[None])
                for one, (keys, values) in zip(q, stored, strict=True)
            ]
            x = layer.finish(x, torch.cat(seen))
        return normed(self.norm, x)

    def train_hidden(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """`hidden` for many anchors of whole rows at once, differentiable.

        features (R, T, layers · C), blocks (R, A, K, C) embedded, anchors (R, A) positions; the
        answer is (R, A, K, C). A block sees the context strictly before its anchor, and itself.
        """
        device = anchors.device
        places = torch.arange(features.shape[1], device=device)
        past = self.angles(places)
        here = self.angles(anchors[:, :, None] + torch.arange(blocks.shape[2], device=device))
        early = places < anchors[:, :, None]
        context, x = self.context(features), blocks
        for layer in self.layers:
            x = self._train_layer(layer, x, context, past, here, early)
        return normed(self.norm, x)

    def compile_training(self) -> None:
        """Compiles a layer of `train_hidden`: one code for all layers."""
        self._train_layer = torch.compile(train_layer, dynamic=False)


def train_layer(
    layer: DraftLayer, x: Tensor, context: Tensor, past: Angles, here: Angles, early: Tensor
) -> Tensor:
    """One layer over all blocks (R, A, K, C); `early` (R, A, T) says what is before an anchor."""
    rows = normed(layer.attention_norm, x)
    q, own, old = layer.queries(rows, here), layer.rows(rows, here), layer.rows(context, past)
    return layer.finish(x, attend_blocks(q, old, own, early))


def attend_blocks(
    q: Tensor, old: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], early: Tensor
) -> Tensor:
    """q (R, A, K, H, D) over the context (R, T, G, D) where it is early, and their own blocks.

    Blocks do not see each other. Heads that share a key are rows of one product.
    """
    rows, count, slots, heads, width = q.shape
    (keys, values), (near_keys, near_values) = old, own
    groups, length = keys.shape[2], keys.shape[1]
    share = heads // groups
    folded = q.view(rows, count, slots, groups, share, width).permute(0, 3, 1, 4, 2, 5)
    folded = folded.reshape(rows, groups, count, share * slots, width)
    far = folded.flatten(2, 3) @ keys.permute(0, 2, 3, 1)
    far = far.view(rows, groups, count, share * slots, length)
    far = far.masked_fill(~early[:, None, :, None], -torch.inf)
    near = folded @ near_keys.permute(0, 3, 1, 4, 2)
    law = torch.softmax(torch.cat((far, near), dim=-1).float() * width**-0.5, dim=-1)
    law = law.to(values.dtype)
    mixed = law[..., :length].flatten(2, 3) @ values.transpose(1, 2)
    mixed = mixed.view(folded.shape) + law[..., length:] @ near_values.permute(0, 3, 1, 2, 4)
    mixed = mixed.view(rows, groups, count, share, slots, width).permute(0, 2, 4, 1, 3, 5)
    return mixed.reshape(q.shape)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (R, n, H, D) over all of k, v (R, S, G, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return seen.transpose(1, 2)


def normed(norm: Norm, x: Tensor) -> Tensor:
    """RMS norm; with gradients enabled, in a form that a compiler can fuse."""
    if torch.is_grad_enabled():
        weight = norm.weight.float()
        return functional.rms_norm(x.float(), weight.shape, weight, norm.eps).to(x.dtype)
    return tensor(norm(x))


def turned(x: Tensor, angles: Angles) -> Tensor:
    """Apply rotary angles to x (…, heads, D)."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = angles
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class DFlashDrafter:
    """`generate.Drafter` of a DFlash model and the target it was trained for."""

    def __init__(self, model: DFlash, target: Network) -> None:
        model.check_fits(target)
        self.model, self._decoder = model, target
        self.vocab = target.config.vocab
        self.target_layers = model.config.target_layers

    def refuses(self, prompt: Sequence[int]) -> str | None:
        """Prompts must not contain the mask id, which stands for undrafted tokens."""
        mask = self.model.config.mask_id
        return f"it contains the drafter's mask id {mask}" if mask in prompt else None

    def draft(self, rows: Sequence[Any]) -> Tensor:
        """Log-probabilities (R, K − 1, V) of the tokens after each row's root."""
        self._take_in(rows)
        masked = [self.model.config.mask_id] * (self.model.config.block - 1)
        ids = torch.tensor([[row.tokens[-1], *masked] for row in rows], device="cpu")
        blocks = self._decoder.embed(ids.to(self._decoder.device))
        hidden = self.model.hidden(blocks, [row.drafter for row in rows])
        # Slot 0 is the anchor and predicts nothing.
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
