# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""dk, dv and shares of dq for Hopper GPUs, in Gluon: five products per tile.

A block of threads owns 128 keys and their values: two warpgroups, 64 keys each, and a warp that
loads (tensor memory accelerator, a ring of query tiles with their dout, lse and δ). Scores and
their gradients are formed transposed, keys by queries, so that weights and slopes feed
dv += Pᵀ dout and dk += dSᵀ q straight from registers. A step starts both products with the tile
(S = K qᵀ, dP = V doutᵀ), computes exponentials while dP runs and slopes while dv runs. Slopes go
through shared memory once, for dq = dS k: each warpgroup computes half of the columns from the
slopes of both.

Many blocks see a query, so shares of dq are added in float32 in device memory while the next
products run, in the order of the accumulators' registers, so that every access is whole
(`backward.finish_kernel` restores the order). Without `ORDERED` the copy engine (`COPY`) or the
threads add them as they come, and the last bits change from run to run. With `ORDERED` two more
warps add them, each share after those that `turn` puts before it: the same bits in every run.
A block waits only for blocks with lower numbers, which have started before it, so that the lowest
unfinished one never waits. With `RING`, without a mask, each tile of keys of a head begins at
another query, as far as there are queries enough, and a share waits for shares of earlier steps,
or of the same step and later tiles. That needs all of them to run at the same time: the launch is
cooperative, and its blocks take one bunch of groups after the other.
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

from trapline.gold.attention.dense.hopper.tiles import ROWS, assigned, exp2
from trapline.gold.device import LOG2_E, launched
from trapline.gold.gluon_compat import barrier, reinterpret, tma_add, tma_load, tma_store

#: Queries of a tile. More would not fit into the registers beside dk and dv.
QUERIES = gl.constexpr(64)
#: The sums of dq, as the copy engine sees them, are rows of this many numbers.
LINE = gl.constexpr(256)


