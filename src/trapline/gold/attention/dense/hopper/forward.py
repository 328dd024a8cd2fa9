# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's forward pass for Hopper GPUs, in Gluon: matrix products and exponentials overlap.

A block of threads has one warp that loads (tensor memory accelerator, a ring of tiles) and two or
three warpgroups that compute, 64 queries each. A warpgroup starts the product with the next keys
before the product of its last weights with their values, so that its softmax runs while the tensor
cores are busy. The warpgroups take turns at the tensor cores, so that one computes exponentials
while another multiplies. Weights stay in registers. The grid has one block per multiprocessor; it
walks through tiles of queries in an order that balances the work.

`triton.forward` computes the same recurrence for any shape and option.
"""

from typing import Any, NamedTuple

import torch
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

from trapline.gold.arithmetic import LOG2_E, cdiv
from trapline.gold.attention.dense import Problem
from trapline.gold.attention.dense.hopper.tiles import (
    ROWS,
    descriptor,
    head_groups,
    masked,
    my_tiles,
    packed,
    place,
    unpacked,
    weigh,
)
from trapline.gold.attention.dense.triton.tiles import LN_2
from trapline.gold.device import launched, processors
from trapline.gold.gluon_compat import tma_load, tma_store

#: Named barriers from here on pass the turn; Triton uses the first ones itself.
TURN = gl.constexpr(8)


@gluon.jit
def slot(ring, number):
    """The place of load `number` in a ring of tiles or gates."""
    return ring.index(number % ring.shape[0])


@gluon.jit
def lap(ring, number):
    """Whether load `number` falls into an even or an odd lap of the ring: a gate's phase."""
    return number // ring.shape[0] & 1


@gluon.jit
def load(source, place, number, ring, full, empty):
    """Fetches a tile into its slot, once all consumers have left the slot."""
    mbarrier.wait(slot(empty, number), lap(empty, number) ^ 1)
    mbarrier.expect(slot(full, number), source.block_type.nbytes)
    tma_load(source, place, slot(full, number), slot(ring, number))


@gluon.jit
def produce(q, k, v, memory, gates, sizes, CAUSAL: gl.constexpr):
    """Loads queries, and keys and values from the last tile to the first, as slots become free."""
    queries, keys, values, _results = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = gates
    _T, _S, _H, R, _groups, _group, tiles = sizes
    CONSUMERS: gl.constexpr = queries.shape[0]
    BLOCK_S: gl.constexpr = keys.shape[3]
    loaded = 0
    for turn in range(my_tiles(tiles)):
        b, h, top, count, _edge = place(turn, sizes, CONSUMERS * ROWS, BLOCK_S, CAUSAL)
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, CONSUMERS * q.block_type.nbytes)
        for c in gl.static_range(CONSUMERS):
            tma_load(q, [b, h, top + c * ROWS, 0], q_full, queries.index(c))
        for j in range(count):
            here = [b, h // R, (count - 1 - j) * BLOCK_S, 0]
            load(k, here, loaded + j, keys, k_full, k_empty)
            load(v, here, loaded + j, values, v_full, v_empty)
        loaded += count


@gluon.jit
def named_barrier(DO: gl.constexpr, NUMBER: gl.constexpr):
    """`sync` waits for, `arrive` only tells the other warpgroup at this barrier."""
    gl.inline_asm_elementwise(
        f"bar.{DO} {NUMBER}, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def scored(queries, keys):
    """Starts the products of 64 queries with a tile of keys."""
    BLOCK_S: gl.constexpr = keys.shape[2]
    D: gl.constexpr = keys.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_S, 16])
    nothing = gl.zeros([ROWS, BLOCK_S], gl.float32, layout)
    turned = keys.reshape([BLOCK_S, D]).permute([1, 0])
    return warpgroup_mma(queries, turned, nothing, use_acc=False, is_async=True)


@gluon.jit
def applied(pairs, values, weighted):
    """Starts adding weights times values to what is there."""
    BLOCK_S: gl.constexpr = values.shape[2]
    D: gl.constexpr = values.shape[3]
    layout: gl.constexpr = weighted.type.layout
    weights = unpacked(pairs, values.dtype, layout)
    return warpgroup_mma(weights, values.reshape([BLOCK_S, D]), weighted, is_async=True)


