"""Speculation for a fixed batch in tensors of fixed size: a round is one CUDA graph.

The same rounds as `generate`, for R rows that start together: lengths, roots and caches live on the
device, the commit moves the accepted rows on the device, and the host only reads which tokens came
out. On a CPU the same function runs without a graph. Llama-shaped targets without a window.

Letters: R rows, N nodes, L depths, S room for positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trapline.gold import checks
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import RopeConfig
from trapline.gold.decoder.layers import tensor
from trapline.gold.decoder.rope import frequencies
from trapline.gold.decoder.sampling import uniforms
from trapline.gold.errors import RangeError, UnsupportedError
from trapline.gold.tree_decoding import fast_verify, reference
from trapline.gold.tree_decoding.drafter import turned
from trapline.gold.tree_decoding.drafter_static import StaticDrafter, Store, grouped_attention


@dataclass(frozen=True)
class StaticConfig:
    """What a captured round is fixed to."""

    rows: int
    #: Positions of a row: prompt, answer and one tree.
    room: int
    temperature: float = 0.0
    seed: int = 0


class Committed(NamedTuple):
    """What one round gave: of (R, L + 1) tokens the first `counts`; the last of these is bonus."""

    tokens: Tensor
    counts: Tensor  # (R,), 0 for rows that rest


class Proposed(NamedTuple):
    """The trees of a round."""

    tokens: Tensor  # (R, N)
    parents: Tensor  # (R, N)
    seen: Tensor  # (R, N+1, N+1)
    depths: Tensor  # (R, N+1)


class StaticRounds:
    """Rows at work; `round()` is what a graph captures. Without a drafter: plain decoding."""

    def __init__(
        self, target: Decoder, drafter: StaticDrafter | None, config: StaticConfig
    ) -> None:
        check_shape(target, config)
        self._target, self._drafter, self._config = target, drafter, config
        shape, like = target.config, target.norm.weight
        rows, device = config.rows, like.device
        self._store = Store(shape.layers, rows, config.room, shape.kv_heads, shape.head_dim, like)
        self._turns = frequencies(shape.rope or RopeConfig(), shape.head_dim).to(device)
        self._roots, self._lengths, self._made = (
            torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3)
        )
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self._seeds = torch.arange(config.seed, config.seed + rows, device=device)
        self._places = torch.arange(config.room, device=device)

    @property
    def target_layers(self) -> tuple[int, ...]:
        return () if self._drafter is None else self._drafter.target_layers

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Takes in all tokens but the last of every prompt; not part of a graph."""
        self._made.zero_()
        self.active.fill_(True)
        for row, prompt in enumerate(prompts):
            self._roots[row], self._lengths[row] = prompt[-1], len(prompt) - 1
            features = self._prefill(row, list(prompt[:-1]))
            if self._drafter is not None:
                self._drafter.open(row, list(prompt), features)

    def _prefill(self, row: int, tokens: list[int]) -> Tensor:
        """Takes them in; the features of all of them, (n, layers · C)."""
        wide = len(self.target_layers) * self._target.config.dim
        if not tokens:
            return self._store.keys.new_zeros((0, wide))
        run = self._target.run(
            [tokens], [PrefillRow(self._store, row)], features=self.target_layers
        )
        return torch.cat([run.last[:, :0], *run.features], dim=-1)

    @torch.no_grad()
    def round(self) -> Committed:
        """One pass of drafter and target for all rows."""
        tokens, parents = self._propose()
        seen = reference.ancestors(parents)
        depths = reference.depths(seen)
        ids = torch.cat((self._roots[:, None], tokens.clamp(min=0)), dim=1)
        logits, features = self._verify(ids, depths, seen)
        choices = self.choices(logits, Proposed(tokens, parents, seen, depths))
        deepest = 0 if self._drafter is None else self._drafter.depth
        accepted = fast_verify.accepted_branch(tokens, parents, seen, choices, deepest)
        return self._commit(tokens, accepted, features)

    def _propose(self) -> tuple[Tensor, Tensor]:
        if self._drafter is None:
            nothing = self._roots.new_zeros((self._config.rows, 0))
            return nothing, nothing
        return self._drafter.propose(self._roots, self._lengths)

    def _verify(self, ids: Tensor, depths: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, N+1, V) and features; the tree's rows lie behind the committed ones."""
        places = self._lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        mask = self._tree_mask(seen)
        turns = (self._lengths[:, None] + depths)[..., None, None].float() * self._turns
        kind = self._store.keys.dtype
        angles = turns.cos().to(kind), turns.sin().to(kind)
        kept: dict[int, Tensor] = {}
        x = tensor(self._target.embedding(ids))
        for number, layer in enumerate(self._target.layers):
            x = self._layer(number, layer, x, angles, places, mask)
            if number in self.target_layers:
                kept[number] = x
        logits = self._target.logits(tensor(self._target.norm(x)))
        features = [kept[number] for number in self.target_layers]
        return logits, torch.cat(features, dim=-1) if features else x[..., :0]

    def _layer(
        self,
        number: int,
        layer: Any,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        places: Tensor,
        mask: Tensor,
    ) -> Tensor:
        attention = layer.attention
        normed = layer.attention_norm(x)
        heads = (*x.shape[:-1], -1, self._target.config.head_dim)
        q, k, v = (part(normed).view(heads) for part in (attention.q, attention.k, attention.v))
        if self._target.config.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        self._store.write(number, places, turned(k, angles), v)
        stored = self._store.keys[number], self._store.values[number]
        seen = grouped_attention(turned(q, angles), *stored, mask)
        x = x + attention.out(seen.flatten(-2))
        return tensor(x + layer.feedforward(layer.feedforward_norm(x)))

    def _tree_mask(self, seen: Tensor) -> Tensor:
        """(R, N+1, S): what is committed, and of the tree its own branch."""
        behind = self._places - self._lengths[:, None]  # (R, S)
        nodes = seen.shape[1]
        inside = ((behind >= 0) & (behind < nodes))[:, None]
        column = behind.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
        return (behind < 0)[:, None] | (inside & seen.gather(2, column))

    def choices(self, logits: Tensor, trees: Proposed) -> Tensor:
        """The target's pick (R, N+1) at every row."""
        if self._config.temperature == 0.0:
            return logits.argmax(dim=-1)
        law = torch.softmax(logits.float() / self._config.temperature, dim=-1)
        numbers = uniforms(self._seeds[:, None], self._made[:, None] + trees.depths)
        return fast_verify.inverted(law, numbers)

    def _commit(
        self, tokens: Tensor, accepted: fast_verify.Accepted, features: Tensor
    ) -> Committed:
        """Moves the accepted rows behind the root, in place; the bonus becomes the root."""
        nodes = accepted.path.clamp(min=0)  # (R, L)
        slots = torch.arange(nodes.shape[1], device=nodes.device)
        first = self._lengths[:, None] + 1
        if nodes.shape[1]:
            self._store.move(first + nodes, first + slots)
        said = torch.cat((tokens.gather(1, nodes), accepted.bonus[:, None]), dim=1)
        said.scatter_(1, accepted.length[:, None], accepted.bonus[:, None])
        if self._drafter is not None:
            rows = torch.cat((torch.zeros_like(accepted.length[:, None]), nodes + 1), dim=1)
            index = rows[..., None].expand(-1, -1, features.shape[-1])
            self._drafter.take(said, self._lengths, features.gather(1, index))
        grown = torch.where(self.active, accepted.length + 1, 0)
        self._lengths += grown
        self._made += grown
        self._roots.copy_(torch.where(self.active, accepted.bonus, self._roots))
        return Committed(said, grown)


class PrefillRow:
    """One row of a store as the decoder's cache, for the prefill."""

    def __init__(self, store: Store, row: int) -> None:
        self._store, self._row, self.length = store, row, 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes from the beginning on, returns all of the layer so far."""
        end = self.length + len(k)
        keys, values = self._store.keys[layer, self._row], self._store.values[layer, self._row]
        keys[self.length : end], values[self.length : end] = k, v
        return keys[:end], values[:end]

    def advance(self, count: int) -> None:
        """After every layer has stored its rows."""
        self.length += count


def check_shape(target: Decoder, config: StaticConfig) -> None:
    """Refuses targets that rounds of fixed size cannot serve, and rooms they do not have."""
    shape = target.config
    if shape.is_gpt2 or shape.window is not None or shape.rope is None:
        raise UnsupportedError("static rounds are for Llama-shaped targets without a window")
    checks.integer_between(1, 2**20, rows=config.rows, room=config.room)
    if config.room > shape.context:
        raise RangeError(f"room for {config.room} positions, the model has {shape.context}")
