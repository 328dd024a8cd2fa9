"""Layer normalisation: one program holds a row in registers.

In the backward pass a program walks over many rows and keeps its sums for dgamma and dbeta; a
second kernel adds these up, always in the same order.
"""

import torch
import triton
import triton.language as tl

PROGRAMS = 264  # two for each of an H200's 132 multiprocessors


@triton.jit
def _forward_kernel(
    x, gamma, beta, y, means, rstds, D, x_stride, eps, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    values = tl.load(x + row * x_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / D
    centred = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / D
    rstd = 1.0 / tl.sqrt_rn(variance + eps)
    weight = tl.load(gamma + lanes, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(beta + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * D + lanes, centred * rstd * weight + bias, mask=inside)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)


@triton.jit
def _backward_kernel(
    dy, x, gamma, means, rstds, dx, parts, rows, D, dy_stride, x_stride, programs,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    weight = tl.load(gamma + lanes, mask=inside, other=0.0).to(tl.float32)
    dgamma = tl.zeros([BLOCK], tl.float32)
    dbeta = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = program.to(tl.int64) + turn * programs
        gradient = tl.load(dy + row * dy_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row)
        normal = tl.where(inside, (values - tl.load(means + row)) * rstd, 0.0)
        weighted = gradient * weight
        along_ones = tl.sum(weighted, 0) / D
        along_normal = tl.sum(weighted * normal, 0) / D
        result = (weighted - along_ones - normal * along_normal) * rstd
        tl.store(dx + row * D + lanes, result, mask=inside)
        dgamma += gradient * normal
        dbeta += gradient
    mine = parts + program.to(tl.int64) * 2 * D + lanes
    tl.store(mine, dgamma, mask=inside)
    tl.store(mine + D, dbeta, mask=inside)


@triton.jit
def _add_kernel(
    parts, dgamma, dbeta, programs, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < 2 * D
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)
        there = (rows < programs)[:, None] & inside[None, :]
        total += tl.sum(tl.load(parts + rows[:, None] * 2 * D + columns, mask=there, other=0.0), 0)
    tl.store(dgamma + columns, total, mask=columns < D)
    tl.store(dbeta + columns - D, total, mask=(columns >= D) & inside)


def _warps(block):
    return min(max(block // 512, 1), 16)


def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):
    rows, D = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(D)
    _forward_kernel[(rows,)](
        x, gamma, beta, y, mean, rstd, D, x.stride(0), eps, BLOCK=block, num_warps=_warps(block)
    )


def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    rows, D = x.shape
    block = triton.next_power_of_2(D)
    programs = max(min(rows, PROGRAMS), 1)
    parts = torch.empty((programs, 2, D), dtype=torch.float32, device=x.device)
    _backward_kernel[(programs,)](
        dy, x, gamma, mean, rstd, dx, parts, rows, D, dy.stride(0), x.stride(0), programs,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    columns = 32
    _add_kernel[(triton.cdiv(2 * D, columns),)](
        parts, dgamma, dbeta, programs, D, ROWS=64, COLUMNS=columns, num_warps=4
    )
