"""Answers and hidden states of a target for many rows of one length, to train a drafter on.

A drafter learns from millions of the target's own tokens. Rows of equal length need neither pages
nor ragged batches: a step is one token for all rows, and on a GPU one graph.

Letters: R rows, P tokens of a prompt, S room for positions, C channels.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold import checks
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.layers import tensor
from trapline.gold.decoder.rope import angles, rotate
from trapline.gold.errors import RangeError, UnsupportedError


class HiddenStates(NamedTuple):
    """Outputs of the target for whole rows."""

    last: Tensor  # (R, P, C) after the final norm: what the head reads
    features: Tensor  # (R, P, layers · C)


class EqualRows:
    """`rows` prompts of one length that are answered together, one token per step."""

    def __init__(self, target: Decoder, rows: int, room: int, *, seed: int = 0) -> None:
        shape, like = target.config, target.norm.weight
        if not shape.is_plain or shape.window is not None or shape.rope is None:
            raise UnsupportedError(
                "answers in bulk need a model of plain rotary layers without a sliding window; "
                "use `regenerate`"
            )
        checks.integer_between(1, 2**20, rows=rows)
        checks.integer_between(1, shape.context, room=room)
        self._target, self._share = target, shape.heads // shape.kv_heads
        # Heads before positions, so that products over all positions of a head need no copy.
        room_for = (shape.layers, rows, shape.kv_heads, room, shape.head_dim)
        self._keys, self._values = like.new_zeros(room_for), like.new_zeros(room_for)
        self._places = torch.arange(room, device=like.device)
        self._turns = angles(shape.rope, shape.head_dim, self._places, like)
        self._text = torch.zeros((rows, room), dtype=torch.long, device=like.device)
        self._at = torch.zeros(1, dtype=torch.long, device=like.device)
        self._heat = torch.zeros((rows, 1), dtype=torch.float32, device=like.device)
        self._luck = torch.Generator(like.device).manual_seed(seed)
        self._replay: Callable[[], object] | None = None

    @torch.no_grad()
    def answer(self, prompts: Tensor, count: int, temperatures: Sequence[float]) -> Tensor:
        """(R, P + count) tokens; row i has temperature i modulo their number."""
        rows, width = prompts.shape
        checks.integer_between(1, self._text.shape[1] - width, count=count)
        if rows != len(self._text):
            raise RangeError(f"expected {len(self._text)} prompts, one per row, got {rows}")
        self._text[:, :width] = prompts
        turns = [temperatures[row % len(temperatures)] for row in range(rows)]
        self._heat.copy_(torch.tensor(turns, dtype=torch.float32, device="cpu")[:, None])
        for at in range(0, rows, PREFILL):
            some = self._text[at : at + PREFILL, : width - 1]
            read(self._target, some, keep=partial(self._keep, at))
        self._at.fill_(width - 1)
        replay = self._step()
        for _ in range(count):
            replay()
        return self._text[:, : width + count].clone()

    def _step(self) -> Callable[[], object]:
        """One token for every row."""
        if self._replay is None:
            self._replay = self._next
            if self._text.is_cuda:
                # Warm-up runs write behind the prompts only, where answers overwrite them.
                graph = captured(self._next, (self._at, self._text), self._text.device)
                self._replay = graph.replay
        return self._replay

    @torch.no_grad()
    def _next(self) -> None:
        x = tensor(self._target.embedding(self._text.index_select(1, self._at)))
        turn = self._turns[0][self._at], self._turns[1][self._at]
        behind = self._places > self._at
        layers: Any = self._target.layers

        def attend(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.index_copy_(2, self._at, rotate(k, *turn).transpose(1, 2))
            values.index_copy_(2, self._at, v.transpose(1, 2))
            return self._attend(rotate(q, *turn), keys, values, behind)

        for layer, *stored in zip(layers, self._keys, self._values, strict=True):
            x = layer(x, partial(attend, *stored))
        logits = self._target.logits(tensor(self._target.norm(x[:, 0]))).float()
        picks = (logits + self._heat * self._noise(logits)).argmax(dim=-1)
        self._at += 1
        self._text.index_copy_(1, self._at, picks[:, None])

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, behind: Tensor) -> Tensor:
        """q (R, 1, H, D) over (R, G, S, D); positions in `behind` are masked."""
        rows, _, heads, width = q.shape
        # Heads that share a key become rows of one product.
        folded = q.view(rows, heads // self._share, self._share, width)
        scores = (folded @ keys.transpose(2, 3)).float() * width**-0.5
        law = torch.softmax(scores.masked_fill(behind, -torch.inf), dim=-1).to(values.dtype)
        return (law @ values).view(q.shape)

    def _noise(self, logits: Tensor) -> Tensor:
        """Gumbel noise: argmax(logits / T + noise) is distributed as softmax(logits / T)."""
        luck = None if logits.is_cuda else self._luck
        single, device = torch.float32, logits.device
        drawn = torch.rand(logits.shape, dtype=single, device=device, generator=luck)
        return -torch.log(-torch.log(drawn.clamp(1e-9, 1.0 - 1e-7)))

    def _keep(self, first: int, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the prompts for rows from `first` on."""
        some = slice(first, first + len(k))
        self._keys[layer, some, :, : k.shape[1]] = k.transpose(1, 2)
        self._values[layer, some, :, : v.shape[1]] = v.transpose(1, 2)


#: Rows of prompts per prefill pass.
PREFILL = 512


@torch.no_grad()
def read(
    target: Decoder,
    ids: Tensor,
    *,
    seen: Sequence[int] = (),
    keep: Callable[[int, Tensor, Tensor], None] = lambda layer, k, v: None,
) -> HiddenStates:
    """Hidden states of (R, P) tokens; `keep` receives the keys and values of every layer."""
    shape = target.config
    if not shape.is_plain or shape.window is not None or shape.rope is None:
        return _read_packed(target, ids, seen)
    x = tensor(target.embedding(ids))
    places = torch.arange(ids.shape[1], device=ids.device)
    turn = angles(shape.rope, shape.head_dim, places, target.norm.weight)
    kept: dict[int, Tensor] = {}

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = rotate(q, *turn), rotate(k, *turn)
        keep(number, k, v)
        q, k, v = (side.transpose(1, 2) for side in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)

    for number, layer in enumerate(target.layers):
        x = layer(x, partial(attend, number))
        if number in seen:
            kept[number] = x
    features = torch.cat([x[..., :0], *(kept[number] for number in seen)], dim=-1)
    return HiddenStates(tensor(target.norm(x)), features)


def _read_packed(target: Decoder, ids: Tensor, seen: Sequence[int]) -> HiddenStates:
    """The same by the decoder itself, which serves all kinds of models."""
    run = target.run(list(ids), [target.new_cache() for _ in ids], features=tuple(seen))
    features = torch.cat([run.last[:, :0], *run.features], dim=-1)
    return HiddenStates(*(part.view(*ids.shape, -1) for part in (run.last, features)))
