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
#: Trees of so many nodes are built level by level.
MOST = 2048
#: Limits of what a key has of a slot, a token and a parent.
SLOT, TOKEN, PARENT = tl.constexpr(2048), tl.constexpr(1 << 24), tl.constexpr(4096)


@triton.jit
def best_first_kernel(
    values,  # (R, L, C), the C best of each depth, descending
    candidates,  # (R, L, C) int64, their tokens
    tokens,  # (R, N) int64
    parents,  # (R, N) int64
    depths,
    choices,
    nodes,
    row_of,  # from row to row of values and candidates
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values += row * row_of
    candidates += row * row_of
    tokens += row * nodes
    parents += row * nodes
    slot = tl.arange(0, SLOTS)
    first = slot == 0
    # Of every slot: weight of the candidate and of its parent, depth, rank, parent's number, token.
    weight = tl.where(first, tl.load(values).to(tl.float64), float("-inf"))
    above = tl.where(first, 0.0, 0.0).to(tl.float64)
    rank = tl.where(first, 0, 0)
    # Ties: lower depth, then lower parent, then lower token; all in one number, with the slot.
    order = key_of(slot * 0, -1, tl.load(candidates), slot)
    for node in range(nodes):
        best = tl.max(weight, axis=0)
        least = tl.min(tl.where(weight == best, order, 1 << 62), axis=0)
        place = (least & (SLOT - 1)).to(tl.int32)
        spoken = (least // SLOT) & (TOKEN - 1)
        eldest = ((least // (SLOT * TOKEN)) & (PARENT - 1)) - 1
        depth = (least // (SLOT * TOKEN * PARENT)).to(tl.int32)
        taken = slot == place
        own_rank = tl.sum(tl.where(taken, rank, 0), axis=0)
        own_above = tl.sum(tl.where(taken, above, 0.0), axis=0)
        possible = best > float("-inf")
        tl.store(tokens + node, tl.where(possible, spoken, -1))
        tl.store(parents + node, tl.where(possible, eldest, -1))
        # The next sibling takes the slot.
        more = possible & (own_rank + 1 < choices)
        at = depth * choices + own_rank + 1
        value = tl.load(values + at, mask=more, other=float("-inf")).to(tl.float64)
        word = tl.load(candidates + at, mask=more, other=0)
        # The first child takes a new one.
        deeper = possible & (depth + 1 < depths)
        below = (depth + 1) * choices
        first_value = tl.load(values + below, mask=deeper, other=float("-inf")).to(tl.float64)
        first_word = tl.load(candidates + below, mask=deeper, other=0)
        child = slot == node + 1
        weight = tl.where(taken, own_above + value, tl.where(child, best + first_value, weight))
        above = tl.where(child, best, above)
        rank = tl.where(taken, own_rank + 1, tl.where(child, 0, rank))
        order = tl.where(taken, key_of(slot * 0 + depth, eldest, word, slot), order)
        order = tl.where(child, key_of(slot * 0 + depth + 1, node, first_word, slot), order)


@triton.jit
def key_of(depth, parent, token, slot):
    """Depth, parent, token and slot of a candidate as one number, in the order of ties."""
    return ((depth.to(tl.int64) * PARENT + parent + 1) * TOKEN + token) * SLOT + slot


def heaviest_prefixes(log_q: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """`fast_tree.heaviest_prefixes` in one launch behind the row-wise selection."""
    rows, _, vocabulary = log_q.shape
    nodes = fast_tree.node_count(log_q.shape, budget)
    if nodes >= MOST or vocabulary > TOKEN.value:
        return fast_tree.by_levels(log_q, budget)
    tokens, parents = torch.empty((2, rows, nodes), dtype=torch.int64, device=log_q.device)
    if nodes and rows:
        values, candidates = fast_tree.ranked(log_q, min(nodes, vocabulary))
        best_first(values.contiguous(), candidates.contiguous(), tokens, parents)
    return tokens, parents


def best_first(values: Tensor, candidates: Tensor, tokens: Tensor, parents: Tensor) -> None:
    """Fills a tree's tokens and parents (R, N) from the best (R, L, C) of each depth.

    Rows may lie apart; within a row depths follow each other.
    """
    rows, depths, choices = values.shape
    nodes = tokens.shape[1]
    best_first_kernel[(rows,)](
        *(values, candidates, tokens, parents, depths, choices, nodes, values.stride(0)),
        SLOTS=triton.next_power_of_2(nodes + 1),
        num_warps=WARPS,
    )
