"""Drafters of the fast rounds: a DFlash block or prompt lookup, in buffers of fixed addresses."""

from typing import Protocol

import torch
import triton
from torch import Tensor

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.joined_layer import JoinedLayer
from trapline.gold.decoder.network import Network
from trapline.gold.device import may_start_early
from trapline.gold.softmax_topk.api import softmax_topk
from trapline.gold.tree_decoding.drafter import DFlash
from trapline.gold.tree_decoding.tree_pass import (
    Body,
    NewContext,
    TreePass,
    TreePositions,
    new_key_values,
)
from trapline.gold.tree_decoding.triton.round import chain_kernel, lookup_kernel
from trapline.gold.tree_decoding.triton.tree import MOST_LAID_OUT, Layout, best_first


class RoundState:
    """Device state of a batch: (R,) tensors that a round reads and updates.

    `text` (R, room) holds the tokens by position and `log` (R, room) the tokens of each round.
    """

    def __init__(self, rows: int, room: int, device: torch.device) -> None:
        # Rows are padded so that every tensor has the same alignment: one compiled kernel for all.
        self._padded = cdiv(rows, 16) * 16
        count = 4 * self._padded
        buffer = torch.zeros(
            count + 3 * self._padded + 2 * rows * room, dtype=torch.int64, device=device
        )
        self.roots, self.lengths, self.known, self.kept = buffer[:count].view(4, -1)[:, :rows]
        # Everything that the host reads is contiguous: one copy.
        self._read = buffer[count:]
        counts, text, log = self._split(self._read, rows, room)
        self.made, self.limits, self.rounds = counts
        self.text, self.log = text, log
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        #: log2(e) / temperature, or 0 for greedy rows.
        self.heat = torch.zeros(rows, dtype=torch.float32, device=device)
        self.rows, self.room = rows, room

    def _split(self, whole: Tensor, rows: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
        counts, text, log = torch.split(whole, [3 * self._padded, rows * room, rows * room])
        return counts.view(3, -1)[:, :rows], text.view(rows, room), log.view(rows, room)

    def read(self) -> tuple[list[tuple[int, int, int]], Tensor, Tensor]:
        """Copy to the host: (tokens made, limit, rounds) of every row, and `text` and `log`."""
        counts, text, log = self._split(self._read.cpu(), self.rows, self.room)
        made, limits, rounds = counts.tolist()
        return list(zip(made, limits, rounds, strict=True)), text, log


class Proposal:
    """The trees of a round: a drafter fills them, the target's pass and the verdict read them."""

    def __init__(self, rows: int, nodes: int, device: torch.device) -> None:
        drafted = nodes - 1
        self.tokens = torch.zeros((rows, drafted), dtype=torch.int64, device=device)
        self.parents = (torch.arange(drafted, device=device) - 1).expand(rows, -1).contiguous()
        self.ids = torch.zeros(rows * nodes, dtype=torch.int64, device=device)
        # A chain until a drafter writes another tree.
        self.depths = torch.arange(nodes, device=device).repeat(rows)
        seen = torch.ones((nodes, nodes), device=device).tril()
        self.seen = seen.to(torch.int8).repeat(rows, 1, 1).contiguous()
        self.nodes = nodes


class FusedDrafter(Protocol):
    """Proposes trees for all rows from the state on the device."""

    #: Target layers whose outputs it reads.
    target_layers: tuple[int, ...]
    #: Depth of the deepest node, and number of nodes.
    depth: int
    drafted: int
    #: Whether proposals include ids, depths and masks; otherwise `FusedRounds.prepare` adds them.
    prepared: bool

    @property
    def anchors(self) -> Tensor | None:
        """The drafter's input blocks; the verdict writes the first token of each."""

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:
        """Start a row: features (n − 1, …) of all prompt tokens but the last."""

    def connect(self, features: Tensor) -> None:
        """`features` is the buffer that holds the features of newly committed tokens."""

    def propose(self, state: RoundState, into: Proposal) -> None:
        """Write the trees of the next round."""


class FusedDFlash:
    """A DFlash model that drafts its `budget` heaviest prefixes, or a chain of `budget` tokens."""

    def __init__(
        self, model: DFlash, target: Network, rows: int, room: int, *, budget: int, chain: bool
    ) -> None:
        model.check_fits(target)
        checks.integer_between(1, 1023, budget=budget)
        self.model, self._target, self._rows = model, target, rows
        self.target_layers = model.config.target_layers
        block, body, like = model.config.block, model.config.body, model.norm.weight
        self.prepared = chain or budget <= MOST_LAID_OUT
        self._chained = chain
        self.depth = min(block - 1, budget)
        self.drafted = self.depth if chain else budget
        self._keys, self._values = new_key_values(body, rows, room, like)
        ids = torch.full((rows, block), model.config.mask_id, device=like.device)
        self.anchors = ids.flatten()
        cosine, sine = model.angles(torch.arange(body.context, device=like.device))
        self._pass = TreePass(
            Body(body, target.embedding, model.norm, target.head),
            [JoinedLayer(layer) for layer in model.layers],
            (cosine[:, 0].contiguous(), sine[:, 0].contiguous()),
            (self._keys, self._values),
            rows=rows,
            nodes=block,
        )
        # (layers · 2 · G · D, C): one product gives the keys and values of all layers.
        self._context_weight = torch.cat(
            [part.weight for layer in model.layers for part in (layer.k, layer.v)]
        )
        lines = rows * (self.depth + 1)
        self._context = like.new_empty((lines, body.dim))
        self._sums = like.new_empty((cdiv(body.dim, 8), lines), dtype=torch.float32)
        self._fresh = like.new_empty((lines, len(self._context_weight)))
        self._depths = torch.arange(block, device=like.device).repeat(rows)
        self._seen = torch.ones((rows, block, block), dtype=torch.int8, device=like.device)
        self._features: Tensor | None = None

    def connect(self, features: Tensor) -> None:
        """`features` (R · (depth + 1), layers · C) will hold those of newly committed tokens."""
        self._features = features

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:
        """Store keys and values of all prompt tokens but the last."""
        count = len(prompt) - 1
        context = self.model.context(features)
        angles = self.model.angles(torch.arange(count, device=context.device))
        for number, layer in enumerate(self.model.layers):
            k, v = layer.rows(context, angles)
            self._keys[number, row, :count] = k
            self._values[number, row, :count] = v
        self.anchors[row * self.model.config.block] = prompt[-1]

    def propose(self, state: RoundState, into: Proposal) -> None:
        assert self._features is not None
        new = NewContext(
            *(self._features, self.model.fuse.weight, self.model.fuse_norm.weight),
            *(self._context_weight, self._context, self._sums, self._fresh),
        )
        positions = TreePositions(state.lengths, self._depths, self._seen, state.known)
        tiles = self._pass.run(self.anchors, positions, new)
        if self._chained:
            self._chain(tiles, state, into)
        else:
            self._grow(state, into)

    def _chain(self, tiles: int, state: RoundState, into: Proposal) -> None:
        lines, nodes = len(self.anchors), into.nodes
        best, place, tiles = self._pass.best_tokens(tiles)
        chain_kernel[(lines,)](
            *(best, place, state.roots, into.tokens, into.ids, tiles, lines, nodes),
            self.model.config.block,
            BLOCK=triton.next_power_of_2(tiles),
            **self._pass.launch_options(1),
        )

    def _grow(self, state: RoundState, into: Proposal) -> None:
        values, candidates = self.ranking()
        layout = Layout(state.roots, into.ids, into.depths, into.seen)
        best_first(
            *(values, candidates, into.tokens, into.parents),
            layout=layout if self.prepared else None,
            early=may_start_early(values.device),
        )

    def ranking(self) -> tuple[Tensor, Tensor]:
        """The best candidates of every depth (R, depth, C): log-probabilities and tokens."""
        most = min(self.drafted, self._target.config.vocab)
        top = softmax_topk(self._pass.lines, most, log_probs=True, check=False)
        values, candidates = (
            part.view(self._rows, self.model.config.block, -1)[:, 1 : self.depth + 1]
            for part in top[:2]
        )
        return values, candidates


class FusedLookup:
    """Prompt lookup: drafts what followed the latest earlier occurrence of the text's ending."""

    target_layers: tuple[int, ...] = ()
    prepared = False
    anchors = None

    def __init__(self, *, block: int, longest: int = 3) -> None:
        self.depth = self.drafted = block
        self._longest = longest

    def open(self, row: int, prompt: list[int], features: Tensor) -> None:
        """Nothing to store: the state holds the text."""

    def connect(self, features: Tensor) -> None:
        """Prompt lookup reads no features."""

    def propose(self, state: RoundState, into: Proposal) -> None:
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
