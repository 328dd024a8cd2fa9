"""Activations times ternary weights: codes are unpacked in registers, a group of 128 at a time.

The product of a group is exact up to the sum, and is scaled when it is added. A few rows of
activations leave most of the GPU idle: then the groups are shared out, and a second kernel adds
the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(128)
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors


@triton.jit
def _product_kernel(
    packed, scales, x, out, M, K, N, groups, parts, packed_o, scales_o, x_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    part, tile = program % parts, program // parts
    tiles = tl.cdiv(N, COLUMNS)
    columns = (tile % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tile // tiles) * ROWS + tl.arange(0, ROWS)
    there = columns < N
    place = tl.arange(0, GROUP)
    share = tl.cdiv(groups, parts)
    first = part.to(tl.int32) * share
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(first, tl.minimum(first + share, groups)):
        inputs = group * GROUP + place
        inside = inputs < K
        values = tl.load(
            x + rows[:, None] * x_m + inputs[None, :],
            mask=(rows < M)[:, None] & inside[None, :],
            other=0.0,
        )
        codes = tl.load(
            packed + columns[None, :] * packed_o + (inputs // 4)[:, None],
            mask=inside[:, None] & there[None, :],
            other=0,
        )
        shifts = (inputs % 4 * 2)[:, None]
        weights = ((codes.to(tl.int32) >> shifts) & 3) - 1
        scale = tl.load(scales + columns * scales_o + group, mask=there, other=0.0)
        product = tl.dot(values, weights.to(values.dtype), input_precision="ieee")
        total += product * scale.to(tl.float32)[None, :]
    at = (part * M + rows)[:, None] * N + columns[None, :]
    tl.store(out + at, total, mask=(rows < M)[:, None] & there[None, :])


@triton.jit
def _add_kernel(sums, out, count, parts, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    at = sums + lanes
    for _ in range(parts):
        total += tl.load(at, mask=lanes < count, other=0.0)
        at += count
    tl.store(out + lanes, total, mask=lanes < count)


def ternary_matmul(packed, scales, x, out):
    M, K = x.shape
    N = packed.shape[0]
    if M * N == 0:
        return
    rows, columns = (16, 32) if M <= 16 else (64, 64)
    if x.element_size() == 4:
        rows = min(rows, 32)
    groups = triton.cdiv(K, 128)
    tiles = triton.cdiv(M, rows) * triton.cdiv(N, columns)
    parts = max(1, min(triton.cdiv(PROGRAMS, tiles), triton.cdiv(groups, 8), 16))
    sums = out
    if parts > 1:
        sums = torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    _product_kernel[(tiles * parts,)](
        packed, scales, x, sums, M, K, N, groups, parts,
        packed.stride(0), scales.stride(0), x.stride(0),
        ROWS=rows, COLUMNS=columns, num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        _add_kernel[(triton.cdiv(M * N, 1024),)](sums, out, M * N, parts, BLOCK=1024)
