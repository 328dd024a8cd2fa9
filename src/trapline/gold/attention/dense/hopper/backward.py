# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's backward pass for Hopper GPUs, in Gluon, in two ways.

With `deterministic=False`, `backward_dkdv.dkdv_kernel` computes dk, dv and shares of dq in one
walk; `prepare_kernel` clears the sums before, `finish_kernel` puts dq in order after. Otherwise it
computes dk and dv alone, and `dq_kernel` computes the scores again for dq, so that every sum has
one owner and gradients are bitwise repeatable: seven products per tile instead of five.

`triton.backward` computes the same for any shape and option.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.dense import Problem
from trapline.gold.attention.dense.hopper.backward_dkdv import LINE, QUERIES, dkdv_kernel
from trapline.gold.attention.dense.hopper.tiles import ROWS, assigned, descriptor, exp2
from trapline.gold.attention.dense.triton.backward import parts_of
from trapline.gold.attention.dense.triton.tiles import can_describe
from trapline.gold.device import LOG2_E, launched, processors
from trapline.gold.gluon_compat import barrier, tma_load, tma_store

#: The layout of single numbers in shared memory.
PLAIN = gl.NVMMASharedLayout(0, 32, 2)

# --- dq: a block of threads owns 128 queries, two warpgroups of 64, and walks the keys ----------


@gluon.jit
def query_tile(sizes, BLOCK_S: gl.constexpr, CAUSAL: gl.constexpr):
    """Batch, head, first query, and the key tiles that its last query sees (at least one)."""
    T, S, H, _R, heads, bunch = sizes
    tiles = gl.cdiv(T, 2 * ROWS)
    head, tile = assigned(tiles, heads, bunch)
    top = tile * (2 * ROWS)
    count = gl.cdiv(S, BLOCK_S)
    if CAUSAL:
        top = (tiles - 1 - tile) * (2 * ROWS)
        seen = gl.maximum(top + 2 * ROWS + S - T, 1)
        count = gl.minimum(count, gl.cdiv(seen, BLOCK_S))
    return head // H, head % H, top, count


