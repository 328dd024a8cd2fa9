"""Rows in tiles of 256 columns, read as often as needed; dgamma and dbeta column by column."""

import triton
import triton.language as tl


@triton.jit
def _forward(x, gamma, beta, y, means, rstds, D, x_stride, eps, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = x + row * x_stride
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, D, TILE):
        columns = first + tl.arange(0, TILE)
        total += tl.load(start + columns, mask=columns < D, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / D
    squares = tl.zeros([TILE], tl.float32)
    for first in range(0, D, TILE):
        columns = first + tl.arange(0, TILE)
        inside = columns < D
        distance = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32) - mean
        squares += tl.where(inside, distance * distance, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
    for first in range(0, D, TILE):
        columns = first + tl.arange(0, TILE)
        inside = columns < D
        value = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(beta + columns, mask=inside, other=0.0).to(tl.float32)
        result = (value - mean) * rstd * scale + shift
        tl.store(y + row * D + columns, result, mask=inside)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)


@triton.jit
def _inputs(dy, x, gamma, means, rstds, row, D, dy_stride, x_stride, TILE: tl.constexpr):
    mean = tl.load(means + row)
    rstd = tl.load(rstds + row)
    ones = tl.zeros([TILE], tl.float32)
    normals = tl.zeros([TILE], tl.float32)
    for first in range(0, D, TILE):
        columns = first + tl.arange(0, TILE)
        inside = columns < D
        gradient = tl.load(dy + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
        ones += gradient * scale
        normals += gradient * scale * (value - mean) * rstd
    return mean, rstd, tl.sum(ones, 0) / D, tl.sum(normals, 0) / D


@triton.jit
def _rows(dy, x, gamma, means, rstds, dx, D, dy_stride, x_stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mean, rstd, ones, normals = _inputs(
        dy, x, gamma, means, rstds, row, D, dy_stride, x_stride, TILE
    )
    for first in range(0, D, TILE):
        columns = first + tl.arange(0, TILE)
        inside = columns < D
        gradient = tl.load(dy + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
        normal = (value - mean) * rstd
        result = (gradient * scale - ones - normal * normals) * rstd
        tl.store(dx + row * D + columns, result, mask=inside)


@triton.jit
def _columns(dy, x, means, rstds, dgamma, dbeta, rows, D, dy_stride, x_stride,
             ROWS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    scale = tl.zeros([TILE], tl.float32)
    shift = tl.zeros([TILE], tl.float32)
    for first in range(0, rows, ROWS):
        here = (first + tl.arange(0, ROWS)).to(tl.int64)
        there = here < rows
        inside = there[:, None] & (columns < D)[None, :]
        at_dy, at_x = here[:, None] * dy_stride + columns, here[:, None] * x_stride + columns
        gradient = tl.load(dy + at_dy, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at_x, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + here, mask=there, other=0.0)[:, None]
        rstd = tl.load(rstds + here, mask=there, other=0.0)[:, None]
        scale += tl.sum(gradient * (value - mean) * rstd, 0)
        shift += tl.sum(gradient, 0)
    tl.store(dgamma + columns, scale, mask=columns < D)
    tl.store(dbeta + columns, shift, mask=columns < D)


def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):
    rows, D = x.shape
    if rows:
        _forward[(rows,)](x, gamma, beta, y, mean, rstd, D, x.stride(0), eps, TILE=256)


def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    rows, D = x.shape
    strides = dy.stride(0), x.stride(0)
    if rows:
        _rows[(rows,)](dy, x, gamma, mean, rstd, dx, D, *strides, TILE=256)
    _columns[(triton.cdiv(D, 16),)](
        dy, x, mean, rstd, dgamma, dbeta, rows, D, *strides, ROWS=128, TILE=16
    )
