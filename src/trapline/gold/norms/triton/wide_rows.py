# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, unreachable"
"""Norms of rows too wide for a tile in one program's registers, in Triton: piece by piece.

Forward holds the pieces as they are stored, which takes half the registers of a float32 tile of
16-bit rows. For still wider rows it computes statistics per lane (Welford's update, then Chan's
sum over lanes: nothing is squared before it is centred) and reads the row again from the cache.
Backward runs two kernels: two sums per row, then blocks of columns that also keep partial sums of
dw and db. It serves rows that `hopper/cooperative_rows` does not support.
"""

import triton
import triton.language as tl

from trapline.gold.device import launched
from trapline.gold.norms.triton.rows import let_in


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
        tl.store(mean + row, row_mean)
    squares = tl.zeros([CHUNK], tl.float32)
    for c in tl.static_range(PIECES):
        centred = tl.where(d + c * CHUNK < D, held[c].to(tl.float32) - row_mean, 0.0)
        squares += centred * centred
    row_rstd = tl.rsqrt(tl.sum(squares, 0) / D + eps)
    for c in tl.static_range(PIECES):
        store_normed(y, w, b, held[c].to(tl.float32), row_mean, row_rstd, row, d + c * CHUNK, D)
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
    if CENTRED:
        tl.store(mean + row, row_mean)
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
