# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, unreachable"
"""Norms in Triton. An absent tensor is None.

Rows that fit the registers of one program: a tile holds whole rows, so the variance needs a second
pass over registers, not over memory, and is never E[x²] − E[x]².

Wider rows, piece by piece. Forward holds the pieces as they are stored, which takes half the
registers of a float32 tile of 16-bit rows. For still wider rows it computes statistics per lane
(Welford's update, then Chan's sum over lanes: nothing is squared before it is centred) and reads
the row again from the cache. Backward runs two kernels: two sums per row, then blocks of columns
that also keep partial sums of dw and db.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.device import launched


@triton.jit
def pair_sum(a, b, c, d):
    """Two sums in one reduction."""
    return a + c, b + d


@triton.jit
def let_in(EARLY: tl.constexpr):
    """Waits for the previous kernel and lets the next one start (programmatic dependent launch)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def tile_of(base, row, stride, d, inside):
    """Rows of a matrix, in float32; zero outside of it."""
    return tl.load(base + row[:, None] * stride + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def along_row(w, d, D: tl.constexpr):
    """Weights of every column, or None."""
    found = None
    if w is not None:
        found = tl.load(w + d, mask=d < D, other=0.0)
    return found


@triton.jit
def statistics(values, inside, eps, D: tl.constexpr, CENTRED: tl.constexpr):
    """The centred rows, their means and 1/√(variance + eps). Lanes outside stay zero."""
    mean = tl.zeros([values.shape[0]], tl.float32)
    if CENTRED:
        mean = tl.sum(values, 1) / D
        values = tl.where(inside, values - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(values * values, 1) / D + eps)
    return values, mean, rstd


@launched
@triton.jit
def forward_kernel(
    x, residual, w, b, y, total, mean, rstd,
    M, x_row, residual_row, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y (and total, mean, rstd) of ROWS rows.

    Weights are loaded AHEAD of the statistics, or after them: then they hold no registers that
    other programs could use meanwhile.
    """
    let_in(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (row[:, None] < M) & (d < D)
    places = row[:, None] * D + d
    values = tile_of(x, row, x_row, d, inside)
    if AHEAD:
        scale = along_row(w, d, D)
        shift = along_row(b, d, D)
    if residual is not None:
        # Rounded as it is stored, so that backward sees the numbers that were normed.
        added = values + tile_of(residual, row, residual_row, d, inside)
        rounded = added.to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=inside)
        values = rounded.to(tl.float32)
    centred, row_mean, row_rstd = statistics(values, inside, eps, D, CENTRED)
    if not AHEAD:
        scale = along_row(w, d, D)
        shift = along_row(b, d, D)
    normed = centred * row_rstd[:, None]
    if scale is not None:
        normed *= scale.to(tl.float32)
    if shift is not None:
        normed += shift.to(tl.float32)
    tl.store(y + places, normed.to(y.dtype.element_ty), mask=inside)
    if mean is not None:
        tl.store(mean + row, row_mean, mask=row < M)
    if rstd is not None:
        tl.store(rstd + row, row_rstd, mask=row < M)


@triton.jit
def centred_rows(
    values, mean, rstd, row, inside, M, eps, D: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """Rows minus their means, and 1/√(variance + eps): saved, or computed here."""
    if rstd is None:
        values, _, row_rstd = statistics(values, inside, eps, D, CENTRED)
    else:
        row_rstd = tl.load(rstd + row, mask=row < M, other=0.0)
        if CENTRED:  # lanes outside may be anything: their gradients are zero
            values -= tl.load(mean + row, mask=row < M, other=0.0)[:, None]
    return values, row_rstd


@launched
@triton.jit
def backward_kernel(
    dy, dtotal, x, w, mean, rstd, dx, dw_parts, db_parts,
    M, dy_row, dtotal_row, x_row, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
    STAGES: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx of this program's tiles of rows, and its partial sums of dw and db.

    Loads are pipelined in STAGES. A program keeps KEPT rows of sums: one where no two warps share
    columns, else ROWS, which are added at the end.
    """
    let_in(EARLY)
    d = tl.arange(0, BLOCK_D)[None, :]
    if w is not None:
        weight = tl.load(w + d, mask=d < D, other=0.0)
    dw = tl.zeros([KEPT, BLOCK_D], tl.float32)
    db = tl.zeros([KEPT, BLOCK_D], tl.float32)
    tiles = tl.cdiv(M, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < M) & (d < D)
        grad = tl.load(dy + row[:, None] * dy_row + d, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row[:, None] * x_row + d, mask=inside, other=0.0).to(tl.float32)
        centred, row_rstd = centred_rows(values, mean, rstd, row, inside, M, eps, D, CENTRED)
        x_hat = centred * row_rstd[:, None]
        if KEPT == ROWS:
            dw += grad * x_hat
            db += grad
        else:
            dw += tl.sum(grad * x_hat, 0, keep_dims=True)
            db += tl.sum(grad, 0, keep_dims=True)
        g = grad
        if w is not None:
            g = grad * weight.to(tl.float32)
        if CENTRED:
            along, level = tl.reduce((g * x_hat, g), 1, pair_sum)
            step = g - x_hat * (along / D)[:, None] - (level / D)[:, None]
        else:
            step = g - x_hat * (tl.sum(g * x_hat, 1) / D)[:, None]
        step *= row_rstd[:, None]
        if dtotal is not None:
            at = dtotal + row[:, None] * dtotal_row + d
            step += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row[:, None] * D + d, step.to(dx.dtype.element_ty), mask=inside)
    part = tl.program_id(0).to(tl.int64) * D + d
    if dw_parts is not None:
        tl.store(dw_parts + part, tl.sum(dw, 0, keep_dims=True), mask=d < D)
    if db_parts is not None:
        tl.store(db_parts + part, tl.sum(db, 0, keep_dims=True), mask=d < D)


@launched
@triton.jit
def add_parts_kernel(
    dw_parts, db_parts, dw, db, P, D,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds P partial rows of dw and of db, always in the same order."""
    let_in(EARLY)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    if tl.program_id(1) == 0:
        if dw is not None:
            tl.store(
                dw + d,
                column_sums(dw_parts, d, P, D, BLOCK_P, BLOCK_D).to(dw.dtype.element_ty),
                mask=d < D,
            )
    elif db is not None:
        tl.store(
            db + d,
            column_sums(db_parts, d, P, D, BLOCK_P, BLOCK_D).to(db.dtype.element_ty),
            mask=d < D,
        )


@launched
@triton.jit
def clear_kernel(words, N, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Sets N words to 0."""
    let_in(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + at, at * 0, mask=at < N)


@triton.jit
def column_sums(parts, d, P, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = parts + p[:, None].to(tl.int64) * D + d[None, :]
        total += tl.load(at, mask=(p[:, None] < P) & (d[None, :] < D), other=0.0)
    return tl.sum(total, 0)


@triton.jit
def chunk_of(x, residual, x_row, residual_row, row, at, inside):
    """A piece of x + residual in float32, rounded as the sum is stored."""
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + row * residual_row + at, mask=inside, other=0.0)
        values = (values + added.to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def row_statistics(
    x, residual, total, x_row, residual_row, row, eps,
    D: tl.constexpr, CHUNK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Mean and 1/√(variance + eps) of a row; the sum with a residual is stored on the way."""
    d = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.float32)
    mean = tl.zeros([CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for start in range(0, D, CHUNK):
        at = start + d
        inside = at < D
        values = chunk_of(x, residual, x_row, residual_row, row, at, inside)
        if total is not None:
            tl.store(total + row * D + at, values.to(total.dtype.element_ty), mask=inside)
        if CENTRED:
            count += tl.where(inside, 1.0, 0.0)
            off = tl.where(inside, values - mean, 0.0)
            mean += off / tl.maximum(count, 1.0)
            squares += off * (values - mean)
        else:
            squares += values * values
    row_mean = 0.0
    if CENTRED:
        row_mean = tl.sum(count * mean, 0) / D
        squares += count * (mean - row_mean) * (mean - row_mean)
    return row_mean, tl.rsqrt(tl.sum(squares, 0) / D + eps)


@triton.jit
def store_normed(y, w, b, values, row_mean, row_rstd, row, at, D: tl.constexpr):
    """A piece of y."""
    inside = at < D
    normed = (values - row_mean) * row_rstd
    if w is not None:
        normed *= tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        normed += tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * D + at, normed.to(y.dtype.element_ty), mask=inside)


@launched
@triton.jit
def held_forward_kernel(
    x, residual, w, b, y, total, mean, rstd,
    x_row, residual_row, eps,
    D: tl.constexpr, CHUNK: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y (and total, mean, rstd) of one row, whose pieces stay in registers as they are stored."""
    PIECES: tl.constexpr = (D + CHUNK - 1) // CHUNK
    let_in(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, CHUNK)
    held = ()
    for c in tl.static_range(PIECES):
        at = d + c * CHUNK
        values = tl.load(x + row * x_row + at, mask=at < D, other=0.0)
        if residual is not None:
            added = tl.load(residual + row * residual_row + at, mask=at < D, other=0.0)
            values = (values.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
            tl.store(total + row * D + at, values, mask=at < D)
        held += (values,)
    row_mean = 0.0
    if CENTRED:
        sums = tl.zeros([CHUNK], tl.float32)
        for c in tl.static_range(PIECES):
            sums += held[c].to(tl.float32)
        row_mean = tl.sum(sums, 0) / D
        if mean is not None:
            tl.store(mean + row, row_mean)
    squares = tl.zeros([CHUNK], tl.float32)
    for c in tl.static_range(PIECES):
        centred = tl.where(d + c * CHUNK < D, held[c].to(tl.float32) - row_mean, 0.0)
        squares += centred * centred
    row_rstd = tl.rsqrt(tl.sum(squares, 0) / D + eps)
    for c in tl.static_range(PIECES):
        store_normed(y, w, b, held[c].to(tl.float32), row_mean, row_rstd, row, d + c * CHUNK, D)
    if rstd is not None:
        tl.store(rstd + row, row_rstd)


@launched
@triton.jit
def wide_forward_kernel(
    x, residual, w, b, y, total, mean, rstd,
    x_row, residual_row, eps,
    D: tl.constexpr, CHUNK: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y (and total, mean, rstd) of one row."""
    let_in(EARLY)
    row = tl.program_id(0).to(tl.int64)
    row_mean, row_rstd = row_statistics(
        x, residual, total, x_row, residual_row, row, eps, D, CHUNK, CENTRED
    )
    for start in range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        values = chunk_of(x, residual, x_row, residual_row, row, at, inside)
        store_normed(y, w, b, values, row_mean, row_rstd, row, at, D)
    if mean is not None:
        tl.store(mean + row, row_mean)
    if rstd is not None:
        tl.store(rstd + row, row_rstd)


@launched
@triton.jit
def statistics_kernel(
    x, mean, rstd, x_row, eps, D: tl.constexpr, CHUNK: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """Mean and 1/√(variance + eps) of one row, where they were not saved for backward."""
    row = tl.program_id(0).to(tl.int64)
    row_mean, row_rstd = row_statistics(x, None, None, x_row, 0, row, eps, D, CHUNK, CENTRED)
    if CENTRED:
        tl.store(mean + row, row_mean)
    tl.store(rstd + row, row_rstd)


@launched
@triton.jit
def row_sums_kernel(
    dy, x, w, mean, rstd, sums,
    M, dy_row, x_row,
    D: tl.constexpr, CHUNK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """mean(g · x_hat) · rstd and mean(g) of each row."""
    row = tl.program_id(0).to(tl.int64)
    row_rstd = tl.load(rstd + row)
    row_mean = 0.0
    if CENTRED:
        row_mean = tl.load(mean + row)
    along = tl.zeros([CHUNK], tl.float32)
    level = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, D, CHUNK, num_stages=3):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        g = tl.load(dy + row * dy_row + at, mask=inside, other=0.0).to(tl.float32)
        if w is not None:
            g *= tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
        along += g * (values - row_mean)
        level += g
    tl.store(sums + row, tl.sum(along, 0) * row_rstd * row_rstd / D)
    tl.store(sums + M + row, tl.sum(level, 0) / D)


@launched
@triton.jit
def columns_kernel(
    dy, dtotal, x, w, mean, rstd, sums, dx, dw_parts, db_parts,
    M, dy_row, dtotal_row, x_row, PER,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx of PER rows of a block of columns, and their partial sums of dw and db."""
    d = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK))[None, :]
    if w is not None:
        weight = tl.load(w + d, mask=d < D, other=0.0)
    dw = tl.zeros([1, CHUNK], tl.float32)
    db = tl.zeros([1, CHUNK], tl.float32)
    first = tl.program_id(1) * PER
    end = tl.minimum(first + PER, M)
    for start in tl.range(first, end, ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        there = row < end
        inside = there[:, None] & (d < D)
        grad = tl.load(dy + row[:, None] * dy_row + d, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(x + row[:, None] * x_row + d, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            centred -= tl.load(mean + row, mask=there, other=0.0)[:, None]
        row_rstd = tl.load(rstd + row, mask=there, other=0.0)[:, None]
        dw += tl.sum(grad * (centred * row_rstd), 0, keep_dims=True)
        db += tl.sum(grad, 0, keep_dims=True)
        step = grad
        if w is not None:
            step = grad * weight.to(tl.float32)
        step -= centred * tl.load(sums + row, mask=there, other=0.0)[:, None]
        if CENTRED:
            step -= tl.load(sums + M + row, mask=there, other=0.0)[:, None]
        step *= row_rstd
        if dtotal is not None:
            at = dtotal + row[:, None] * dtotal_row + d
            step += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row[:, None] * D + d, step.to(dx.dtype.element_ty), mask=inside)
    part = tl.program_id(1).to(tl.int64) * D + d
    if dw_parts is not None:
        tl.store(dw_parts + part, dw, mask=d < D)
    if db_parts is not None:
        tl.store(db_parts + part, db, mask=d < D)
