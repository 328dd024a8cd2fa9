"""Rounds of speculation in few kernels, moved on by the device itself: for a GPU.

The rounds of `generate_static`, kernel by kernel: a draft, its tree, a pass of five kernels a
layer, the picks, and one verdict that commits. Lengths, roots, text and counts are on the device,
rows that have said all they may rest by themselves, so the host may ask for many rounds at once.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from trapline.gold.arithmetic import LOG2_E, cdiv
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.rope import angles
from trapline.gold.errors import UnsupportedError
from trapline.gold.tree_decoding.drafter_static import Store
from trapline.gold.tree_decoding.fast_drafters import LOG, FusedDrafter, Proposal, State
from trapline.gold.tree_decoding.generate_static import PrefillRow, StaticConfig, check_shape
from trapline.gold.tree_decoding.tree_pass import Body, TreePass, Trees, layer_weights
from trapline.gold.tree_decoding.triton.round import (
    choose_kernel,
    draw_kernel,
    move_kernel,
    prepare_kernel,
    verdict_kernel,
)

#: Nodes of a tree, its root included: who continues whom is one tile.
MOST_NODES = 128


class FusedRounds:
    """Rows at work; `round()` is what a graph captures. Without a drafter: plain decoding."""

    def __init__(self, target: Decoder, drafter: FusedDrafter | None, config: StaticConfig) -> None:
        check_shape(target, config)
        self.target, self.drafter, self.config = target, drafter, config
        shape, like = target.config, target.norm.weight
        if shape.attention_bias or shape.mlp_bias:
            raise UnsupportedError("compact rounds are for targets without biases")
        self.nodes = 1 if drafter is None else drafter.drafted + 1
        self.deepest = 0 if drafter is None else drafter.depth
        if self.nodes > MOST_NODES:
            raise UnsupportedError(f"compact rounds have trees of at most {MOST_NODES - 1} nodes")
        self.state = State(config.rows, config.room, config.seed, like.device)
        self.proposal = Proposal(config.rows, self.nodes, like.device)
        self._store = Store(
            shape.layers, config.rows, config.room, shape.kv_heads, shape.head_dim, like
        )
        assert shape.rope is not None
        everywhere = torch.arange(shape.context, device=like.device)
        cosine, sine = angles(shape.rope, shape.head_dim, everywhere, like)
        layers: list[Any] = list(target.layers)
        self.verifier = TreePass(
            Body(shape, target.embedding, target.norm, target.head),
            [layer_weights(one, one.attention, qk_norm=shape.qk_norm) for one in layers],
            (cosine, sine),
            (self._store.keys, self._store.values),
            rows=config.rows,
            nodes=self.nodes,
            taps=self.target_layers,
        )
        self.choices = torch.zeros_like(self.proposal.ids)
        self._path = torch.zeros(
            (config.rows, self.deepest + 1), dtype=torch.int64, device=like.device
        )
        self._fresh = self._committed_features()
        if drafter is not None:
            drafter.listen(self._fresh)

    @property
    def target_layers(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.target_layers

    def _committed_features(self) -> Tensor:
        """Where the features of committed rows lie: of a chain, where the pass leaves them."""
        if self.nodes == self.deepest + 1:
            return self.verifier.features
        lines = self.config.rows * (self.deepest + 1)
        return self.verifier.features.new_zeros((lines, self.verifier.features.shape[1]))

    @torch.no_grad()
    def open(self, prompts: list[list[int]], limit: int, rows: list[int] | None = None) -> None:
        """Rows, all unless told, take in all tokens but the last; each may say `limit`."""
        rows = list(range(len(prompts))) if rows is None else rows
        state, device = self.state, self.state.lengths.device
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        for buffer in (state.lengths, state.known):
            buffer[rows] = lengths
        for buffer, value in ((state.made, 0), (state.rounds, 0), (state.limits, limit)):
            buffer[rows] = value
        state.roots[rows] = torch.tensor([prompt[-1] for prompt in prompts], device=device)
        for row, prompt in zip(rows, prompts, strict=True):
            state.text[row, : len(prompt)] = torch.tensor(prompt)
        features = self._prefill(dict(zip(rows, (prompt[:-1] for prompt in prompts), strict=True)))
        if self.drafter is not None:
            for row, prompt in zip(rows, prompts, strict=True):
                self.drafter.open(row, prompt, features[row])

    def _prefill(self, prompts: dict[int, list[int]]) -> dict[int, Tensor]:
        """Takes them in, in one pass; the features of all their tokens, (n, layers · C) each."""
        found = dict.fromkeys(prompts, self._fresh.new_zeros((0, self._fresh.shape[1])))
        some = [row for row, prompt in prompts.items() if prompt]
        if some:
            run = self.target.run(
                [prompts[row] for row in some],
                [PrefillRow(self._store, row) for row in some],
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
        tiles = self.verifier.run(trees.ids, Trees(state.lengths, trees.depths, trees.seen))
        self.choose(tiles)
        self.commit()

    def prepare(self) -> None:
        """What a pass reads of the trees that were proposed."""
        state, trees = self.state, self.proposal
        prepare_kernel[(state.rows,)](
            *(trees.tokens, trees.parents, state.roots, trees.ids, trees.depths, trees.seen),
            self.nodes,
            BLOCK=max(16, triton.next_power_of_2(self.nodes)),
            ROUNDS=max(1, self.deepest.bit_length()),
            **self.verifier.early(4),
        )

    def choose(self, tiles: int) -> None:
        """The target's pick at every row of its pass."""
        state, lines = self.state, len(self.choices)
        if self.config.temperature == 0.0:
            best, place, tiles = self.verifier.winners(tiles)
            choose_kernel[(lines,)](
                *(best, place, self.choices, tiles, lines),
                BLOCK=triton.next_power_of_2(tiles),
                **self.verifier.early(1),
            )
            return
        vocabulary = self.target.config.vocab
        draw_kernel[(lines,)](
            *(self.verifier.lines, state.seeds, state.made, self.proposal.depths, self.choices),
            *(vocabulary, self.nodes, LOG2_E / self.config.temperature),
            BLOCK=min(2048, triton.next_power_of_2(vocabulary)),
            **self.verifier.early(4),
        )

    def commit(self) -> None:
        """The accepted branch becomes text; of a tree, its rows move behind the root."""
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
            *(self.nodes, self.deepest, state.room, LOG),
            BLOCK=max(16, triton.next_power_of_2(self.nodes)),
            **self.verifier.early(4),
        )

    def _move(self) -> None:
        state, store = self.state, self._store
        layers, rows, room, heads, width = store.keys.shape
        wide, seen = heads * width, self._fresh.shape[1]
        block = min(256, triton.next_power_of_2(wide))
        parts = cdiv(wide, block)
        move_kernel[(rows, layers * parts + cdiv(seen, block))](
            *(store.keys, store.values),
            *((self.verifier.features, self._fresh) if seen else (None, None)),
            *(self._path, state.known, state.kept, self.nodes, self.deepest, room, rows, layers),
            *(parts, wide, seen),
            BLOCK_L=triton.next_power_of_2(self.deepest + 1),
            BLOCK=block,
            **self.verifier.early(4),
        )
