"""Rounds that do all of their work and then accept as many nodes as a trace says.

The replay must cost nothing, or a round would be charged with it: a fixed draft is handed on in
place of the one that was made, and the kernel that picks tokens looks up what the trace wants, too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.tree_decoding.drafter_static import StaticDFlash
from trapline.gold.tree_decoding.fast_drafters import FusedDFlash
from trapline.gold.tree_decoding.fast_rounds import FusedRounds
from trapline.gold.tree_decoding.generate_static import StaticRounds
from trapline.gold.tree_decoding.triton.round import best_of


class ReplayedDFlash(StaticDFlash):
    """Drafts in earnest, then proposes the tree of a fixed, typical draft."""

    profile: torch.Tensor

    def block(self, roots, lengths):
        super().block(roots, lengths)
        return self.profile.expand(len(roots), -1, -1)


class ReplayedRounds(StaticRounds):
    """Judges in earnest, then accepts as many nodes as the trace says."""

    trace: torch.Tensor

    def choices(self, logits, trees):
        super().choices(logits, trees)
        if trees.tokens.shape[1] == 0:
            return logits.argmax(dim=-1)
        return replay(
            self.trace[self._made * 7919 % len(self.trace)], trees, nothing=logits.shape[-1] - 1
        )


def replay(wanted, trees, *, nothing) -> torch.Tensor:
    """Choices (R, N + 1) by which as many nodes are accepted as `wanted` (R,).

    Nobody drafts `nothing`: where the branch ends, so does the walk.
    """
    # The heaviest node of the wanted depth, or of the deepest there is; its branch is right.
    deepest = torch.where(trees.tokens >= 0, trees.depths[:, 1:], 0).amax(dim=1, keepdim=True)
    goal = torch.minimum(wanted[:, None], deepest)
    node = (trees.depths == goal).int().argmax(dim=1)
    branch = trees.seen.gather(1, node[:, None, None].expand(-1, 1, trees.seen.shape[2]))[:, 0]
    choices = torch.full_like(trees.depths, nothing)
    said = torch.where(branch[:, 1:], trees.tokens, nothing)
    above = torch.where(branch[:, 1:], trees.parents + 1, trees.depths.shape[1])
    wide = torch.cat((choices, choices[:, :1]), dim=1).scatter(1, above, said)
    return wide[:, :-1]


@triton.jit
def replay_kernel(
    best, place, picks,  # as of `choose_kernel`: the target's own picks
    trace, turns, tokens, parents, depths, seen,
    choices,  # what is accepted instead
    tiles, lines, nodes, length, nothing,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`choose_kernel`, and the choices of `replay`; `turns` (lines,) counts the rounds."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0)
    row, here = line // nodes, line % nodes
    turn = tl.load(turns + line)
    tl.store(turns + line, turn + 1)
    wanted = tl.load(trace + (turn * (lines // nodes) + row) % length)
    i = tl.arange(0, BLOCK_M)
    real = (i > 0) & (i < nodes)
    token = tl.load(tokens + row * (nodes - 1) + i - 1, mask=real, other=-1)
    above = tl.load(parents + row * (nodes - 1) + i - 1, mask=real, other=-1) + 1
    depth = tl.load(depths + row * nodes + i, mask=i < nodes, other=-1)
    goal = tl.minimum(wanted, tl.max(tl.where(token >= 0, depth, 0), 0))
    node = tl.min(tl.where(depth == goal, i, nodes), 0)
    branch = tl.load(seen + (row * nodes + node) * nodes + i, mask=real, other=0) != 0
    said = tl.max(tl.where(branch & (above == here), token, -1), 0)
    tl.store(choices + line, tl.where(said < 0, nothing, said))
    tl.store(picks + line, best_of(best, place, line, tiles, lines, BLOCK))


class ReplayedCompactDFlash(FusedDFlash):
    """Drafts and ranks in earnest, then hands on the ranking of a fixed, typical draft."""

    profile: torch.Tensor
    _fixed: Any = None

    def ranking(self):
        values, candidates = super().ranking()
        if self._fixed is None:  # before a graph is captured: it is no part of a round
            best = self.profile[:, : values.shape[1]].topk(values.shape[2], dim=-1)
            self._fixed = (
                best.values.to(values.dtype).expand_as(values).contiguous(),
                best.indices.to(candidates.dtype).expand_as(candidates).contiguous(),
            )
        return self._fixed


def compact_rounds(trace: torch.Tensor) -> type[FusedRounds]:
    """Compact rounds that judge in earnest and then accept what the trace says."""

    class Rounds(FusedRounds):
        def __init__(self, target, drafter, config):
            super().__init__(target, drafter, config)
            self.picks, self.turns = torch.zeros_like(self.choices), torch.zeros_like(self.choices)

        def choose(self, tiles):
            if self.drafter is None:
                super().choose(tiles)
                return
            made, lines = self.proposal, len(self.choices)
            best, place, tiles = self.verifier.winners(tiles)
            replay_kernel[(lines,)](
                *(best, place, self.picks, trace, self.turns, made.tokens, made.parents),
                *(made.depths, made.seen, self.choices, tiles, lines, self.nodes, len(trace)),
                self.target.config.vocab - 1,
                BLOCK=triton.next_power_of_2(tiles),
                BLOCK_M=max(16, triton.next_power_of_2(self.nodes)),
                **self.verifier.early(1),
            )

    return Rounds
