# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's backward pass for Hopper GPUs, in Gluon.

`backward_dkdv.dkdv_kernel` computes dk, dv and shares of dq in one walk; `prepare_kernel` goes
before it, and `finish_kernel` puts the sums of dq in order after it. By default shares are added in
a fixed order, so that gradients are bitwise repeatable; with `deterministic=False` as they come.
Without a mask the order is a ring wherever whole heads keep the GPU busy.

`triton.backward` computes the same for any shape and option.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.dense import Problem
from trapline.gold.attention.dense.hopper.backward_dkdv import LINE, QUERIES, dkdv_kernel
from trapline.gold.attention.dense.hopper.tiles import ROWS, descriptor
from trapline.gold.attention.dense.triton.backward import parts_of
from trapline.gold.attention.dense.triton.tiles import can_describe
from trapline.gold.device import LOG2_E, launched, processors

#: The layout of single numbers in shared memory.
PLAIN = gl.NVMMASharedLayout(0, 32, 2)

# --- before and after, in plain Triton ----------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["T", "H"])
def prepare_kernel(
    dout, out, lse, dlse, rows, sums, turns, mantissa, T, H,
    dout_b, dout_h, dout_t, out_b, out_h, out_t,
    D: tl.constexpr, BLOCK: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Per tile of queries: lse in base 2, then δ = rowsum(dout · out) − dlse, times the mantissa.

    Rows that see nothing, and rows after the last, get an lse of inf: their weights are 0. The
    tile's sums of dq are set to 0, or with `ORDERED`, where the first share is stored, its turn.
    """
    blocks = tl.cdiv(T, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    head = block // blocks
    b, h = head // H, head % H
    t = block % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    inside = t < T
    places = b * dout_b + h * dout_h + t[:, None] * dout_t + d[None, :]
    left = tl.load(dout + places, mask=inside[:, None], other=0.0).to(tl.float32)
    places = b * out_b + h * out_h + t[:, None] * out_t + d[None, :]
    right = tl.load(out + places, mask=inside[:, None], other=0.0).to(tl.float32)
    natural = tl.load(lse + head * T + t, mask=inside, other=float("-inf"))
    pair = rows + block * (2 * BLOCK) + tl.arange(0, BLOCK)
    seeing = natural != float("-inf")
    tl.store(pair, tl.where(seeing, natural * LOG2_E, float("inf")))
    delta = tl.sum(left * right, 1)
    if dlse is not None:
        delta -= tl.load(dlse + head * T + t, mask=inside, other=0.0)
    tl.store(pair + BLOCK, delta * mantissa)
    if ORDERED:
        tl.store(turns + block, 0)
    else:
        places = tl.arange(0, BLOCK)[:, None] * D + d[None, :]
        tl.store(sums + block * (BLOCK * D) + places, tl.zeros([BLOCK, D], tl.float32))


@launched
@triton.jit(do_not_specialize=["T", "blind"])
def finish_kernel(sums, dq, T, blind, power, D: tl.constexpr, BLOCK: tl.constexpr):
    """dq (B,H,T,D) from its sums: two halves of each tile, each `in_register_order`.

    The first `blind` queries see no keys. Tiles of nothing else have no sums: their dq is 0.
    """
    blocks = tl.cdiv(T, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    seeing = (block % blocks + 1) * BLOCK > blind
    place = tl.arange(0, BLOCK * D)
    x = tl.load(sums + block * (BLOCK * D) + place, mask=(place >= 0) & seeing, other=0.0) * power
    x = tl.reshape(x.to(dq.dtype.element_ty), [2, D // 16, BLOCK // 16, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [2, 5, 3, 0, 1, 4, 6]), [BLOCK, D])
    t = block % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    places = (block // blocks * T + t[:, None]) * D + d[None, :]
    tl.store(dq + places, x, mask=t[:, None] < T)


# --- launches -----------------------------------------------------------------------------------


class BackwardConfig(NamedTuple):
    """Resources of the kernel for a head width."""

    #: Query tiles in flight.
    stages: int
    #: Whether the copy engine adds shares that come in any order (needs shared memory) or the
    #: threads do (need time).
    copy: bool


#: Head width → configuration. Each is checked on a GPU against float64.
CONFIGS = {64: BackwardConfig(3, False), 128: BackwardConfig(2, True)}
#: Without a mask: tiles of one group of heads that start at once. The first shares of a query are
#: added one after the other, so that fewer start sooner; more share what the L2 cache holds.
AT_ONCE = 16
#: The most queries of narrow causal heads whose repeatable gradients these kernels compute faster.
LONG = 4096


def is_faster(problem: Problem) -> bool:
    """Whether these kernels beat the plain ones, as measured on an H200.

    They do not where most of a tile would stay empty, nor for narrow heads, whose products are too
    short to hide much, unless causal; in order, up to LONG queries.
    """
    length, narrow = problem.q.shape[2], problem.q.shape[3] <= 64
    if length <= QUERIES.value:
        return False
    return not narrow or (problem.causal and (length <= LONG or not problem.deterministic))


def backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a problem that `supports` accepts."""
    q, ordered = problem.q, problem.deterministic
    (_, H, T, D), S = q.shape, problem.k.shape[2]
    if not can_describe(dout):
        dout = dout.contiguous()
    if out.stride(-1) != 1:
        out = out.contiguous()
    tiles = q.shape[0] * H * cdiv(T, QUERIES.value)
    rows = q.new_empty((tiles, 2 * QUERIES.value), dtype=torch.float32)
    lines = tiles * QUERIES.value * D // LINE.value
    sums = q.new_empty((lines, LINE.value), dtype=torch.float32)
    turns = q.new_empty(tiles, dtype=torch.int32)
    mantissa, power = parts_of(problem.scale)
    prepare_kernel[(tiles,)](
        *(dout, out, lse.contiguous(), None if dlse is None else dlse.contiguous()),
        *(rows, sums, turns, mantissa, T, H, *dout.stride()[:3], *out.stride()[:3]),
        D=D,
        BLOCK=QUERIES.value,
        ORDERED=ordered,
    )
    dq, dk, dv = (x.new_empty(x.shape) for x in problem[:3])
    along_keys(problem, dout, rows, dk, dv, (sums, turns))
    blind = max(0, T - S) if problem.causal else 0
    finish_kernel[(tiles,)](sums, dq, T, blind, power, D=D, BLOCK=QUERIES.value)
    return dq, dk, dv


def along_keys(
    problem: Problem, dout: Tensor, rows: Tensor, dk: Tensor, dv: Tensor, dq: tuple[Tensor, Tensor]
) -> None:
    """dk and dv, and all shares of dq: its sums, and the turn of each of their tiles."""
    q, k, v, causal, scale = *problem[:3], problem.causal, problem.scale
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    sums, turns = dq
    tiles = cdiv(S, 2 * ROWS.value)
    lines = QUERIES.value * D // LINE.value // 2
    running, groups = processors(q), B * G
    ring = walks_in_a_ring(running, tiles, groups, problem)
    together = bunch(running, tiles, groups, causal, problem.deterministic, ring)
    dkdv_kernel[(tiles * (together if ring else groups),)](
        *(descriptor(x, ROWS.value) for x in (q, k, v, dout)),
        TensorDescriptor.from_tensor(rows, [1, 2 * QUERIES.value], PLAIN),
        *(descriptor(x, ROWS.value) for x in (dk, dv)),
        TensorDescriptor.from_tensor(sums, [lines, LINE.value], PLAIN),
        *(sums, turns, T, S, H, H // G, groups, together, scale, *parts_of(scale)),
        **constants(CONFIGS[D], causal, problem.deterministic, ring),
        num_warps=4,
        launch_cooperative_grid=ring,  # programs wait for each other
    )


def walks_in_a_ring(running: int, tiles: int, groups: int, problem: Problem) -> bool:
    """Whether all tiles of keys of a head run at once and begin at different queries.

    Not where that leaves processors idle: a ring has whole heads alone.
    """
    if problem.causal or not problem.deterministic or tiles > running:
        return False
    rounds = cdiv(groups, running // tiles)
    return rounds <= 1.05 * cdiv(groups * tiles, running)


def bunch(
    running: int, tiles: int, groups: int, causal: bool, ordered: bool, ring: bool = False
) -> int:
    """How many groups of heads take turns at being given a tile; `running` programs fit on the GPU.

    With a mask tiles differ in length, and all groups that fit take turns. In order without a mask,
    at most AT_ONCE tiles of a group run at once, in a ring all of them. Otherwise one group is
    finished after the other.
    """
    if ring:
        return min(groups, running // tiles)
    if causal:
        return max(1, running // tiles)
    return max(1, min(groups, running // min(tiles, AT_ONCE))) if ordered else 1


def constants(config: BackwardConfig, causal: bool, ordered: bool, ring: bool) -> dict[str, Any]:
    """Compile-time arguments."""
    copy = config.copy and not ordered
    kind = {"CAUSAL": causal, "ORDERED": ordered, "RING": ring, "COPY": copy}
    return {"STAGES": config.stages, **kind}
