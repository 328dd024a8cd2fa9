"""Rounds of speculation in few kernels, with all state on the device: what a CUDA graph captures.

A round is a draft, its tree, a target pass of five kernels per layer, the target's choices, and one
verdict that commits the accepted branch. Lengths, roots, text and counts stay on the device and
rows at their limit stay unchanged, so the host can start many rounds without looking.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.fused_step import suits
from trapline.gold.decoder.joined_layer import JoinedLayer
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.rope import angles
from trapline.gold.errors import UnsupportedError
from trapline.gold.tree_decoding.fast_drafters import FusedDrafter, Proposal, RoundState
from trapline.gold.tree_decoding.tree_pass import (
    Body,
    TreePass,
    TreePositions,
    new_key_values,
)
from trapline.gold.tree_decoding.triton.round import (
    choose_kernel,
    draw_kernel,
    move_kernel,
    prepare_kernel,
    verdict_kernel,
)

#: Nodes of a tree with its root: the ancestor mask is one tile.
MOST_NODES = 128


@dataclass(frozen=True)
class RoundsConfig:
    """Everything that a captured round fixes."""

    rows: int
    #: Positions per row: prompt, answer, and one tree behind them.
    room: int
    #: Whether rows may have a temperature; otherwise all are greedy.
    sampled: bool = False

    def __post_init__(self) -> None:
        checks.integer_between(1, 2**20, rows=self.rows, room=self.room)


def supports(target: Network, room: int, nodes: int) -> str | None:
    """Why fast rounds cannot serve this target, with `nodes` per tree, or None."""
    if not suits(target) or target.config.window is not None:
        return (
            "the fast rounds serve rotary models in float32 or bfloat16 with plain weights and "
            "without biases, a sliding window, soft caps, post-norms or experts"
        )
    if nodes > MOST_NODES:
        return f"the fast rounds draft at most {MOST_NODES - 1} tokens per pass, got {nodes - 1}"
    if room > target.config.context:
        return (
            f"prompt, answer and draft need {room} positions, the model has {target.config.context}"
        )
    return None


class FusedRounds:
    """A batch of rows; `round()` is what a graph captures. Without a drafter: plain decoding."""

    def __init__(self, target: Network, drafter: FusedDrafter | None, config: RoundsConfig) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        shape, like = target.config, target.norm.weight
        self.nodes = 1 if drafter is None else drafter.drafted + 1
        self.deepest = 0 if drafter is None else drafter.depth
        if reason := supports(target, config.room, self.nodes):
            raise UnsupportedError(reason)
        self.state = RoundState(config.rows, config.room, like.device)
        self.proposal = Proposal(config.rows, self.nodes, like.device)
        self._keys, self._values = new_key_values(shape, config.rows, config.room, like)
        assert shape.rope is not None
        everywhere = torch.arange(shape.context, device=like.device)
        cosine, sine = angles(shape.rope, shape.head_dim, everywhere, like)
        self.verifier = TreePass(
            Body(shape, target.embedding, target.norm, target.head),
            [JoinedLayer(layer) for layer in target.layers],
            (cosine, sine),
            (self._keys, self._values),
            rows=config.rows,
            nodes=self.nodes,
            taps=self.target_layers,
        )
        self.choices = torch.zeros_like(self.proposal.ids)
        self._path = torch.zeros(
            (config.rows, self.deepest + 1), dtype=torch.int64, device=like.device
        )
        # Features of committed tokens. A chain's are left in place by the pass.
        self._fresh = self.verifier.features
        if self.nodes > self.deepest + 1:
            lines = config.rows * (self.deepest + 1)
            self._fresh = self._fresh.new_zeros((lines, self._fresh.shape[1]))
        if drafter is not None:
            drafter.connect(self._fresh)

    @property
    def target_layers(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.target_layers

    @torch.no_grad()
    def open(self, prompts: list[list[int]], limit: int, rows: list[int] | None = None) -> None:
        """Start `rows` (all by default) with these prompts; each may generate `limit` tokens."""
        rows = list(range(len(prompts))) if rows is None else rows
        state, device = self.state, self.state.lengths.device
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        for buffer in (state.lengths, state.known):
            buffer[rows] = lengths
        for buffer, value in ((state.made, 0), (state.rounds, 0), (state.limits, limit)):
            buffer[rows] = value
        state.roots[rows] = torch.tensor([prompt[-1] for prompt in prompts], device=device)
        for row, prompt in zip(rows, prompts, strict=True):
            state.text[row, : len(prompt)] = torch.tensor(prompt, device="cpu")
        features = self._prefill(dict(zip(rows, (prompt[:-1] for prompt in prompts), strict=True)))
        if self.drafter is not None:
            for row, prompt in zip(rows, prompts, strict=True):
                self.drafter.open(row, prompt, features[row])

    def _prefill(self, prompts: dict[int, list[int]]) -> dict[int, Tensor]:
        """Run the prompts in one pass; returns the features (n, layers · C) of each row."""
        found = dict.fromkeys(prompts, self._fresh.new_zeros((0, self._fresh.shape[1])))
        some = [row for row, prompt in prompts.items() if prompt]
        if some:
            run = self.target.run(
                [prompts[row] for row in some],
                [PrefillCache(self._keys[:, row], self._values[:, row]) for row in some],
                features=self.target_layers,
            )
            features = torch.cat([run.last[:, :0], *run.features], dim=-1)
            pieces = torch.split(features, [len(prompts[row]) for row in some])
            found.update(zip(some, pieces, strict=True))
        return found

    @torch.no_grad()
    def round(self) -> None:
        """One pass of drafter and target for all rows."""
        state, trees = self.state, self.proposal
        if self.drafter is None:
            trees.ids.copy_(state.roots)
        else:
            self.drafter.propose(state, trees)
            if not self.drafter.prepared:
                self.prepare()
        positions = TreePositions(state.lengths, trees.depths, trees.seen)
        tiles = self.verifier.run(trees.ids, positions)
        self.choose(tiles)
        self.commit()

    def prepare(self) -> None:
        """Ids, depths and ancestor masks of the proposed trees."""
        state, trees = self.state, self.proposal
        prepare_kernel[(state.rows,)](
            *(trees.tokens, trees.parents, state.roots, trees.ids, trees.depths, trees.seen),
            self.nodes,
            BLOCK=max(16, triton.next_power_of_2(self.nodes)),
            ROUNDS=max(1, self.deepest.bit_length()),
            **self.verifier.launch_options(4),
        )

    def choose(self, tiles: int) -> None:
        """The target's next token after root and nodes."""
        state, lines = self.state, len(self.choices)
        if not self.config.sampled:
            best, place, tiles = self.verifier.best_tokens(tiles)
            choose_kernel[(lines,)](
                *(best, place, self.choices, tiles, lines),
                BLOCK=triton.next_power_of_2(tiles),
                **self.verifier.launch_options(1),
            )
            return
        vocabulary = self.target.config.vocab
        draw_kernel[(lines,)](
            *(self.verifier.lines, state.seeds, state.made, self.proposal.depths, self.choices),
            *(vocabulary, self.nodes, state.heat),
            BLOCK=min(2048, triton.next_power_of_2(vocabulary)),
            **self.verifier.launch_options(4),
        )

    def commit(self) -> None:
        """Append the accepted branch to the text; move a tree's cache rows behind the root."""
        self._verdict()
        if self.nodes > self.deepest + 1:
            self._move()

    def _verdict(self) -> None:
        state, trees, drafter = self.state, self.proposal, self.drafter
        anchors = None if drafter is None else drafter.anchors
        verdict_kernel[(state.rows,)](
            *(trees.tokens, trees.parents, trees.seen, trees.depths, self.choices, self._path),
            *(state.roots, state.lengths, state.known, state.made, state.limits, state.text),
            *(state.log, state.rounds, state.kept, anchors),
            0 if anchors is None else len(anchors) // state.rows,
            *(self.nodes, self.deepest, state.room),
            BLOCK=max(16, triton.next_power_of_2(self.nodes)),
            **self.verifier.launch_options(4),
        )

    def _move(self) -> None:
        state = self.state
        layers, rows, room, heads, width = self._keys.shape
        wide, seen = heads * width, self._fresh.shape[1]
        block = min(256, triton.next_power_of_2(wide))
        parts = cdiv(wide, block)
        move_kernel[(rows, layers * parts + cdiv(seen, block))](
            *(self._keys, self._values),
            *((self.verifier.features, self._fresh) if seen else (None, None)),
            *(self._path, state.known, state.kept, self.nodes, self.deepest, room, rows, layers),
            *(parts, wide, seen),
            BLOCK_L=triton.next_power_of_2(self.deepest + 1),
            BLOCK=block,
            **self.verifier.launch_options(4),
        )


class PrefillCache:
    """The decoder's cache protocol for one row: keys and values (layers, room, G, D)."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values, self.length = keys, values, 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store after the present length; returns all keys and values of the layer."""
        end = self.length + len(k)
        keys, values = self._keys[layer], self._values[layer]
        keys[self.length : end], values[self.length : end] = k, v
        return keys[:end], values[:end]

    def advance(self, count: int) -> None:
        """Count the new positions, after every layer has stored them."""
        self.length += count
