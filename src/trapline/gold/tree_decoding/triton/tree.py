# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The heaviest prefixes in one launch: best-first search by one warp per row, in registers.

`reference.heaviest_prefixes` takes a dozen small launches per depth. Here a program takes the best
of at most N + 1 candidates, N times. Taking the candidate of slot s in step i puts its next sibling
into slot s and its first child into slot i + 1, so N + 1 slots suffice. Order, ties and padding are
those of the reference.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import launched
from trapline.gold.tree_decoding import reference

#: Reductions of one warp need no barrier.
WARPS = 1
#: Trees of this many nodes or more are built by `reference`.
MOST = 2048
#: Up to this number of nodes the warp that builds a tree also writes its layout.
MOST_LAID_OUT = 63
#: Ranges of slot, token and parent in a key.
SLOT, TOKEN, PARENT = tl.constexpr(2048), tl.constexpr(1 << 24), tl.constexpr(4096)


class Layout(NamedTuple):
    """Inputs of a pass over trees of N nodes: M = N + 1 rows per tree, the root first."""

    roots: Tensor  # (R,), input
    ids: Tensor  # (R · M,)
    depths: Tensor  # (R · M,)
    seen: Tensor  # (R, M, M) int8


@triton.jit
def heavier(weight, order, above, rank, weight_b, order_b, above_b, rank_b):
    """The candidate that is taken first."""
    mine = (weight > weight_b) | ((weight == weight_b) & (order < order_b))
    return (
        tl.where(mine, weight, weight_b),
        tl.where(mine, order, order_b),
        tl.where(mine, above, above_b),
        tl.where(mine, rank, rank_b),
    )


@triton.jit
def near(places):
    """Prefetch the cache lines of these pointers into L1."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@launched
@triton.jit
def best_first_kernel(
    values,  # (R, L, C), the C best of each depth, descending
    candidates,  # (R, L, C) int64, their tokens
    tokens,  # (R, N) int64
    parents,  # (R, N) int64
    roots, ids, deep, seen,  # outputs of `lay_out`, or None
    depths,
    choices,
    nodes,
    row_of,  # row stride of values and candidates
    SLOTS: tl.constexpr, LINES: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values += row * row_of
    candidates += row * row_of
    tokens += row * nodes
    parents += row * nodes
    slot = tl.arange(0, SLOTS)
    first = slot == 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
        line = tl.minimum(tl.arange(0, LINES) * 16, depths * choices - 1)
        near(values + line)
        near(candidates + line)
    # Of every slot: weights of candidate and parent, rank, and depth, parent and token in `order`.
    weight = tl.where(first, tl.load(values).to(tl.float64), float("-inf"))
    above = tl.where(first, 0.0, 0.0).to(tl.float64)
    rank = tl.where(first, 0, 0)
    # Ties: lower depth, then lower parent, then lower token, combined in one number.
    order = key_of(slot * 0, -1, tl.load(candidates), slot)
    # Token and parent row of every node taken so far, root first.
    said = slot.to(tl.int64) * 0
    hangs = slot.to(tl.int64) * 0
    for node in range(nodes):
        best, least, own_above, own_rank = tl.reduce((weight, order, above, rank), 0, heavier)
        place = (least & (SLOT - 1)).to(tl.int32)
        possible = best > float("-inf")
        spoken = tl.where(possible, (least // SLOT) & (TOKEN - 1), -1)
        eldest = tl.where(possible, ((least // (SLOT * TOKEN)) & (PARENT - 1)) - 1, -1)
        depth = (least // (SLOT * TOKEN * PARENT)).to(tl.int32)
        taken = slot == place
        tl.store(tokens + node, spoken)
        tl.store(parents + node, eldest)
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
        said = tl.where(child, spoken, said)
        hangs = tl.where(child, eldest + 1, hangs)
        weight = tl.where(taken, own_above + value, tl.where(child, best + first_value, weight))
        above = tl.where(child, best, above)
        rank = tl.where(taken, own_rank + 1, tl.where(child, 0, rank))
        order = tl.where(taken, key_of(slot * 0 + depth, eldest, word, slot), order)
        order = tl.where(child, key_of(slot * 0 + depth + 1, node, first_word, slot), order)
    if seen is not None:
        lay_out(said, hangs, tl.load(roots + row), ids, deep, seen, row, nodes + 1, SLOTS, ROUNDS)


@triton.jit
def lay_out(
    token, above, root, ids, depths, seen, row, nodes, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """Write the ids, depths and ancestor mask of a tree.

    Row 0 is the root, then come the nodes; `above` is the row of each parent. Squaring the
    reachability matrix doubles path lengths: 2^ROUNDS must be at least the greatest depth.
    """
    i = tl.arange(0, BLOCK)
    real = (i > 0) & (i < nodes)
    tl.store(ids + row * nodes + i, tl.where(i == 0, root, tl.maximum(token, 0)), mask=i < nodes)
    edge = real[:, None] & (above[:, None] == i[None, :])
    reach = tl.where(edge | (i[:, None] == i[None, :]), 1.0, 0.0).to(tl.float16)
    for _ in tl.static_range(ROUNDS):
        more = tl.dot(reach, reach)
        reach = tl.where(more > 0.5, 1.0, 0.0).to(tl.float16)
    depth = tl.sum(reach.to(tl.float32), 1).to(tl.int64) - 1
    tl.store(depths + row * nodes + i, depth, mask=i < nodes)
    inside = (i < nodes)[:, None] & (i < nodes)[None, :]
    places = seen + (row * nodes + i)[:, None] * nodes + i[None, :]
    tl.store(places, (reach > 0.5).to(tl.int8), mask=inside)


@triton.jit
def key_of(depth, parent, token, slot):
    """Depth, parent, token and slot of a candidate as one number that sorts like ties."""
    return ((depth.to(tl.int64) * PARENT + parent + 1) * TOKEN + token) * SLOT + slot


def heaviest_prefixes(log_q: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """`reference.heaviest_prefixes` by top-k of every depth and one launch of the kernel."""
    rows, _, vocabulary = log_q.shape
    nodes = reference.node_count(log_q.shape, budget)
    if nodes >= MOST or vocabulary > TOKEN.value:
        return reference.heaviest_prefixes(log_q, budget)
    tokens, parents = torch.empty((2, rows, nodes), dtype=torch.int64, device=log_q.device)
    if nodes and rows:
        values, candidates = reference.ranked(log_q, min(nodes, vocabulary))
        best_first(values.contiguous(), candidates.contiguous(), tokens, parents)
    return tokens, parents


def best_first(
    values: Tensor,
    candidates: Tensor,
    tokens: Tensor,
    parents: Tensor,
    *,
    layout: Layout | None = None,
    early: bool = False,
) -> None:
    """Write tokens and parents (R, N) of the trees of the best candidates (R, L, C) of each depth.

    Rows may be strided, the values of one row are contiguous. `early` lets the launch begin before
    the previous one has ended.
    """
    rows, depths, choices = values.shape
    nodes = tokens.shape[1]
    slots = triton.next_power_of_2(nodes + 1)
    best_first_kernel[(rows,)](
        *(values, candidates, tokens, parents, *(layout or (None,) * 4)),
        *(depths, choices, nodes, values.stride(0)),
        SLOTS=slots if layout is None else max(16, slots),
        LINES=triton.next_power_of_2(cdiv(depths * choices, 16)),
        ROUNDS=max(1, depths.bit_length()),
        PDL=early,
        num_warps=WARPS,
        **({"launch_pdl": True} if early else {}),
    )