@gluon.jit
def step(
    j, state, queries, memory, gates, row, loaded, count, sizes, scale,
    ME: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of key tile j, while the weights of tile j − 1 are applied to its values."""
    pairs, weighted, peak, total = state
    all_queries, keys, values, _results = memory
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = gates
    CONSUMERS: gl.constexpr = all_queries.shape[0]
    BLOCK_S: gl.constexpr = keys.shape[3]
    new = loaded + j
    named_barrier("sync", TURN + ME)
    scores = scored(queries, slot(keys, new))
    mbarrier.wait(slot(v_full, new - 1), lap(v_full, new - 1))
    weighted = applied(pairs, slot(values, new - 1), weighted)
    named_barrier("arrive", TURN + (ME + 1) % CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(slot(k_empty, new))
    if MASKED:
        scores = masked(scores, row, (count - 1 - j) * BLOCK_S, sizes[0], sizes[1], CAUSAL)
    weights, peak, total, shrink = weigh(scores, peak, total, scale, MASKED, False)
    # The wait for the next keys stands here because it ends a block of instructions: ptxas would
    # otherwise move the softmax behind the wait for the tensor cores, and nothing would overlap.
    mbarrier.wait(slot(k_full, new + 1), lap(k_full, new + 1), pred=j + 1 < count)
    weighted = warpgroup_mma_wait(0, deps=[weighted])
    mbarrier.arrive(slot(v_empty, new - 1))
    across: gl.constexpr = gl.SliceLayout(1, weighted.type.layout)
    weighted *= gl.expand_dims(gl.convert_layout(shrink, across, assert_trivial=True), 1)
    return packed(weights, keys.dtype), weighted, peak, total


@gluon.jit
def begin(queries, memory, gates, row, loaded, count, sizes, scale, CAUSAL: gl.constexpr):
    """The state (weights, weighted sum, peak, total) after the first key tile, the last in time."""
    _queries, keys, _values, _results = memory
    _q_full, _q_empty, k_full, k_empty, _v_full, _v_empty = gates
    BLOCK_S: gl.constexpr = keys.shape[3]
    D: gl.constexpr = keys.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    mbarrier.wait(slot(k_full, loaded), lap(k_full, loaded))
    scores = warpgroup_mma_wait(0, deps=[scored(queries, slot(keys, loaded))])
    mbarrier.arrive(slot(k_empty, loaded))
    scores = masked(scores, row, (count - 1) * BLOCK_S, sizes[0], sizes[1], CAUSAL)
    weights, peak, total, _shrink = weigh(scores, 0.0, 0.0, scale, True, True)
    mbarrier.wait(slot(k_full, loaded + 1), lap(k_full, loaded + 1), pred=count > 1)
    nothing = gl.zeros([ROWS, D], gl.float32, layout)
    return packed(weights, keys.dtype), nothing, peak, total


@gluon.jit
def finish(state, memory, gates, out, lse, b, h, row, loaded, sizes, scale, ME: gl.constexpr):
    """Applies the last weights, divides by the totals, and writes 64 rows of out and lse."""
    pairs, weighted, peak, total = state
    _queries, _keys, values, results = memory
    _q_full, _q_empty, _k_full, _k_empty, v_full, v_empty = gates
    T, _S, H, _R, _groups, _group, _tiles = sizes
    mbarrier.wait(slot(v_full, loaded - 1), lap(v_full, loaded - 1))
    weighted = applied(pairs, slot(values, loaded - 1), weighted)
    total = gl.convert_layout(gl.sum(total, 1), peak.type.layout, assert_trivial=True)
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    natural = gl.where(empty, float("-inf"), (peak * scale + gl.log2(total)) * LN_2)
    t = row + gl.arange(0, ROWS, layout=peak.type.layout)
    gl.store(lse + (b * H + h).to(gl.int64) * T + t, natural, mask=t < T)
    weighted = warpgroup_mma_wait(0, deps=[weighted])
    mbarrier.arrive(slot(v_empty, loaded - 1))
    tma.store_wait(0)
    across: gl.constexpr = gl.SliceLayout(1, weighted.type.layout)
    inverse = gl.convert_layout(1.0 / total, across, assert_trivial=True)
    rows = (weighted * gl.expand_dims(inverse, 1)).to(values.dtype)
    results.index(ME).reshape(rows.shape).store(rows)
    fence_async_shared()
    tma_store(out, [b, h, row, 0], results.index(ME))


@gluon.jit
def consume(out, lse, memory, gates, sizes, scale, ME: gl.constexpr, CAUSAL: gl.constexpr):
    """Computes 64 rows of out and lse in each of the program's tiles: those of consumer `ME`."""
    all_queries, keys, _values, _results = memory
    CONSUMERS: gl.constexpr = all_queries.shape[0]
    BLOCK_S: gl.constexpr = keys.shape[3]
    queries = all_queries.index(ME).reshape([ROWS, keys.shape[4]])
    loaded = 0
    if ME == CONSUMERS - 1:
        named_barrier("arrive", TURN)
    for turn in range(my_tiles(sizes[6])):
        b, h, top, count, edge = place(turn, sizes, CONSUMERS * ROWS, BLOCK_S, CAUSAL)
        row = top + ME * ROWS
        mbarrier.wait(gates[0], turn & 1)
        state = begin(queries, memory, gates, row, loaded, count, sizes, scale, CAUSAL)
        for j in range(1, edge):
            state = step(
                j, state, queries, memory, gates, row, loaded, count, sizes, scale,
                ME, CAUSAL, True,
            )  # fmt: skip
        for j in range(edge, count):
            state = step(
                j, state, queries, memory, gates, row, loaded, count, sizes, scale,
                ME, CAUSAL, False,
            )  # fmt: skip
        mbarrier.arrive(gates[1])
        loaded += count
        finish(state, memory, gates, out, lse, b, h, row, loaded, sizes, scale, ME)
    if ME == 0:
        named_barrier("sync", TURN)
    tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["T", "S", "H", "R", "groups", "group", "tiles"])
