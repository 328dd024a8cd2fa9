# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, attr-defined, union-attr"
"""Backward of wide rows for Hopper GPUs, in Gluon: a team of programs shares every row.

dw and db of 16 384 columns fill half of a processor's registers. So each program of a team keeps a
share of the columns, and dx needs two sums over all shares. The programs write their sums to a
board in global memory and continue with the next row; they finish a row LAG rows later, when the
other sums have arrived. Rows pass through a ring in shared memory and are read twice: for the sums,
dw and db, and later for dx. All programs must run at the same time: the launch is cooperative.

Everything is done in 32-bit words: a float32, or a pair of 16-bit floats whose two halves become
float32 with one instruction each (the compiler would use three for two).

`triton/kernels` has the plain-Triton twin; it also takes rows that are not aligned to 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from trapline.gold.device import launched
from trapline.gold.gluon_compat import async_load

#: The bits of −0.0, which adds nothing, as 0.0 does. A float literal would lose the sign.
MINUS_ZERO = gl.constexpr(-(1 << 31))


@gluon.jit
def let_in():
    """Waits for the previous kernel and lets the next one start (programmatic dependent launch)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pair_sum(a, b, c, d):
    """Two sums in one reduction."""
    return a + c, b + d


@gluon.jit
def halves_of(words, KIND: gl.constexpr):
    """The float32 values in words: one, or two of 16 bits each."""
    if KIND == "f32":
        found = (words,)
    elif KIND == "bf16":
        low, high = words << 16, words & -65536
        found = (low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True))
    else:
        found = gl.inline_asm_elementwise(
            "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}",
            "=r,=r,r",
            [words],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    return found


@gluon.jit
def words_of(halves, KIND: gl.constexpr):
    """The inverse, rounded to nearest."""
    if KIND == "f32":
        words = halves[0]
    else:
        words = gl.inline_asm_elementwise(
            f"cvt.rn.{KIND}x2.f32 $0, $2, $1;",
            "=r,r,r",
            [halves[0], halves[1]],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    return words


@gluon.jit
def post(spot, along, level):
    """Writes two sums as one 64-bit word; never 0, which marks an empty spot."""
    bits = level.to(gl.int32, bitcast=True)
    bits = gl.where(bits == 0, MINUS_ZERO, bits)
    low = along.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    gl.atomic_xchg(spot, (bits.to(gl.int64) << 32) | low, sem="relaxed")


@gluon.jit
def seen(spots):
    """The current words of these spots."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];",
        "=l,l",
        [spots],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def posted(spots, word, wanted):
    """The sums in these words; waits for those that are wanted and still 0."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b64 word;
        mov.b64 word, $3;
        again:
        setp.eq.s64 p, word, 0;
        @p setp.ne.s32 p, $4, 0;
        @!p bra done;
        ld.relaxed.gpu.global.b64 word, [$2];
        bra again;
        done:
        mov.b64 {$0, $1}, word;
        }""",
        "=r,=r,l,l,r",
        [spots, word, wanted],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def ask(
    x, dy, mean, rstd, x_ring, dy_ring, mean_ring, rstd_ring, place, row, x_row, dy_row, at, mine,
    M, only: gl.constexpr,
):  # fmt: skip
    """Starts copying a program's share of a row, and its statistics, into a slot of the ring."""
    inside = mine & (row < M)
    async_load(x_ring.index(place), x + row * x_row + at, mask=inside)
    here = dy + row * dy_row + at
    async_load(dy_ring.index(place), here, mask=inside)
    one = row + gl.arange(0, 1, only)
    if mean is not None:
        async_load(mean_ring.index(place), mean + one, mask=one < M)
    async_load(rstd_ring.index(place), rstd + one, mask=one < M)
    async_copy.commit_group()


@gluon.jit
def row_at(
    x_ring, dy_ring, mean_ring, rstd_ring, place, layout: gl.constexpr, only: gl.constexpr,
    KIND: gl.constexpr, CENTRED: gl.constexpr,
):  # fmt: skip
    """The row in a slot of the ring: x and dy in float32, mean and 1/√(variance + eps)."""
    values = halves_of(x_ring.index(place).load(layout), KIND)
    grads = halves_of(dy_ring.index(place).load(layout), KIND)
    row_mean = 0.0
    if CENTRED:
        row_mean = gl.sum(mean_ring.index(place).load(only), 0)
    return values, grads, row_mean, gl.sum(rstd_ring.index(place).load(only), 0)


@gluon.jit
def weights_of(w, at, mine, KIND: gl.constexpr):
    """The weights of these columns in float32, or None."""
    wide = None
    if w is not None:
        wide = halves_of(gl.load(w + at, mask=mine, other=0), KIND)
    return wide


@gluon.jit
def through_of(dtotal, row, dtotal_row, at, inside):
    """The words of the gradient of the sum x + residual, if there is one."""
    words = ()
    if dtotal is not None:
        words += (gl.load(dtotal + row * dtotal_row + at, mask=inside, other=0),)
    return words


@gluon.jit
def no_sums(HALVES: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
    sums = ()
    for _ in gl.static_range(HALVES):
        sums += (gl.zeros([BLOCK], gl.float32, layout),)
    return sums


@gluon.jit
def store_parts(parts, sums, row, at, mine, WIDTH: gl.constexpr, HALVES: gl.constexpr):
    """Stores a row of partial sums, unless parts is None."""
    if parts is not None:
        here = parts + row.to(gl.int64) * (WIDTH * HALVES) + at * HALVES
        for h in gl.static_range(HALVES):
            gl.store(here + h, sums[h], mask=mine)


@gluon.jit
def first_look(
    values, grads, wide, dw, db, row_mean, row_rstd, CENTRED: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """dw and db with this row, and the sums of g · centred and of g, where g = dy · w."""
    along = gl.zeros_like(values[0])
    level = gl.zeros_like(values[0])
    new_dw = ()
    new_db = ()
    for h in gl.static_range(HALVES):
        product = grads[h] * (values[h] - row_mean)
        new_dw += (dw[h] + product * row_rstd,)
        new_db += (db[h] + grads[h],)
        along += product * wide[h] if wide is not None else product
        if CENTRED:
            level += grads[h] * wide[h] if wide is not None else grads[h]
    along, level = gl.reduce((along, level), 0, pair_sum)
    return new_dw, new_db, along, level


@gluon.jit
def second_look(
    values, grads, wide, through, row_mean, row_rstd, along, level,
    WIDTH: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """dx = rstd · (g − mean(g) − centred · rstd² · mean(g · centred)) + gradient of the sum."""
    scale = along * row_rstd * row_rstd * row_rstd / (WIDTH * HALVES)
    shift = level * row_rstd / (WIDTH * HALVES)
    steps = ()
    for h in gl.static_range(HALVES):
        g = grads[h] * wide[h] if wide is not None else grads[h]
        step = g * row_rstd - ((values[h] - row_mean) * scale + shift)
        steps += (step + through[h] if through is not None else step,)
    return steps


@launched
@gluon.jit
def team_backward_kernel(
    dy, dtotal, x, w, mean, rstd, dx, dw_parts, db_parts, board,
    M, dy_row, dtotal_row, x_row,
    WIDTH: gl.constexpr, SHARE: gl.constexpr, BLOCK: gl.constexpr, TEAM: gl.constexpr,
    PLACES: gl.constexpr, LAG: gl.constexpr, KIND: gl.constexpr, CENTRED: gl.constexpr,
    num_warps: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """dx of every teams-th row, SHARE columns of it, and their share of dw and db.

    Tensors and strides are in words, WIDTH of them a row. The board has TEAM spots a row, all 0.
    """
    HALVES: gl.constexpr = 1 if KIND == "f32" else 2
    if EARLY:
        let_in()
    AHEAD: gl.constexpr = PLACES - LAG
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    only: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [PLACES, BLOCK], flat)
    dy_ring = gl.allocate_shared_memory(dy.dtype.element_ty, [PLACES, BLOCK], flat)
    mean_ring = gl.allocate_shared_memory(gl.float32, [PLACES, 1], flat)
    rstd_ring = gl.allocate_shared_memory(gl.float32, [PLACES, 1], flat)
    member = gl.program_id(0) % TEAM
    first = gl.program_id(0) // TEAM
    by = gl.num_programs(0) // TEAM
    share = gl.arange(0, BLOCK, layout)
    at = member * SHARE + share
    mine = (share < SHARE) & (at < WIDTH)
    for k in gl.static_range(AHEAD):
        ask(
            x, dy, mean, rstd, x_ring, dy_ring, mean_ring, rstd_ring, k,
            (first + k * by).to(gl.int64), x_row, dy_row, at, mine, M, only,
        )  # fmt: skip
    wide = weights_of(w, at, mine, KIND)
    dw = no_sums(HALVES, BLOCK, layout)
    db = no_sums(HALVES, BLOCK, layout)
    place = gl.to_tensor(0)
    mates = gl.arange(0, TEAM, only)
    word = gl.zeros([TEAM], gl.int64, only)
    more = through_of(dtotal, first.to(gl.int64), dtotal_row, at, mine & (first < M))
    for each in range(first, M + LAG * by, by):
        async_copy.wait_group(AHEAD - 1)
        values, grads, row_mean, row_rstd = row_at(
            x_ring, dy_ring, mean_ring, rstd_ring, place, layout, only, KIND, CENTRED
        )
        dw, db, along, level = first_look(
            values, grads, wide, dw, db, row_mean, row_rstd, CENTRED, HALVES
        )
        if each < M:
            post(board + each.to(gl.int64) * TEAM + member, along, level)
        # The row to finish; the first LAG rounds have none.
        old = gl.maximum(each - LAG * by, 0).to(gl.int64)
        started = each >= LAG * by
        alongs, levels = posted(board + old * TEAM + mates, word, started.to(gl.int32))
        along, level = gl.reduce((alongs, levels), 0, pair_sum)
        old_place = gl.where(place < LAG, place + AHEAD, place - LAG)
        values, grads, row_mean, row_rstd = row_at(
            x_ring, dy_ring, mean_ring, rstd_ring, old_place, layout, only, KIND, CENTRED
        )
        through = None
        if dtotal is not None:
            through = halves_of(more[0], KIND)
        steps = second_look(
            values, grads, wide, through, row_mean, row_rstd, along, level, WIDTH, HALVES
        )
        gl.store(dx + old * WIDTH + at, words_of(steps, KIND), mask=mine & started)
        # Loads for the next round are issued before the copies of rows, or they would arrive later.
        following = gl.maximum(each + (1 - LAG) * by, 0).to(gl.int64)
        word = seen(board + gl.minimum(following, M - 1) * TEAM + mates)
        more = through_of(dtotal, following, dtotal_row, at, mine & (following < M))
        ask(
            x, dy, mean, rstd, x_ring, dy_ring, mean_ring, rstd_ring, old_place,
            (each + AHEAD * by).to(gl.int64), x_row, dy_row, at, mine, M, only,
        )  # fmt: skip
        place = gl.where(place == PLACES - 1, 0, place + 1)
    async_copy.wait_group(0)
    store_parts(dw_parts, dw, first, at, mine, WIDTH, HALVES)
    store_parts(db_parts, db, first, at, mine, WIDTH, HALVES)
