# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Layer norm and RMS norm in Triton: every element is read once and written once.

A tile holds whole rows in registers, so the variance is a second look at registers, not at memory,
and never E[x²] − E[x]². Backward walks the rows with a fixed grid; every program keeps float32 sums
of dw and db and writes one row of partial sums, which a last kernel adds in a fixed order, so
gradients are bitwise repeatable. Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.kernels_device import processors
from trapline.gold.norms import fast

WIDEST = 65536
KERNELS = "trapline_norms_kernels"


@triton.jit
def tile_of(base, row, stride, d, inside):
    """Rows of a matrix, in float32; zero outside of it."""
    return tl.load(base + row[:, None] * stride + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def statistics(values, inside, eps, D: tl.constexpr, CENTRED: tl.constexpr):
    """The centred rows, their means and 1/√(variance + eps). Lanes outside stay zero."""
    mean = tl.zeros([values.shape[0]], tl.float32)
    if CENTRED:
        mean = tl.sum(values, 1) / D
        values = tl.where(inside, values - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(values * values, 1) / D + eps)
    return values, mean, rstd


@triton.jit
def forward_kernel(
    x, residual, w, b, y, total, mean, rstd,
    M, x_row, residual_row, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """y (and total, mean, rstd) of ROWS rows. An absent tensor is None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < M) & (d[None, :] < D)
    places = row[:, None] * D + d[None, :]
    values = tile_of(x, row, x_row, d, inside)
    if residual is not None:
        # Rounded as it is stored, so that backward sees the numbers that were normed.
        added = values + tile_of(residual, row, residual_row, d, inside)
        rounded = added.to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=inside)
        values = rounded.to(tl.float32)
    centred, row_mean, row_rstd = statistics(values, inside, eps, D, CENTRED)
    normed = centred * row_rstd[:, None]
    if w is not None:
        normed *= tl.load(w + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if b is not None:
        normed += tl.load(b + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    tl.store(y + places, normed.to(y.dtype.element_ty), mask=inside)
    if CENTRED:
        tl.store(mean + row, row_mean, mask=row < M)
    tl.store(rstd + row, row_rstd, mask=row < M)


@triton.jit
def backward_kernel(
    dy, dtotal, x, w, mean, rstd, dx, dw_parts, db_parts,
    M, dy_row, dtotal_row, x_row, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every ROWS·programs-th tile of rows, and this program's share of dw and db."""
    d = tl.arange(0, BLOCK_D)
    weight = tl.full([BLOCK_D], 1.0, tl.float32)
    if w is not None:
        weight = tl.load(w + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK_D], tl.float32)
    db = tl.zeros([ROWS, BLOCK_D], tl.float32)
    tiles = tl.cdiv(M, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < M) & (d[None, :] < D)
        grad = tile_of(dy, row, dy_row, d, inside)
        values = tile_of(x, row, x_row, d, inside)
        if rstd is None:
            centred, _, row_rstd = statistics(values, inside, eps, D, CENTRED)
        else:
            row_rstd = tl.load(rstd + row, mask=row < M, other=0.0)
            centred = values
            if CENTRED:
                row_mean = tl.load(mean + row, mask=row < M, other=0.0)
                centred = tl.where(inside, values - row_mean[:, None], 0.0)
        x_hat = centred * row_rstd[:, None]
        dw += grad * x_hat
        db += grad
        g = grad * weight[None, :]
        step = g - x_hat * (tl.sum(g * x_hat, 1) / D)[:, None]
        if CENTRED:
            step -= (tl.sum(g, 1) / D)[:, None]
        step *= row_rstd[:, None]
        if dtotal is not None:
            step += tile_of(dtotal, row, dtotal_row, d, inside)
        tl.store(dx + row[:, None] * D + d[None, :], step.to(dx.dtype.element_ty), mask=inside)
    part = tl.program_id(0).to(tl.int64) * D + d
    if dw_parts is not None:
        tl.store(dw_parts + part, tl.sum(dw, 0), mask=d < D)
    if db_parts is not None:
        tl.store(db_parts + part, tl.sum(db, 0), mask=d < D)


@triton.jit
def add_parts_kernel(parts, out, P, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    """Σ over P partial rows of BLOCK_D columns, always in the same order."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        total += tl.load(
            parts + p[:, None].to(tl.int64) * D + d[None, :],
            mask=(p[:, None] < P) & (d[None, :] < D),
            other=0.0,
        )
    tl.store(out + d, tl.sum(total, 0).to(out.dtype.element_ty), mask=d < D)


class Shape(NamedTuple):
    """How a problem is cut into tiles of whole rows."""

    rows: int  # a tile
    width: int  # D, rounded up to a power of two
    warps: int


#: Elements of a tile: enough loads in flight to cover latency, few enough to stay in registers.
FORWARD_TILE = 4096
BACKWARD_TILE = 2048
#: A thread holds this many elements of each tensor of the tile.
FORWARD_SHARE = 16
BACKWARD_SHARE = 16


def shape_of(width: int, tile: int, share: int) -> Shape:
    """Several short rows or one long one, and as many warps as their elements keep busy."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(16, tile // block))
    return Shape(rows, block, max(1, min(32, rows * block // (32 * share))))


def stages_of(shape: Shape, itemsize: int) -> int:
    """Two, so that the next rows are under way, where two programs' buffers fit an SM's memory."""
    buffers = 2 * 3 * shape.rows * shape.width * itemsize  # x, dy and dtotal, twice
    return 2 if buffers <= 100_000 else 1


def _forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(x)
    y, total, mean, rstd = answers = _forward_shape(x, residual, w, b, eps, centred)
    flat, added = rows_of(x), None if residual is None else rows_of(residual)
    M, D = flat.shape
    shape = shape_of(D, FORWARD_TILE, FORWARD_SHARE)
    if M:
        forward_kernel[(triton.cdiv(M, shape.rows),)](
            *(flat, added, w, b, y, None if added is None else total, mean, rstd),
            *(M, flat.stride(0), 0 if added is None else added.stride(0), eps),
            D=D,
            BLOCK_D=shape.width,
            ROWS=shape.rows,
            CENTRED=centred,
            num_warps=shape.warps,
        )
    return answers


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    require(x)
    answers = _backward_shape(dy, dtotal, x, w, mean, rstd, eps, centred, biased)
    dx, dw, db = answers
    flat, grad = rows_of(x), rows_of(dy)
    through = None if dtotal is None else rows_of(dtotal)
    M, D = flat.shape
    shape = shape_of(D, BACKWARD_TILE, BACKWARD_SHARE)
    programs = max(1, min(triton.cdiv(M, shape.rows), 2 * processors(x)))
    parts = x.new_empty((2, programs, D), dtype=torch.float32)
    dw_parts, db_parts = parts[0] if w is not None else None, parts[1] if biased else None
    backward_kernel[(programs,)](
        *(grad, through, flat, w, mean, rstd, dx, dw_parts, db_parts),
        *(M, grad.stride(0), 0 if through is None else through.stride(0), flat.stride(0), eps),
        D=D,
        BLOCK_D=shape.width,
        ROWS=shape.rows,
        CENTRED=centred,
        STAGES=stages_of(shape, x.element_size()),
        num_warps=shape.warps,
    )
    for each, out in ((dw_parts, dw), (db_parts, db)):
        if each is not None:
            add_parts_kernel[(triton.cdiv(D, 64),)](each, out, programs, D, BLOCK_P=32, BLOCK_D=64)
    return answers


def require(x: Tensor) -> None:
    """What the kernels take."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {x.dtype}")
    if not 1 <= x.shape[-1] <= WIDEST:
        raise RangeError(f"the kernels take rows of 1 to {WIDEST} elements, not {x.shape[-1]}")


def rows_of(x: Tensor) -> Tensor:
    """(rows, D) with neighbours along D beside each other: a view wherever that is possible."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _forward_shape(
    x: Tensor, residual: Tensor | None, _w: Any, _b: Any, _eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one_a_row = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(one_a_row if centred else 0, dtype=torch.float32),
        x.new_empty(one_a_row, dtype=torch.float32),
    )


def _backward_shape(
    _dy: Tensor,
    _dtotal: Any,
    x: Tensor,
    w: Tensor | None,
    _mean: Any,
    _rstd: Any,
    _eps: float,
    _centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(width if w is not None else 0),
        x.new_empty(width if biased else 0),
    )


_LIBRARY = fast.define(KERNELS)
for _name, _kernel, _shape in (
    ("forward", _forward, _forward_shape),
    ("backward", _backward, _backward_shape),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _shape, "Meta")