def forward_kernel(
    q, k, v, out, lse, T, S, H, R, groups, group, tiles, scale,
    CONSUMERS: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sets up shared memory and barriers, then parts into one producer and its consumers."""
    D: gl.constexpr = q.block_shape[3]
    dtype: gl.constexpr = q.dtype
    # One buffer, at a fixed address: of a variable one, the ptxas of Triton 3.6 makes a descriptor
    # for the masked loop only, and the loop after it reads a stale register.
    queries = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q.layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_S, D], k.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_S, D], v.layout)
    results = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], out.layout)
    gate: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], gate)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], gate)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    memory = queries, keys, values, results
    gates = q_full, q_empty, k_full, k_empty, v_full, v_empty
    sizes = T, S, H, R, groups, group, tiles
    ONE: gl.constexpr = 0
    TWO: gl.constexpr = 1
    THREE: gl.constexpr = 2
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (out, lse, memory, gates, sizes, scale, ONE, CAUSAL)),
            (consume, (out, lse, memory, gates, sizes, scale, TWO, CAUSAL)),
            (produce, (q, k, v, memory, gates, sizes, CAUSAL)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out, lse, memory, gates, sizes, scale, ONE, CAUSAL)),
            (consume, (out, lse, memory, gates, sizes, scale, TWO, CAUSAL)),
            (consume, (out, lse, memory, gates, sizes, scale, THREE, CAUSAL)),
            (produce, (q, k, v, memory, gates, sizes, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


class ForwardConfig(NamedTuple):
    """Tile sizes and resources of the kernel for a head width."""

    #: Warpgroups that compute.
    consumers: int
    #: Keys of a tile.
    block_s: int
    #: Key tiles in flight.
    stages: int
    #: Registers per thread of a consumer; the loading warp has 24 of the block's 65536 / 32.
    registers: int


#: Head width → configuration. Each is checked on a GPU against float64.
CONFIGS = {64: ForwardConfig(3, 128, 2, 160), 128: ForwardConfig(2, 128, 2, 240)}
#: Up to this many queries smaller tiles win: those of 192 extend far beyond the diagonal.
FEW_QUERIES = 1024
CONFIGS_FOR_FEW = CONFIGS | {64: ForwardConfig(2, 128, 2, 240)}


def is_faster(problem: Problem) -> bool:
    """Whether this kernel beats the plain one, as measured on an H200.

    It does not where most of a tile would stay empty, nor where few queries of narrow heads see all
    keys: the plain kernel has more blocks to hide the start and end of its tiles.
    """
    queries, width = problem.q.shape[2:]
    one_tile, narrow = queries <= ROWS.value, width <= 64
    return queries > FEW_QUERIES or not (one_tile or (narrow and not problem.causal))


def config_for(T: int, D: int) -> ForwardConfig:
    return CONFIGS_FOR_FEW[D] if T <= FEW_QUERIES else CONFIGS[D]


def constants(config: ForwardConfig, causal: bool) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "CONSUMERS": config.consumers,
        "BLOCK_S": config.block_s,
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "CAUSAL": causal,
    }


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """out (B,H,T,D), and lse (B,H,T) in float32, of a problem that `supports` accepts."""
    q, k, v = problem.q, problem.k, problem.v
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    config = config_for(T, D)
    out, lse = q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)
    rows, programs = cdiv(T, config.consumers * ROWS.value), processors(q)
    groups, group = head_groups(B * H, rows, programs)
    tiles = B * H * rows
    forward_kernel[(min(tiles, programs),)](
        descriptor(q, ROWS.value),
        descriptor(k, config.block_s),
        descriptor(v, config.block_s),
        descriptor(out, ROWS.value),
        *(lse, T, S, H, H // G, groups, group, tiles, problem.scale * LOG2_E),
        **constants(config, problem.causal),
        num_warps=4,
    )
    return out, lse
