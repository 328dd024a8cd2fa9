# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""dq for Hopper GPUs, in Gluon: a block of threads owns 128 queries and walks the keys.

For gradients that are bitwise repeatable: scores and their gradients are computed a second time
(seven products a tile instead of five), and no sum has two owners. Two warpgroups, 64 queries each,
that never wait for each other, and a warp that loads. Slopes feed dq += dS k straight from
registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trapline.gold.attention.dense.hopper.primitives import ROWS, dealt, exp2
from trapline.gold.device import LOG2_E
from trapline.gold.gluon_compat import barrier, tma_load, tma_store


@gluon.jit
def query_tile(sizes, BLOCK_S: gl.constexpr, CAUSAL: gl.constexpr):
    """Batch, head, first query, and how many key tiles its last query sees; at least one."""
    T, S, H, _R, heads, bunch = sizes
    tiles = gl.cdiv(T, 2 * ROWS)
    head, tile = dealt(tiles, heads, bunch)
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
    """Loads queries and dout once, then keys and values as slots become free."""
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
    """Weights from dot products: queries by keys; the first query stands at key `row`.

    The branch keeps the exponentials in front of the wait for the next product, as in dk and dv.
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
    """Writes dq of 64 queries: those of consumer `ME`."""
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


@gluon.jit(do_not_specialize=["T", "S", "H", "R", "heads", "bunch"])
def dq_kernel(
    q, k, v, dout, rows, dq, T, S, H, R, heads, bunch, scale, mantissa, power,
    BLOCK_S: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Sets up shared memory and barriers, then parts into one producer and two consumers."""
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
