"""Proposals in a few kernels: DFlash's block or prompt lookup, on buffers that never move."""

from typing import Protocol

import torch
import triton
from torch import Tensor

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.api import Decoder
from trapline.gold.device import may_start_early
from trapline.gold.softmax_topk.api import softmax_topk
from trapline.gold.tree_decoding.drafter import DFlash
from trapline.gold.tree_decoding.drafter_static import Store
from trapline.gold.tree_decoding.tree_pass import (
    Body,
    Grown,
    TreePass,
    Trees,
    layer_weights,
)
from trapline.gold.tree_decoding.triton.round import chain_kernel, lookup_kernel
from trapline.gold.tree_decoding.triton.tree import MOST_LAID_OUT, Layout, best_first


class State:
    """What a round reads and moves on: (R,) tensors, and the text by position (R, room)."""

    def __init__(self, rows: int, room: int, seed: int, device: torch.device) -> None:
        # So far apart that kernels find all of them aligned alike.
        numbers = torch.zeros((7, cdiv(rows, 16) * 16), dtype=torch.int64, device=device)
        self.roots, self.lengths, self.known, self.kept = numbers[:4, :rows]
        # What the host looks at lies together: it is one copy.
        self._counts = numbers[4:]
        self.made, self.limits, self.rounds = self._counts[:, :rows]
        self.seeds = torch.arange(seed, seed + rows, device=device)
        self.text = torch.zeros((rows, room), dtype=torch.int64, device=device)
        self.log = torch.zeros((rows, LOG), dtype=torch.int64, device=device)
        self.rows, self.room = rows, room

    def counts(self) -> list[tuple[int, int, int]]:
        """Of every row, for the host: tokens said, how many it may say, and rounds."""
        made, limits, rounds = self._counts.tolist()
        return list(zip(made, limits, rounds, strict=True))[: self.rows]


#: Rounds of which the counts are remembered.
LOG = 1024


class Proposal:
    """The trees of a round: filled by a drafter, read by the pass and by the verdict."""

    def __init__(self, rows: int, nodes: int, device: torch.device) -> None:
        drafted = nodes - 1
        self.tokens = torch.zeros((rows, drafted), dtype=torch.int64, device=device)
        self.parents = (torch.arange(drafted, device=device) - 1).expand(rows, -1).contiguous()
        self.ids = torch.zeros(rows * nodes, dtype=torch.int64, device=device)
        # A chain, until somebody says otherwise.
        self.depths = torch.arange(nodes, device=device).repeat(rows)
        seen = torch.ones((nodes, nodes), dtype=torch.int8, device=device).tril()
        self.seen = seen.repeat(rows, 1, 1).contiguous()
        self.nodes = nodes


class FusedDrafter(Protocol):
    """Proposes for all rows, from what the state says."""

    target_layers: tuple[int, ...]
    #: The deepest node, and how many nodes there are.
    depth: int
    drafted: int
    mask_id: int | None
    #: Whether proposals come with everything a pass reads, as chains do.
    prepared: bool
    #: The drafter's blocks, whose beginnings a verdict writes.
    anchors: Tensor | None

    def open(self, row: int, prompt: list[int], features: Tensor) -> None: ...
    def listen(self, features: Tensor) -> None: ...
    def propose(self, state: State, into: Proposal) -> None: ...