@gluon.jit
def key_tile(number, sizes, CAUSAL: gl.constexpr, ORDERED: gl.constexpr, RING: gl.constexpr):
    """Batch, group, tile of keys, and its walk: query tiles in all, first one, direction, number.

    Tiles of keys are numbered from the most queries to the least. In order, every other bunch of
    groups begins with the least: its programs start together, walk up from the diagonal and end one
    after the other, as those of the next bunch start, which walk down and end together. In a ring,
    a program has one tile in each bunch; this is that of bunch `number`.
    """
    T, S, H, R, groups, bunch = sizes
    keys = gl.cdiv(S, 2 * ROWS)
    tiles = gl.cdiv(T, QUERIES)
    G = H // R
    first = 0
    begin = 0
    way = 1
    if RING:
        group = number * bunch + gl.program_id(0) // keys
        tile = gl.program_id(0) % keys
        begin = tile * tiles // keys
    else:
        group, tile = assigned(keys, groups, bunch)
    if CAUSAL:
        if ORDERED:
            upwards = (gl.cdiv(groups, bunch) - group // bunch) % 2 == 0
            tile = gl.where(upwards, keys - 1 - tile, tile)
            way = gl.where(upwards, 1, -1)
        first = gl.maximum(tile * (2 * ROWS) - S + T, 0) // QUERIES
        begin = gl.where(way == 1, first, tiles - 1)
    return group // G, group % G, tile, (tiles, begin, way, tiles - first)


@gluon.jit
def bunches(sizes, RING: gl.constexpr):
    """In how many bunches of groups this program has a tile of keys."""
    _T, S, _H, _R, groups, bunch = sizes
    count = 1
    if RING:
        place = gl.program_id(0) // gl.cdiv(S, 2 * ROWS)
        count = gl.cdiv(groups - place, bunch)
    return count


@gluon.jit
def turn(tile, j, way, sizes, CAUSAL: gl.constexpr, RING: gl.constexpr):
    """How many shares of query tile j are added before that of this tile of keys.

    In a ring, the tile that begins at j is the first, then those that began before, and last the
    one that has to go all the way round.
    """
    T, S, _H, _R, _groups, _bunch = sizes
    before = tile
    if RING:
        keys = gl.cdiv(S, 2 * ROWS)
        begun = gl.minimum(gl.cdiv((j + 1) * keys, gl.cdiv(T, QUERIES)), keys)
        before = begun - 1 - tile + gl.where(tile < begun, 0, keys)
    if CAUSAL:
        last = ((j + 1) * QUERIES - 1 + S - T) // (2 * ROWS)
        last = gl.minimum(last, gl.cdiv(S, 2 * ROWS) - 1)
        before = gl.where(way == 1, last - tile, tile)
    return before


@gluon.jit
def stepped(j, walk, RING: gl.constexpr):
    """The query tile after j, and 1 if it is the first of the next head."""
    tiles, begin, way, count = walk
    j += way
    if RING:
        j = gl.where(j == tiles, 0, j)
        ended = j == begin
    else:
        ended = j == begin + way * count
        j = gl.where(ended, begin, j)
    return j, gl.where(ended, 1, 0)


@gluon.jit
def produce(
    descriptors, buffers, gates, sizes,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Load keys and values once, then the query tiles of each head of the group in turn."""
    q, k, v, dout, rows = descriptors
    queries, upstreams, row_pairs, keys, values, _slopes, _shares = buffers
    kv_full, kv_empty, q_full, dout_full, shared, _share_full, _share_empty = gates
    H = sizes[2]
    R = sizes[3]
    done = 0
    for number in range(bunches(sizes, RING)):
        b, g, tile, walk = key_tile(number, sizes, CAUSAL, ORDERED, RING)
        tiles, begin, _way, count = walk
        mbarrier.wait(kv_empty, number & 1 ^ 1, pred=number > 0)
        mbarrier.expect(kv_full, 2 * (k.block_type.nbytes + v.block_type.nbytes))
        for half in gl.static_range(2):
            top = (2 * tile + half) * ROWS
            tma_load(k, [b, g, top, 0], kv_full, keys.index(half))
            tma_load(v, [b, g, top, 0], kv_full, values.index(half))
        h = g * R
        j = begin
        steps = count * R
        for i in range(steps):
            slot = (done + i) % STAGES
            # Sharing the slopes of a tile implies that the tile before is finished. The end of a
            # bunch counts as one more tile, and keys are let go after it.
            after = done + number + i - STAGES + 1
            mbarrier.wait(shared.index(after & 1), after >> 1 & 1, pred=i >= STAGES)
            full = q_full.index(slot)
            mbarrier.expect(full, q.block_type.nbytes)
            tma_load(q, [b, h, j * QUERIES, 0], full, queries.index(slot))
            full = dout_full.index(slot)
            mbarrier.expect(full, dout.block_type.nbytes + rows.block_type.nbytes)
            tma_load(dout, [b, h, j * QUERIES, 0], full, upstreams.index(slot))
            row = (b * H + h) * tiles + j
            tma_load(rows, [row, 0], full, row_pairs.index(slot))
            j, rounds = stepped(j, walk, RING)
            h += rounds
        done += steps


@gluon.jit
def wait_until(place, number):
    """Wait until the counter at `place` is `number`, for copies of the copy engine too.

    The warp sleeps for 0.4 µs between looks: looking takes power that the products need.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred more; .reg .u32 found; AGAIN: ld.acquire.gpu.global.u32 found, [$1]; "
        "setp.ne.u32 more, found, $2; @more nanosleep.u32 400; @more bra AGAIN; "
        "fence.proxy.async; mov.u32 $0, found; }",
        "=r,l,r", [place, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_up(place):
    """Add one to the counter once all copies of this warp have arrived in device memory."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 lane; cp.async.bulk.wait_group 0; fence.proxy.async; "
        "bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
        "@first red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, lane; }",
        "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_in_order(
    summed, buffers, gates, sizes,
    ME: gl.constexpr, CAUSAL: gl.constexpr, RING: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Add every other share of dq to the sums, each in its turn; the first is stored."""
    sums, _start, turns = summed
    shares = buffers[6]
    full = gates[5].index(ME)
    empty = gates[6].index(ME)
    LINES: gl.constexpr = QUERIES * D // LINE
    H = sizes[2]
    R = sizes[3]
    ORDERED: gl.constexpr = True
    done = 0
    for number in range(bunches(sizes, RING)):
        b, g, tile, walk = key_tile(number, sizes, CAUSAL, ORDERED, RING)
        tiles, begin, way, count = walk
        steps = count * R
        for i in range((ME + done) % 2, steps, 2):
            j = begin + way * (i % count)
            if RING:
                j = gl.where(j < tiles, j, j - tiles)
            row = (b * H + g * R + i // count) * tiles + j
            before = turn(tile, j, way, sizes, CAUSAL, RING)
            mbarrier.wait(full, (done + i) // 2 & 1)
            wait_until(turns + row, before)
            line = row * LINES
            if before == 0:
                tma_store(sums, [line, 0], shares.index(2 * ME))
                tma_store(sums, [line + LINES // 2, 0], shares.index(2 * ME + 1))
            else:
                tma_add(sums, [line, 0], shares.index(2 * ME))
                tma_add(sums, [line + LINES // 2, 0], shares.index(2 * ME + 1))
            tma.store_wait(0)
            mbarrier.arrive(empty)
            count_up(turns + row)
        done += steps


@gluon.jit
def weigh(s, lse, top, keys_left, scale, CAUSAL: gl.constexpr):
    """Weights from dot products: keys by queries; the first query is at key position `top`.

    The branch also ends a block of instructions for ptxas, which would otherwise move the
    exponentials behind the wait for the next product, and nothing would overlap.
    """
    layout: gl.constexpr = s.type.layout
    p = exp2(s * scale - gl.expand_dims(lse, 0))
    edge = keys_left < ROWS
    if CAUSAL:
        edge = edge | (top < ROWS - 1)
    if edge:
        key = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
        seen = key < keys_left
        if CAUSAL:
            query = gl.expand_dims(gl.arange(0, QUERIES, gl.SliceLayout(0, layout)) + top, 0)
            seen = seen & (key <= query)
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def in_register_order(tile):
    """Half a tile of dq as one axis on which every thread's values come in fours, warp by warp.

    Accumulators hold, in each thread, columns 2c and 2c + 1 of rows r and r + 8.
    """
    C: gl.constexpr = tile.shape[1]
    parts = tile.reshape([QUERIES // 16, 2, 8, C // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return parts.reshape([QUERIES * C])


@gluon.jit
def shared_slopes(i, ds, buffers, gates, ME: gl.constexpr, COPY: gl.constexpr):
    """Store this warpgroup's slopes for both; start dq with its own.

    There is room for the slopes of two tiles: a warpgroup that shares those of tile i has finished
    with those of tile i − 2, because the other one shared tile i − 1 after that.
    """
    _queries, _upstreams, _row_pairs, keys, _values, slopes, _shares = buffers
    shared = gates[4].index(i & 1)
    D: gl.constexpr = keys.shape[4]
    C: gl.constexpr = D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    own = slopes.index(2 * (i & 1) + ME)
    own.store(ds)
    fence_async_shared()
    if COPY:
        tma.store_wait(0)  # the last share has left `shares`
    barrier()
    mbarrier.arrive(shared)
    nothing = gl.zeros([QUERIES, C], gl.float32, layout)
    k = keys.index(ME).reshape([ROWS, D]).slice(ME * C, C, dim=1)
    dq = warpgroup_mma(own.permute([1, 0]), k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(shared, i >> 1 & 1)
    other = slopes.index(2 * (i & 1) + 1 - ME)
    k = keys.index(1 - ME).reshape([ROWS, D]).slice(ME * C, C, dim=1)
    return warpgroup_mma(other.permute([1, 0]), k, dq, is_async=True)


@gluon.jit
def added(dq, line, summed, buffers, ME: gl.constexpr, COPY: gl.constexpr):
    """Add this warpgroup's half of dq to the sums from `line` on."""
    sums, start, _turns = summed
    ordered = in_register_order(dq)
    if COPY:
        share = buffers[6].index(ME)
        share.store(ordered.reshape(share.shape))
        fence_async_shared()
        barrier()
        tma_add(sums, [line, 0], share)
    else:
        places = gl.arange(0, ordered.shape[0], ordered.type.layout)
        gl.atomic_add(start + line.to(gl.int64) * LINE + places, ordered, sem="relaxed")


@gluon.jit
def handed_over(i, dq, buffers, gates, ME: gl.constexpr):
    """Give this warpgroup's half of dq to one of the two warps that add in order."""
    slot = i & 1
    ordered = in_register_order(dq)
    mbarrier.wait(gates[6].index(slot), (i >> 1 & 1) ^ 1)
    share = buffers[6].index(2 * slot + ME)
    share.store(ordered.reshape(share.shape))
    fence_async_shared()
    mbarrier.arrive(gates[5].index(slot))


@gluon.jit
def step(
    i, ended, dk, dv, line, top, keys_left, scale, mantissa, summed, buffers, gates,
    ME: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Add the part of query tile i to dk and dv, and this warpgroup's half of dq to the sums.

    `ended` bunches of groups have ended before it.
    """
    queries, upstreams, row_pairs, keys, values, _slopes, _shares = buffers
    _kv_full, _kv_empty, q_full, dout_full, _shared, _share_full, _share_empty = gates
    D: gl.constexpr = keys.shape[4]
    dtype: gl.constexpr = keys.dtype
    by_query: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    by_width: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    in_registers: gl.constexpr = gl.DotOperandLayout(0, by_width, 2)
    columns: gl.constexpr = gl.SliceLayout(0, by_query)
    nothing = gl.zeros([ROWS, QUERIES], gl.float32, by_query)
    line_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs = reinterpret(row_pairs, gl.float32, [2 * STAGES, QUERIES], line_layout)
    slot = i % STAGES
    phase = i // STAGES & 1
    q = queries.index(slot).reshape([QUERIES, D])
    dout = upstreams.index(slot).reshape([QUERIES, D])
    k = keys.index(ME).reshape([ROWS, D])
    v = values.index(ME).reshape([ROWS, D])
    mbarrier.wait(q_full.index(slot), phase)
    s = warpgroup_mma(k, q.permute([1, 0]), nothing, use_acc=False, is_async=True)
    mbarrier.wait(dout_full.index(slot), phase)
    dp = warpgroup_mma(v, dout.permute([1, 0]), nothing, use_acc=False, is_async=True)
    lse = pairs.index(2 * slot).load(columns)
    s = warpgroup_mma_wait(1, deps=[s])
    p = weigh(s, lse, top, keys_left, scale, CAUSAL)
    weights = gl.convert_layout(p.to(dtype), in_registers, assert_trivial=True)
    dv = warpgroup_mma(weights, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = pairs.index(2 * slot + 1).load(columns)
    ds = (p * (dp * mantissa - gl.expand_dims(delta, 0))).to(dtype)
    dq = shared_slopes(i + ended, ds, buffers, gates, ME, COPY)
    slopes = gl.convert_layout(ds, in_registers, assert_trivial=True)
    dk = warpgroup_mma(slopes, q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    if ORDERED:
        handed_over(i, dq, buffers, gates, ME)
    else:
        added(dq, line, summed, buffers, ME, COPY)
    return warpgroup_mma_wait(0, deps=[dk, dv])


@gluon.jit
def consume(
    given,
    ME: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
    RING: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Walk through the query tiles and write dk and dv of the 64 keys of consumer `ME`."""
    results, summed, buffers, gates, sizes, scales = given
    dk_out, dv_out = results
    _queries, _upstreams, _row_pairs, keys, values, _slopes, _shares = buffers
    kv_full, kv_empty, shared = gates[0], gates[1], gates[4]
    T, S, H, R, _groups, _bunch = sizes
    scale, mantissa, power = scales
    D: gl.constexpr = keys.shape[4]
    LINES: gl.constexpr = QUERIES * D // LINE
    by_width: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    done = 0
    barrier()
    for number in range(bunches(sizes, RING)):
        b, g, tile, walk = key_tile(number, sizes, CAUSAL, ORDERED, RING)
        tiles, begin, _way, count = walk
        left = (2 * tile + ME) * ROWS
        line = ((b * H + g * R) * tiles + begin) * LINES + ME * (LINES // 2)
        dk = gl.zeros([ROWS, D], gl.float32, by_width)
        dv = gl.zeros([ROWS, D], gl.float32, by_width)
        mbarrier.wait(kv_full, number & 1)
        steps = count * R
        gl.assume(steps > 0)  # the last query sees every key
        j = begin
        for i in range(done, done + steps):
            dk, dv = step(
                i, number, dk, dv, line, j * QUERIES + S - T - left, S - left, scale * LOG2_E,
                mantissa, summed, buffers, gates, ME, STAGES, CAUSAL, ORDERED, COPY,
            )  # fmt: skip
            j, rounds = stepped(j, walk, RING)
            line += (1 + rounds * (tiles - count)) * LINES
        done += steps
        # The other warpgroup may still be reading this one's keys.
        last = done + number
        mbarrier.arrive(shared.index(last & 1))
        mbarrier.wait(shared.index(last & 1), last >> 1 & 1)
        keys.index(ME).reshape([ROWS, D]).store((dk * power).to(keys.dtype))
        values.index(ME).reshape([ROWS, D]).store(dv.to(keys.dtype))
        fence_async_shared()
        barrier()
        tma_store(dk_out, [b, g, left, 0], keys.index(ME))
        tma_store(dv_out, [b, g, left, 0], values.index(ME))
        tma.store_wait(0)
        if RING:
            mbarrier.arrive(kv_empty)


@launched
@gluon.jit(do_not_specialize=["T", "S", "H", "R", "groups", "bunch"])
def dkdv_kernel(
    q, k, v, dout, rows, dk, dv, sums, sums_start, turns, T, S, H, R, groups, bunch,
    scale, mantissa, power,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr, RING: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and barriers, then split into warps that load, compute and add."""
    D: gl.constexpr = q.block_shape[3]
    dtype: gl.constexpr = q.dtype
    queries = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], q.layout)
    upstreams = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], dout.layout)
    row_pairs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * QUERIES], rows.layout)
    keys = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], k.layout)
    values = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], v.layout)
    slope_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    slopes = gl.allocate_shared_memory(dtype, [4, ROWS, QUERIES], slope_layout)
    shares = keys
    if ORDERED or COPY:
        LINES: gl.constexpr = QUERIES * D // LINE // 2
        HALVES: gl.constexpr = 4 if ORDERED else 2
        shares = gl.allocate_shared_memory(gl.float32, [HALVES, LINES, LINE], sums.layout)
    gate: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], gate)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], gate)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gate)
    shared = gl.allocate_shared_memory(gl.int64, [2, 1], gate)
    share_full = gl.allocate_shared_memory(gl.int64, [2, 1], gate)
    share_empty = gl.allocate_shared_memory(gl.int64, [2, 1], gate)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(dout_full.index(slot), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(shared.index(slot), count=2)
        mbarrier.init(share_full.index(slot), count=2)
        mbarrier.init(share_empty.index(slot), count=1)
    fence_async_shared()
    barrier()
    loaded = q, k, v, dout, rows
    results = dk, dv
    summed = sums, sums_start, turns
    buffers = queries, upstreams, row_pairs, keys, values, slopes, shares
    gates = kv_full, kv_empty, q_full, dout_full, shared, share_full, share_empty
    sizes = T, S, H, R, groups, bunch
    scales = scale, mantissa, power
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    computed = results, summed, buffers, gates, sizes, scales
    if ORDERED:
        gl.warp_specialize([
            (consume, (computed, FIRST, STAGES, CAUSAL, ORDERED, RING, COPY)),
            (consume, (computed, SECOND, STAGES, CAUSAL, ORDERED, RING, COPY)),
            (produce, (loaded, buffers, gates, sizes, STAGES, CAUSAL, ORDERED, RING)),
            (add_in_order, (summed, buffers, gates, sizes, FIRST, CAUSAL, RING, D)),
            (add_in_order, (summed, buffers, gates, sizes, SECOND, CAUSAL, RING, D)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (computed, FIRST, STAGES, CAUSAL, ORDERED, RING, COPY)),
            (consume, (computed, SECOND, STAGES, CAUSAL, ORDERED, RING, COPY)),
            (produce, (loaded, buffers, gates, sizes, STAGES, CAUSAL, ORDERED, RING)),
        ], [4, 1], [240, 24])  # fmt: skip
