# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, attr-defined, union-attr"
"""Backward of wide rows for Hopper GPUs, in Gluon: they stream through a ring in shared memory.

dw and db of 16 384 columns fill half of a processor's registers, so a row cannot be held there
as well. Its pieces are copied into shared memory by themselves, some pieces ahead, and are read
there twice: for the row's two sums, dw and db, and then for dx. A piece's place is asked to fill
itself again as soon as it was read for the second time.

Everything is done in 32-bit words: a float32, or a pair of 16-bit floats whose two halves become
float32 with one instruction each. The compiler takes three for two, and instructions are what
limits 16-bit rows. Weights stay in shared memory, as float32.

The plain-Triton twin, which also takes rows that are not aligned to 16 bytes, is in `kernels_wide`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


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
def around(place, PLACES: gl.constexpr):
    """A place counted on beyond the end of the ring, once."""
    return gl.where(place >= PLACES, place - PLACES, place)


@gluon.jit
def ask(x_words, dy_words, x_ring, dy_ring, place, at, inside):
    """A piece of x and of dy into its place; zeros where there is no element."""
    async_copy.async_copy_global_to_shared(x_ring.index(place), x_words + at, mask=inside)
    async_copy.async_copy_global_to_shared(dy_ring.index(place), dy_words + at, mask=inside)
    async_copy.commit_group()


@gluon.jit
def saved_statistics(mean, rstd, row, M, CENTRED: gl.constexpr):
    """A row's mean and 1/√(variance + eps); zeros where nothing was saved, or beyond the rows."""
    row_mean = 0.0
    row_rstd = 0.0
    if rstd is not None:
        row_rstd = gl.load(rstd + row, mask=row < M, other=0.0)
        if CENTRED:
            row_mean = gl.load(mean + row, mask=row < M, other=0.0)
    return row_mean, row_rstd


@gluon.jit
def found_statistics(
    x_ring, start, words, eps, layout: gl.constexpr, WIDTH: gl.constexpr, PIECE: gl.constexpr,
    PIECES: gl.constexpr, PLACES: gl.constexpr, KIND: gl.constexpr, CENTRED: gl.constexpr,
):  # fmt: skip
    """The same, computed from the row in the ring."""
    HALVES: gl.constexpr = 1 if KIND == "f32" else 2
    row_mean = 0.0
    if CENTRED:
        sums = gl.zeros([PIECE], gl.float32, layout)
        for c in gl.static_range(PIECES):
            async_copy.wait_group(PLACES - 1 - c)
            pieces = halves_of(x_ring.index(around(start + c, PLACES)).load(layout), KIND)
            for h in gl.static_range(HALVES):
                sums += pieces[h]
        row_mean = gl.sum(sums, 0) / (WIDTH * HALVES)
    squares = gl.zeros([PIECE], gl.float32, layout)
    for c in gl.static_range(PIECES):
        async_copy.wait_group(PLACES - 1 - c)
        pieces = halves_of(x_ring.index(around(start + c, PLACES)).load(layout), KIND)
        for h in gl.static_range(HALVES):
            centred = pieces[h] - row_mean
            squares += gl.where(words + c * PIECE < WIDTH, centred * centred, 0.0)
    return row_mean, gl.rsqrt(gl.sum(squares, 0) / (WIDTH * HALVES) + eps)