class FusedDFlash:
    """A DFlash model; `budget` nodes of its heaviest prefixes, or its likeliest chain."""

    def __init__(
        self, model: DFlash, target: Decoder, rows: int, room: int, *, budget: int, chain: bool
    ) -> None:
        model.check_fits(target)
        checks.integer_between(1, 1023, budget=budget)
        self.model, self._target, self._rows = model, target, rows
        self.target_layers, self.mask_id = model.config.target_layers, model.config.mask_id
        block, body, like = model.config.block, model.config.body, model.norm.weight
        self.prepared = chain or budget <= MOST_LAID_OUT
        self._chained = chain
        self.depth = block - 1 if chain else min(block - 1, budget)
        self.drafted = block - 1 if chain else budget
        self._store = Store(body.layers, rows, room, body.kv_heads, body.head_dim, like)
        ids = torch.full((rows, block), model.config.mask_id, device=like.device)
        self.anchors = ids.flatten()
        cosine, sine = model.angles(torch.arange(body.context, device=like.device))
        self._pass = TreePass(
            Body(body, target.embedding, model.norm, target.head),
            [layer_weights(layer, layer, qk_norm=True) for layer in model.layers],
            (cosine[:, 0].contiguous(), sine[:, 0].contiguous()),
            (self._store.keys, self._store.values),
            rows=rows,
            nodes=block,
        )
        self._rows_of = joined_rows(model)
        lines = rows * (self.depth + 1)
        self._context = like.new_empty((lines, body.dim))
        self._sums = like.new_empty((cdiv(body.dim, 8), lines), dtype=torch.float32)
        self._fresh = like.new_empty((lines, len(self._rows_of)))
        self._depths = torch.arange(block, device=like.device).repeat(rows)
        self._seen = torch.ones((rows, block, block), dtype=torch.int8, device=like.device)
        self._features: Tensor | None = None

    def listen(self, features: Tensor) -> None:
        """(R · (depth + 1), layers · C): where the features of committed rows will lie."""
        self._features = features

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:
        """Takes in all tokens of a prompt but the last."""
        count = len(prompt) - 1
        context = self.model.context(features)
        angles = self.model.angles(torch.arange(count, device=context.device))
        for number, layer in enumerate(self.model.layers):
            k, v = layer.rows(context, angles)
            self._store.keys[number, row, :count] = k
            self._store.values[number, row, :count] = v
        self.anchors[row * self.model.config.block] = prompt[-1]

    def propose(self, state: State, into: Proposal) -> None:
        assert self._features is not None
        grown = Grown(
            *(self._features, self.model.fuse.weight, self.model.fuse_norm.weight),
            *(self._rows_of, self._context, self._sums, self._fresh),
        )
        trees = Trees(state.lengths, self._depths, self._seen, state.known)
        tiles = self._pass.run(self.anchors, trees, grown)
        if self._chained:
            self._chain(tiles, state, into)
        else:
            self._grow(state, into)

    def _chain(self, tiles: int, state: State, into: Proposal) -> None:
        lines, nodes = len(self.anchors), into.nodes
        best, place, tiles = self._pass.winners(tiles)
        chain_kernel[(lines,)](
            *(best, place, state.roots, into.tokens, into.ids, tiles, lines, nodes),
            BLOCK=triton.next_power_of_2(tiles),
            **self._pass.early(1),
        )

    def _grow(self, state: State, into: Proposal) -> None:
        values, candidates = self.ranking()
        layout = Layout(state.roots, into.ids, into.depths, into.seen)
        best_first(
            *(values, candidates, into.tokens, into.parents),
            layout=layout if self.prepared else None,
            early=may_start_early(values.device),
        )

    def ranking(self) -> tuple[Tensor, Tensor]:
        """The best of every depth (R, depth, C): log-probabilities and tokens."""
        most = min(self.drafted, self._target.config.vocab)
        top = softmax_topk(self._pass.lines, most, log_probs=True, check=False)
        values, candidates = (
            part.view(self._rows, self.model.config.block, -1)[:, 1 : self.depth + 1]
            for part in top[:2]
        )
        return values, candidates


class FusedLookup:
    """Prompt lookup, the baseline."""

    target_layers: tuple[int, ...] = ()
    mask_id = None
    prepared = False
    anchors = None

    def __init__(self, *, block: int, longest: int = 3) -> None:
        self.depth = self.drafted = block
        self._longest = longest

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:
        """The state has the text."""

    def listen(self, features: Tensor) -> None:
        """It looks at words only."""

    def propose(self, state: State, into: Proposal) -> None:
        early = may_start_early(state.text.device)
        lookup_kernel[(state.rows,)](
            *(state.text, state.lengths, into.tokens, state.room, self.drafted),
            WIDTH=self._longest,
            BLOCK=triton.next_power_of_2(state.room),
            BLOCK_L=triton.next_power_of_2(self.drafted),
            num_warps=4,
            PDL=early,
            **({"launch_pdl": True} if early else {}),
        )


def joined_rows(model: DFlash) -> Tensor:
    """(layers · 2 · G · D, C): keys and values of the context for every layer, one product."""
    return torch.cat([part.weight for layer in model.layers for part in (layer.k, layer.v)])