@gluon.jit
def produce(
    descriptors, buffers, gates, sizes,
    BLOCK_S: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Load queries and dout once, then keys and values as slots become free."""
    q, k, v, dout = descriptors
    queries, upstreams, keys, values = buffers
    q_full, k_full, v_full, empty = gates
    b, h, top, count = query_tile(sizes, BLOCK_S, CAUSAL)
    mbarrier.expect(q_full, 2 * (q.block_type.nbytes + dout.block_type.nbytes))
    for half in gl.static_range(2):
        place = [b, h, top + half * ROWS, 0]
        tma_load(q, place, q_full, queries.index(half))
        tma_load(dout, place, q_full, upstreams.index(half))
    g = h // sizes[3]
    for i in range(count):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        place = [b, g, i * BLOCK_S, 0]
        full = k_full.index(slot)
        mbarrier.expect(full, k.block_type.nbytes)
        tma_load(k, place, full, keys.index(slot))
        full = v_full.index(slot)
        mbarrier.expect(full, v.block_type.nbytes)
        tma_load(v, place, full, values.index(slot))


@gluon.jit
def weigh(s, lse, start, row, S, scale, CAUSAL: gl.constexpr):
    """Weights from dot products: queries by keys; the first query is at key position `row`.

    The branch keeps the exponentials before the wait for the next product, as in `backward_dkdv`.
    """
    layout: gl.constexpr = s.type.layout
    BLOCK_S: gl.constexpr = s.shape[1]
    p = exp2(s * scale - gl.expand_dims(lse, 1))
    edge = start + BLOCK_S > S
    if CAUSAL:
        edge = edge | (start + BLOCK_S - 1 > row)
    if edge:
        key = gl.expand_dims(gl.arange(0, BLOCK_S, gl.SliceLayout(0, layout)), 0)
        seen = key < S - start
        if CAUSAL:
            query = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) + (row - start)
            seen = seen & (key <= gl.expand_dims(query, 1))
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def consume(
    dq_out, rows, buffers, gates, sizes, scales,
    ME: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Write dq of the 64 queries of consumer `ME`."""
    queries, upstreams, keys, values = buffers
    q_full, k_full, v_full, empty = gates
    T, S, H, _R, _heads, _bunch = sizes
    scale, mantissa, power = scales
    D: gl.constexpr = queries.shape[4]
    dtype: gl.constexpr = queries.dtype
    by_key: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_S, 16])
    by_width: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    in_registers: gl.constexpr = gl.DotOperandLayout(0, by_width, 2)
    nothing = gl.zeros([ROWS, BLOCK_S], gl.float32, by_key)
    b, h, top, count = query_tile(sizes, BLOCK_S, CAUSAL)
    top += ME * ROWS
    r = gl.arange(0, ROWS, gl.SliceLayout(1, by_key))
    rows += ((b * H + h).to(gl.int64) * gl.cdiv(T, ROWS) + top // ROWS) * (2 * ROWS)
    lse = gl.load(rows + r, mask=top + r < T, other=float("inf"))
    delta = gl.load(rows + ROWS + r, mask=top + r < T, other=0.0)
    barrier()
    mbarrier.wait(q_full, 0)
    q = queries.index(ME).reshape([ROWS, D])
    dout = upstreams.index(ME).reshape([ROWS, D])
    dq = gl.zeros([ROWS, D], gl.float32, by_width)
    gl.assume(count > 0)
    for i in range(count):
        slot = i % STAGES
        phase = i // STAGES & 1
        k = keys.index(slot).reshape([BLOCK_S, D])
        v = values.index(slot).reshape([BLOCK_S, D])
        mbarrier.wait(k_full.index(slot), phase)
        s = warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(slot), phase)
        dp = warpgroup_mma(dout, v.permute([1, 0]), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = weigh(s, lse, i * BLOCK_S, top + S - T, S, scale * LOG2_E, CAUSAL)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp * mantissa - gl.expand_dims(delta, 1))).to(dtype)
        slopes = gl.convert_layout(ds, in_registers, assert_trivial=True)
        dq = warpgroup_mma(slopes, k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(empty.index(slot))
    spot = queries.index(ME)
    spot.reshape([ROWS, D]).store((dq * power).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(dq_out, [b, h, top, 0], spot)
    tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["T", "S", "H", "R", "heads", "bunch"])
def dq_kernel(
    q, k, v, dout, rows, dq, T, S, H, R, heads, bunch, scale, mantissa, power,
    BLOCK_S: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and barriers, then split into one producer and two consumers."""
    D: gl.constexpr = q.block_shape[3]
    dtype: gl.constexpr = q.dtype
    queries = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], q.layout)
    upstreams = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], dout.layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_S, D], k.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_S, D], v.layout)
    gate: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], gate)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    barrier()
    loaded = q, k, v, dout
    buffers = queries, upstreams, keys, values
    gates = q_full, k_full, v_full, empty
    sizes = T, S, H, R, heads, bunch
    scales = scale, mantissa, power
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consume, (dq, rows, buffers, gates, sizes, scales, FIRST, BLOCK_S, STAGES, CAUSAL)),
            (consume, (dq, rows, buffers, gates, sizes, scales, SECOND, BLOCK_S, STAGES, CAUSAL)),
            (produce, (loaded, buffers, gates, sizes, BLOCK_S, STAGES, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )
    gdc_wait()  # the kernel after this one needs dk and dv too


# --- before and after, in plain Triton ----------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["T", "H"])
def prepare_kernel(
    dout, out, lse, dlse, rows, sums, mantissa, T, H,
    dout_b, dout_h, dout_t, out_b, out_h, out_t,
    D: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Per tile of queries: lse in base 2, then δ = rowsum(dout · out) − dlse, times the mantissa.

    Rows that see nothing, and rows after the last, get an lse of inf: their weights are 0. With
    `SHARE`, the tile's sums of dq are set to 0.
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
    if SHARE:
        places = tl.arange(0, BLOCK)[:, None] * D + d[None, :]
        tl.store(sums + block * (BLOCK * D) + places, tl.zeros([BLOCK, D], tl.float32))


@launched
@triton.jit(do_not_specialize=["T"])
def finish_kernel(sums, dq, T, power, D: tl.constexpr, BLOCK: tl.constexpr):
    """dq (B,H,T,D) from its sums: two halves of each tile, each `in_register_order`."""
    blocks = tl.cdiv(T, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    x = tl.load(sums + block * (BLOCK * D) + tl.arange(0, BLOCK * D)) * power
    x = tl.reshape(x.to(dq.dtype.element_ty), [2, D // 16, BLOCK // 16, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [2, 5, 3, 0, 1, 4, 6]), [BLOCK, D])
    t = block % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    places = (block // blocks * T + t[:, None]) * D + d[None, :]
    tl.store(dq + places, x, mask=t[:, None] < T)


# --- launches -----------------------------------------------------------------------------------


class BackwardConfig(NamedTuple):
    """Tile sizes and resources of the kernels for a head width."""

    #: Query tiles in flight: with shares of dq, and without.
    share_stages: int
    stages: int
    #: Whether the copy engine adds the shares (needs shared memory) or the threads (need time).
    copy: bool
    #: Keys of a tile in the walk for dq, and tiles in flight.
    dq_keys: int
    dq_stages: int


#: Head width → configuration. Each is checked on a GPU against float64.
CONFIGS = {64: BackwardConfig(3, 3, False, 128, 2), 128: BackwardConfig(2, 3, True, 128, 2)}


#: The fewest queries for which repeatable gradients of narrow causal heads were measured.
LONG = 1024


def is_faster(problem: Problem) -> bool:
    """Whether these kernels beat the plain ones, as measured on an H200.

    They do not where most of a tile would stay empty, nor for narrow heads, whose products are too
    short to hide much, unless causal: with shares of dq, which save two of seven products, or from
    LONG queries on.
    """
    length, narrow = problem.q.shape[2], problem.q.shape[3] <= 64
    least = LONG if narrow and problem.deterministic else int(QUERIES.value) + 1
    return length >= least and (problem.causal or not narrow)


def backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a problem that `supports` accepts."""
    q, share = problem.q, not problem.deterministic
    if not can_describe(dout):
        dout = dout.contiguous()
    tiles = q.shape[0] * q.shape[1] * cdiv(q.shape[2], QUERIES.value)
    rows = q.new_empty((tiles, 2 * QUERIES.value), dtype=torch.float32)
    # Without shares no sums are needed, but the kernel needs an address.
    lines = tiles * QUERIES.value * q.shape[3] // LINE.value if share else 0
    sums = q.new_empty((max(lines, 1), LINE.value), dtype=torch.float32)
    mantissa, power = parts_of(problem.scale)
    if out.stride(-1) != 1:
        out = out.contiguous()
    _, H, T, D = q.shape
    prepare_kernel[(tiles,)](
        *(
            dout,
            out,
            lse.contiguous(),
            None if dlse is None else dlse.contiguous(),
            rows,
            sums,
            mantissa,
            T,
            H,
        ),
        *(*dout.stride()[:3], *out.stride()[:3]),
        D=D,
        BLOCK=QUERIES.value,
        SHARE=share,
    )
    dq, dk, dv = (x.new_empty(x.shape) for x in problem[:3])
    along_keys(problem, dout, rows, dk, dv, sums)
    if share:
        finish_kernel[(tiles,)](sums, dq, T, power, D=D, BLOCK=QUERIES.value)
    else:
        along_queries(problem, dout, rows, dq)
    return dq, dk, dv


def along_keys(
    problem: Problem, dout: Tensor, rows: Tensor, dk: Tensor, dv: Tensor, sums: Tensor
) -> None:
    """dk and dv; unless gradients must be repeatable, also all shares of dq."""
    q, k, v, causal, scale = *problem[:3], problem.causal, problem.scale
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    tiles = cdiv(S, 2 * ROWS.value)
    lines = QUERIES.value * D // LINE.value // 2
    dkdv_kernel[(tiles * B * G,)](
        *(descriptor(x, ROWS.value) for x in (q, k, v, dout)),
        TensorDescriptor.from_tensor(rows, [1, 2 * QUERIES.value], PLAIN),
        *(descriptor(x, ROWS.value) for x in (dk, dv)),
        TensorDescriptor.from_tensor(sums, [lines, LINE.value], PLAIN),
        *(sums, T, S, H, H // G, B * G, bunch(q, tiles, causal), scale, *parts_of(scale)),
        **dkdv_constants(CONFIGS[D], causal, not problem.deterministic),
        num_warps=4,
    )


def along_queries(problem: Problem, dout: Tensor, rows: Tensor, dq: Tensor) -> None:
    """dq, each row by one owner. Programs start where those of `along_keys` have ended."""
    q, k, v, causal, scale = *problem[:3], problem.causal, problem.scale
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    tiles, config = cdiv(T, 2 * ROWS.value), CONFIGS[D]
    dq_kernel[(tiles * B * H,)](
        descriptor(q, ROWS.value),
        *(descriptor(x, config.dq_keys) for x in (k, v)),
        descriptor(dout, ROWS.value),
        *(rows, descriptor(dq, ROWS.value)),
        *(T, S, H, H // G, B * H, bunch(q, tiles, causal), scale, *parts_of(scale)),
        **dq_constants(config, causal),
        num_warps=4,
        launch_pdl=True,
    )


def bunch(q: Tensor, tiles: int, causal: bool) -> int:
    """Groups, or heads, that are assigned together: as many as run at once, if tiles differ."""
    return max(1, processors(q) // tiles) if causal else 1


def dkdv_constants(config: BackwardConfig, causal: bool, share: bool) -> dict[str, Any]:
    """Compile-time arguments."""
    stages = config.share_stages if share else config.stages
    return {"STAGES": stages, "CAUSAL": causal, "SHARE": share, "COPY": share and config.copy}


def dq_constants(config: BackwardConfig, causal: bool) -> dict[str, Any]:
    return {"BLOCK_S": config.dq_keys, "STAGES": config.dq_stages, "CAUSAL": causal}
