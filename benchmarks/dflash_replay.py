"""Rounds that do all of their work and then accept the number of nodes that a trace gives.

The replay must not add time to a round: a fixed draft replaces the one that was computed, and the
kernel that chooses tokens also looks up the number in the trace.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.tree_decoding.fast_drafters import FusedDFlash
from trapline.gold.tree_decoding.fast_rounds import FusedRounds
from trapline.gold.tree_decoding.triton.round import best_of


def replay(wanted, trees, *, nothing) -> torch.Tensor:
    """Choices (R, N + 1) by which `wanted` (R,) nodes are accepted; reference of `replay_kernel`.

    `nothing` is a token that no draft contains, so that the walk ends where the branch does.
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
    best, place, picks,  # as in `choose_kernel`: the target's own choices
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


class ReplayedDFlash(FusedDFlash):
    """Drafts and ranks, then returns the ranking of a fixed, typical draft."""

    profile: torch.Tensor
    _fixed: Any = None

    def ranking(self):
        values, candidates = super().ranking()
        if self._fixed is None:  # before a graph is captured, so it is not part of a round
            best = self.profile[:, : values.shape[1]].topk(values.shape[2], dim=-1)
            self._fixed = (
                best.values.to(values.dtype).expand_as(values).contiguous(),
                best.indices.to(candidates.dtype).expand_as(candidates).contiguous(),
            )
        return self._fixed


def replayed_rounds(trace: torch.Tensor) -> type[FusedRounds]:
    """Fast rounds that compute the target's choices and then accept what the trace says."""

    class Rounds(FusedRounds):
        def __init__(self, target, drafter, config):
            super().__init__(target, drafter, config)
            self.picks, self.turns = torch.zeros_like(self.choices), torch.zeros_like(self.choices)

        def choose(self, tiles):
            if self.drafter is None:
                super().choose(tiles)
                return
            made, lines = self.proposal, len(self.choices)
            best, place, tiles = self.verifier.best_tokens(tiles)
            replay_kernel[(lines,)](
                *(best, place, self.picks, trace, self.turns, made.tokens, made.parents),
                *(made.depths, made.seen, self.choices, tiles, lines, self.nodes, len(trace)),
                self.target.config.vocab - 1,
                BLOCK=triton.next_power_of_2(tiles),
                BLOCK_M=max(16, triton.next_power_of_2(self.nodes)),
                **self.verifier.launch_options(1),
            )

    return Rounds
