"""Drafters whose state lives in tensors of fixed size: what static rounds capture.

Letters: R rows, L drafted depths, K slots of a block, S room for positions, H, G heads, D width.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold import checks
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.layers import tensor
from trapline.gold.tree_decoding import reference
from trapline.gold.tree_decoding.drafter import DFlash


class StaticDrafter(Protocol):
    """Proposes for R rows at once, and learns what was committed; nothing waits for the host."""

    #: Target layers whose outputs it wants to see.
    target_layers: tuple[int, ...]
    #: The deepest node it proposes.
    depth: int
    #: A token that may not be in a prompt.
    mask_id: int | None

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:
        """A row begins: features (n − 1, …) of all tokens of its prompt but the last."""

    def propose(self, roots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and parents (R, N); `lengths` (R,) tokens are committed, then comes the root."""

    def take(self, said: Tensor, lengths: Tensor, features: Tensor) -> None:
        """After a round: (R, L+1) tokens from behind the root on, those of the past `lengths`
        kept; features (R, L+1, …) of the root and of the accepted nodes. What lies behind the
        committed ones is padding."""


class Store:
    """Keys and values (layers, R, S, G, D)."""

    def __init__(
        self, layers: int, rows: int, room: int, heads: int, width: int, like: Tensor
    ) -> None:
        self.keys = like.new_zeros((layers, rows, room, heads, width))
        self.values = like.new_zeros((layers, rows, room, heads, width))
        self.lines = torch.arange(rows, device=like.device)[:, None]
        self.room = room

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v (R, n, G, D) at places (R, n); beyond the room they pile up in the last one."""
        places = places.clamp(max=self.room - 1)
        self.keys[layer, self.lines, places] = k
        self.values[layer, self.lines, places] = v

    def move(self, source: Tensor, goal: Tensor) -> None:
        """Rows at positions (R, n) to other positions, in every layer."""
        source, goal = source.clamp(max=self.room - 1), goal.clamp(max=self.room - 1)
        for stored in (self.keys, self.values):
            stored[:, self.lines, goal] = stored[:, self.lines, source]


class StaticDFlash:
    """A DFlash model; `budget` nodes of its heaviest prefixes, or of its likeliest chain."""

    def __init__(
        self, model: DFlash, target: Decoder, rows: int, room: int, *, budget: int, chain: bool
    ) -> None:
        model.check_fits(target)
        checks.integer_between(1, 2**20, budget=budget)
        self.model, self._target, self._budget, self._chain = model, target, budget, chain
        self.target_layers, self.mask_id = model.config.target_layers, model.config.mask_id
        self.depth = min(model.config.block - 1, budget)
        body, like = model.config.body, model.norm.weight
        self._memory = Store(body.layers, rows, room, body.kv_heads, body.head_dim, like)
        self._fresh = like.new_zeros((rows, self.depth + 1, model.fuse.in_features))
        self._known = torch.zeros(rows, dtype=torch.long, device=like.device)
        self._slots = torch.arange(model.config.block, device=like.device)
        self._places = torch.arange(room, device=like.device)

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:
        count = len(prompt) - 1
        self._known[row] = count
        context, angles = self.model.context(features), self.model.angles(self._places[:count])
        for number, layer in enumerate(self.model.layers):
            k, v = layer.rows(context, angles)
            self._memory.keys[number, row, :count] = k
            self._memory.values[number, row, :count] = v

    def propose(self, roots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        self._remember(lengths)
        log_q = self.block(roots, lengths)[:, : self.depth]
        if self._chain:
            return reference.chain(log_q)
        return reference.heaviest_prefixes(log_q, self._budget)

    def take(self, said: Tensor, lengths: Tensor, features: Tensor) -> None:  # noqa: ARG002
        self._fresh.copy_(features)

    def _remember(self, lengths: Tensor) -> None:
        """What the last round committed becomes context. Padding lies where the block will."""
        places = self._known[:, None] + self._slots[: self.depth + 1]
        context, angles = self.model.context(self._fresh), self.model.angles(places)
        for number, layer in enumerate(self.model.layers):
            self._memory.write(number, places, *layer.rows(context, angles))
        self._known.copy_(lengths)

    def block(self, roots: Tensor, lengths: Tensor) -> Tensor:
        """Log-probabilities (R, K − 1, V) of what follows the roots."""
        model = self.model
        places = lengths[:, None] + self._slots
        angles = model.angles(places)
        # Context, and behind it the block, in which everything sees everything.
        shown = self._places < lengths[:, None] + model.config.block
        mask = shown[:, None].expand(-1, len(self._slots), -1)
        ids = torch.where(self._slots == 0, roots[:, None], model.config.mask_id)
        x = tensor(self._target.embedding(ids))
        for number, layer in enumerate(model.layers):
            normed = tensor(layer.attention_norm(x))
            self._memory.write(number, places, *layer.rows(normed, angles))
            stored = self._memory.keys[number], self._memory.values[number]
            x = layer.finish(x, grouped_attention(layer.queries(normed, angles), *stored, mask))
        hidden = tensor(model.norm(x))[:, 1:]
        return torch.log_softmax(self._target.logits(hidden).float(), dim=-1)


class StaticLookup:
    """Prompt lookup, the baseline: what followed the latest occurrence of the longest ending."""

    target_layers: tuple[int, ...] = ()
    mask_id = None

    def __init__(
        self, rows: int, room: int, *, block: int, longest: int = 3, device: torch.device | str
    ) -> None:
        self.depth, self._longest = block, longest
        self._text = torch.zeros((rows, room), dtype=torch.long, device=device)
        self._places = torch.arange(room, device=device)
        self._slots = torch.arange(block, device=device)

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:  # noqa: ARG002
        self._text[row, : len(prompt)] = torch.tensor(prompt, device=self._text.device)

    def propose(self, roots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        end = lengths[:, None]
        alike = (self._places < end) & (self._text == roots[:, None])
        best = torch.where(alike, self._places, -1).amax(dim=1)
        room = self._text.shape[1]
        for width in range(1, self._longest):
            before = (end - width).clamp(min=0)
            shifted = self._text.roll(width, dims=1) == self._text.gather(1, before)
            alike = alike & shifted & (self._places >= width) & (end >= width)
            best = torch.maximum(
                best, torch.where(alike, width * room + self._places, -1).amax(dim=1)
            )
        start = (best % room)[:, None] + 1 + self._slots
        known = (best >= 0)[:, None] & (start <= end)
        tokens = self._text.gather(1, start.clamp(max=room - 1))
        parents = (self._slots - 1).expand(len(tokens), -1).contiguous()
        return tokens.masked_fill(~known, reference.PAD), parents

    def take(self, said: Tensor, lengths: Tensor, features: Tensor) -> None:  # noqa: ARG002
        behind = torch.arange(said.shape[1], device=said.device)
        places = (lengths[:, None] + 1 + behind).clamp(max=self._text.shape[1] - 1)
        self._text.scatter_(1, places, said)


def grouped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q (R, n, H, D) over (R, S, G, D) where mask (R, n, S). Heads that share a key become queries:
    nothing is copied per head, and every backend takes it."""
    rows, count, heads, width = q.shape
    groups = keys.shape[2]
    share = heads // groups
    folded = q.view(rows, count, groups, share, width).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, groups, share * count, width)
    shown = mask[:, None].repeat(1, 1, share, 1)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    seen = functional.scaled_dot_product_attention(folded, k, v, shown)
    seen = seen.view(rows, groups, share, count, width).permute(0, 3, 1, 2, 4)
    return seen.reshape(rows, count, heads, width)
