"""Activations times ternary weights: codes are unpacked in registers, a group of 128 at a time.

The product of a group is exact up to the sum, and is scaled when it is added. A few rows of
activations leave most of the GPU idle: then the groups are shared out, and a second kernel adds
the parts in a fixed order. Large products of 16-bit activations take the codes by half words, of
which two instructions make two weights.
"""

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(128)
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors
LARGE, LARGE_PROGRAMS = 1 << 22, 1024


def _cuts(kind, mantissa, bias):
    """Instructions that make two weights, the codes i of two half words, for each i.

    A code among the low bits of a mantissa adds 0, 1 or 2 to a power of two; that power and 1 are
    taken off again. One shift serves as many codes as the mantissa has room for.
    """
    room = mantissa // 2
    made = []
    for i in range(8):
        bit, shift = 2 * (i % room), 2 * (i // room * room)
        power = (mantissa - bit + bias) << mantissa
        values = 3 << bit, power, bias << mantissa, 0x8000 | power | 1 << bit
        mask, power, one, less = (f"0x{value * 0x10001:08x}" for value in values)
        made.append(
            "{ .reg .b32 code, one, less; "
            f"shr.b32 code, $1, {shift}; lop3.b32 code, code, {mask}, {power}, 0xea; "
            f"mov.b32 one, {one}; mov.b32 less, {less}; fma.rn.{kind} $0, code, one, less; }}"
        )
    return tuple(made)


CUTS = {torch.bfloat16: _cuts("bf16x2", 7, 127), torch.float16: _cuts("f16x2", 10, 15)}


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
def _order_kernel(x, ordered, M, x_m, ROWS: tl.constexpr):
    """ordered[group, i, row, h] = x[row, 128 group + 8 h + i]"""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    place = tl.arange(0, GROUP)
    here = (rows < M)[:, None]
    values = tl.load(x + x_m * rows[:, None] + (group * GROUP + place)[None, :], mask=here)
    code = (group * 8 + place % 8).to(tl.int64)
    at = (code[None, :] * M + rows[:, None]) * 16 + (place // 8)[None, :]
    tl.store(ordered + at, values, mask=here)


@triton.jit
def _halves_kernel(
    halves, scales, ordered, out, M, N, groups, parts, halves_o, scales_o,
    CUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `_product_kernel`, for whole groups: 16 half words of eight codes each."""
    program = tl.program_id(0).to(tl.int64)
    part, tile = program % parts, program // parts
    tiles = tl.cdiv(N, COLUMNS)
    columns = (tile % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tile // tiles) * ROWS + tl.arange(0, ROWS)
    there, here = columns < N, (rows < M)[None, :]
    half = tl.arange(0, 16)
    halves_tile = halves + columns[:, None] * halves_o + half[None, :]
    x_tile = ordered + rows[None, :] * 16 + half[:, None]
    scales_tile = scales + scales_o * columns
    share = tl.cdiv(groups, parts)
    first = part.to(tl.int32) * share
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for group in range(first, tl.minimum(first + share, groups)):
        codes = tl.load(halves_tile + group * 16, mask=there[:, None], other=0)
        factor = tl.load(scales_tile + group, mask=there, other=0.0)
        x_group = x_tile + tl.cast(group, tl.int64) * (M * 128)
        product = tl.zeros([COLUMNS, ROWS], tl.float32)
        for i in tl.static_range(8):
            weights = tl.inline_asm_elementwise(
                CUTS[i], "=r,r", [codes], dtype=ordered.dtype.element_ty, is_pure=True, pack=2
            )
            values = tl.load(x_group + i * (M * 16), mask=here, other=0.0)
            product = tl.dot(weights, values, product)
        total += product * factor.to(tl.float32)[:, None]
    at = (part * M + rows)[None, :] * N + columns[:, None]
    tl.store(out + at, total, mask=here & there[:, None])


@triton.jit
def _add_kernel(sums, out, count, parts, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    at = sums + lanes
    for _ in range(parts):
        total += tl.load(at, mask=lanes < count, other=0.0)
        at += count
    tl.store(out + lanes, total, mask=lanes < count)


def _tiles(M, N, groups, size):
    """Rows and columns of a program, the number of tiles, and over how many programs the groups of
    one are shared out."""
    rows, columns = (16, 32) if M <= 16 else (64, 64)
    if size == 4:
        rows = min(rows, 32)
    tiles = triton.cdiv(M, rows) * triton.cdiv(N, columns)
    parts = max(1, min(triton.cdiv(PROGRAMS, tiles), triton.cdiv(groups, 8), 16))
    return rows, columns, tiles, parts


def _large_product(packed, scales, x, out):
    """16-bit activations and whole groups. The weights are the first operand of the products and
    never leave the registers; activations are brought into the order of the codes before."""
    M, K = x.shape
    N, groups = packed.shape[0], K // 128
    ordered = torch.empty((groups, 8, M, 16), dtype=x.dtype, device=x.device)
    rows = min(16, triton.next_power_of_2(M))
    _order_kernel[(triton.cdiv(M, rows), groups)](x, ordered, M, x.stride(0), ROWS=rows)
    rows, columns, warps = (16, 64, 2) if M <= 16 else (64, 128, 4)
    tiles = triton.cdiv(N, columns) * triton.cdiv(M, rows)
    parts = max(1, min(LARGE_PROGRAMS // tiles, triton.cdiv(groups, 8))) if M <= 16 else 1
    sums = out
    if parts > 1:
        sums = torch.empty((parts, M, N), device=x.device, dtype=torch.float32)
    halves = packed.view(torch.int16)
    _halves_kernel[(tiles * parts,)](
        halves, scales, ordered, sums, M, N, groups, parts, halves.stride(0), scales.stride(0),
        CUTS=CUTS[x.dtype], ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=4,
    )  # fmt: skip
    return sums, parts


def _small_product(packed, scales, x, out):
    M, K = x.shape
    N, _ = packed.shape
    groups = triton.cdiv(K, 128)
    rows, columns, tiles, parts = _tiles(M, N, groups, x.element_size())
    sums = out
    if parts > 1:
        sums = torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    _product_kernel[(tiles * parts,)](
        packed, scales, x, sums, M, K, N, groups, parts,
        packed.stride(0), scales.stride(0), x.stride(0),
        ROWS=rows, COLUMNS=columns, num_stages=3,
    )  # fmt: skip
    return sums, parts


def ternary_matmul(packed, scales, x, out):
    M, K = x.shape
    N = packed.shape[0]
    if M * N == 0:
        return
    whole = K % 128 == 0 and packed.stride(0) % 4 == 0
    large = N * K >= LARGE and whole and x.dtype in CUTS and x.device.type != "cpu"
    product = _large_product if large else _small_product
    sums, parts = product(packed, scales, x, out)
    if parts > 1:
        _add_kernel[(triton.cdiv(M * N, 1024),)](sums, out, M * N, parts, BLOCK=1024)