@gluon.jit
def store_parts(
    parts, sums, words, WIDTH: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """This program's row of partial sums, if they are wanted."""
    if parts is not None:
        here = parts + gl.program_id(0).to(gl.int64) * (WIDTH * HALVES)
        for c in gl.static_range(PIECES):
            at = words + c * PIECE
            for h in gl.static_range(HALVES):
                gl.store(here + at * HALVES + h, sums[c * HALVES + h], mask=at < WIDTH)


@gluon.jit
def first_look(
    x_ring, dy_ring, weights, dw, db, start, row_mean, row_rstd, layout: gl.constexpr,
    WIDTH: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, PLACES: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    """dw and db with this row; its means of g · centred and of g, where g = dy · w · rstd.

    The words that were read come back too: where there is room in registers they are used again.
    """
    HALVES: gl.constexpr = 1 if KIND == "f32" else 2
    along = gl.zeros([PIECE], gl.float32, layout)
    level = gl.zeros([PIECE], gl.float32, layout)
    new_dw = ()
    new_db = ()
    read = ()
    for c in gl.static_range(PIECES):
        # A group is a piece: all but those after this one have arrived.
        async_copy.wait_group(PLACES - 1 - c)
        place = around(start + c, PLACES)
        x_words = x_ring.index(place).load(layout)
        dy_words = dy_ring.index(place).load(layout)
        read += ((x_words, dy_words),)
        grads = halves_of(dy_words, KIND)
        values = halves_of(x_words, KIND)
        wide = weights_of(weights, c, layout, KIND)
        for h in gl.static_range(HALVES):
            centred = values[h] - row_mean
            g = grads[h] * row_rstd
            new_dw += (dw[c * HALVES + h] + g * centred,)
            new_db += (db[c * HALVES + h] + grads[h],)
            if weights is not None:
                g *= wide[h]
            along += g * centred
            level += g
    along, level = gl.reduce((along, level), 0, pair_sum)
    return new_dw, new_db, along / (WIDTH * HALVES), level / (WIDTH * HALVES), read


@gluon.jit
def step_of(
    grads, values, through, weights, row_mean, row_rstd, along, level, layout: gl.constexpr,
    c: gl.constexpr, KIND: gl.constexpr, CENTRED: gl.constexpr,
):  # fmt: skip
    """dx of piece c: g − mean(g) − centred · rstd² · mean(g · centred), and what came through."""
    HALVES: gl.constexpr = 1 if KIND == "f32" else 2
    wide = weights_of(weights, c, layout, KIND)
    steps = ()
    for h in gl.static_range(HALVES):
        g = grads[h] * row_rstd
        if weights is not None:
            g *= wide[h]
        if CENTRED:
            g -= level
        g -= (values[h] - row_mean) * along
        if through is not None:
            g += through[h]
        steps += (g,)
    return words_of(steps, KIND)


@gluon.jit
def weights_of(weights, c: gl.constexpr, layout: gl.constexpr, KIND: gl.constexpr):
    """Piece c of the weights in shared memory, in float32; None if there are none."""
    wide = None
    if weights is not None:
        wide = halves_of(weights.index(c).load(layout), KIND)
    return wide


@gluon.jit
def weights_in(
    w, words, WIDTH: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """The weights in shared memory; None if there are none."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kept = None
    if w is not None:
        kept = gl.allocate_shared_memory(w.dtype.element_ty, [PIECES, PIECE], flat)
        for c in gl.static_range(PIECES):
            at = words + c * PIECE
            kept.index(c).store(gl.load(w + at, mask=at < WIDTH, other=0))
    return kept


@gluon.jit
def ring_backward_kernel(
    dy, dtotal, x, w, mean, rstd, dx, dw_parts, db_parts,
    M, dy_row, dtotal_row, x_row, eps,
    WIDTH: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, PLACES: gl.constexpr,
    KIND: gl.constexpr, HELD: gl.constexpr, CENTRED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dx of every programs-th row, and this program's share of dw and db.

    Tensors and strides are in words, WIDTH of them a row; there are at least PIECES places.
    """
    HALVES: gl.constexpr = 1 if KIND == "f32" else 2
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [PLACES, PIECE], flat)
    dy_ring = gl.allocate_shared_memory(dy.dtype.element_ty, [PLACES, PIECE], flat)
    words = gl.arange(0, PIECE, layout)
    first = gl.program_id(0)
    by = gl.num_programs(0)
    for k in gl.static_range(PLACES):
        row = (first + k // PIECES * by).to(gl.int64)
        at = words + k % PIECES * PIECE
        inside = (at < WIDTH) & (row < M)
        ask(x + row * x_row, dy + row * dy_row, x_ring, dy_ring, k, at, inside)
    weights = weights_in(w, words, WIDTH, PIECE, PIECES)
    dw = ()
    db = ()
    for _ in gl.static_range(PIECES * HALVES):
        dw += (gl.zeros([PIECE], gl.float32, layout),)
        db += (gl.zeros([PIECE], gl.float32, layout),)
    start = gl.to_tensor(0)
    next_mean, next_rstd = saved_statistics(mean, rstd, first, M, CENTRED)
    for each in range(first, M, by):
        row = each.to(gl.int64)
        row_mean = next_mean
        row_rstd = next_rstd
        if rstd is None:
            row_mean, row_rstd = found_statistics(
                x_ring, start, words, eps, layout, WIDTH, PIECE, PIECES, PLACES, KIND, CENTRED
            )
        next_mean, next_rstd = saved_statistics(mean, rstd, each + by, M, CENTRED)
        dw, db, along, level, read = first_look(
            x_ring, dy_ring, weights, dw, db, start, row_mean, row_rstd, layout,
            WIDTH, PIECE, PIECES, PLACES, KIND,
        )  # fmt: skip
        along *= row_rstd * row_rstd
        for c in gl.static_range(PIECES):
            place = around(start + c, PLACES)
            x_words, dy_words = read[c]
            if not HELD:
                x_words = x_ring.index(place).load(layout)
                dy_words = dy_ring.index(place).load(layout)
            grads = halves_of(dy_words, KIND)
            values = halves_of(x_words, KIND)
            after = row + (c + PLACES) // PIECES * by
            at = words + (c + PLACES) % PIECES * PIECE
            inside = (at < WIDTH) & (after < M)
            ask(x + after * x_row, dy + after * dy_row, x_ring, dy_ring, place, at, inside)
            at = words + c * PIECE
            through = None
            if dtotal is not None:
                more = gl.load(dtotal + row * dtotal_row + at, mask=at < WIDTH, other=0)
                through = halves_of(more, KIND)
            step = step_of(
                grads, values, through, weights, row_mean, row_rstd, along, level, layout,
                c, KIND, CENTRED,
            )  # fmt: skip
            gl.store(dx + row * WIDTH + at, step, mask=at < WIDTH)
        start = around(start + PIECES, PLACES)
    async_copy.wait_group(0)
    store_parts(dw_parts, dw, words, WIDTH, PIECE, PIECES, HALVES)
    store_parts(db_parts, db, words, WIDTH, PIECE, PIECES, HALVES)
