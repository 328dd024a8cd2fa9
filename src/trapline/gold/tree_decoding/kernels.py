# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The tree on a GPU in one launch: best-first by one warp a row, everything in registers.

The levels of `fast_tree` are a dozen small launches a depth; here a program takes N times the best
of at most N + 1 candidates. Taking the candidate in slot s at step i puts its next sibling into s
and its first child into slot i + 1, so slots never run out. Same order, same ties, same padding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.tree_decoding import fast_tree

#: One warp: its reductions need no barrier.
WARPS = 1


@triton.jit
def best_first_kernel(
    values,  # (R, L, C) float64, the C best of each depth, descending
    candidates,  # (R, L, C) int64, their tokens
    tokens,  # (R, N) int64
    parents,  # (R, N) int64
    depths,
    choices,
    nodes,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values += row * depths * choices
    candidates += row * depths * choices
    tokens += row * nodes
    parents += row * nodes
    slot = tl.arange(0, SLOTS)
    first = slot == 0
    # Of every slot: weight of the candidate and of its parent, depth, rank, parent's number, token.
    weight = tl.where(first, tl.load(values), float("-inf"))
    above = tl.where(first, 0.0, 0.0).to(tl.float64)
    depth = tl.where(first, 0, 0)
    rank = tl.where(first, 0, 0)
    parent = tl.where(first, -1, -1)
    token = tl.where(first, tl.load(candidates), 0)
    for node in range(nodes):
        best = tl.max(weight, axis=0)
        tied = weight == best
        # Ties: lower depth, then lower parent, then lower token.
        lowest = tl.min(tl.where(tied, depth, 1 << 30), axis=0)
        tied = tied & (depth == lowest)
        eldest = tl.min(tl.where(tied, parent, 1 << 30), axis=0)
        tied = tied & (parent == eldest)
        spoken = tl.min(tl.where(tied, token, 1 << 62), axis=0)
        tied = tied & (token == spoken)
        place = tl.min(tl.where(tied, slot, SLOTS), axis=0)
        taken = slot == place
        own_rank = tl.sum(tl.where(taken, rank, 0), axis=0)
        own_above = tl.sum(tl.where(taken, above, 0.0), axis=0)
        possible = best > float("-inf")
        tl.store(tokens + node, tl.where(possible, spoken, -1))
        tl.store(parents + node, tl.where(possible, eldest, -1))
        # The next sibling takes the slot.
        more = possible & (own_rank + 1 < choices)
        at = lowest * choices + own_rank + 1
        value = tl.load(values + at, mask=more, other=float("-inf"))
        word = tl.load(candidates + at, mask=more, other=0)
        weight = tl.where(taken, own_above + value, weight)
        token = tl.where(taken, word, token)
        rank = tl.where(taken, own_rank + 1, rank)
        # The first child takes a new one.
        deeper = possible & (lowest + 1 < depths)
        at = (lowest + 1) * choices
        value = tl.load(values + at, mask=deeper, other=float("-inf"))
        word = tl.load(candidates + at, mask=deeper, other=0)
        child = slot == node + 1
        weight = tl.where(child, best + value, weight)
        above = tl.where(child, best, above)
        depth = tl.where(child, lowest + 1, depth)
        rank = tl.where(child, 0, rank)
        parent = tl.where(child, node, parent)
        token = tl.where(child, word, token)


def heaviest_prefixes(log_q: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """`fast_tree.heaviest_prefixes` in one launch behind the row-wise selection."""
    rows, depths, vocabulary = log_q.shape
    nodes = fast_tree.node_count(log_q.shape, budget)
    tokens, parents = torch.empty((2, rows, nodes), dtype=torch.int64, device=log_q.device)
    if nodes and rows:
        choices = min(nodes, vocabulary)
        values, candidates = fast_tree.ranked(log_q, choices)
        best_first_kernel[(rows,)](
            values.contiguous(),
            candidates.contiguous(),
            tokens,
            parents,
            depths,
            choices,
            nodes,
            SLOTS=triton.next_power_of_2(nodes + 1),
            num_warps=WARPS,
        )
    return tokens, parents
