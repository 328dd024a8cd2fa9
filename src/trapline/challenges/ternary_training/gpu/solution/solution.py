"""Activations times ternary weights: codes are unpacked in registers, a group of 128 at a time.

The product of a group is exact up to the sum, and is scaled when it is added. A few rows of
activations leave most of the GPU idle: then the groups are shared out, and a second kernel adds
the parts in a fixed order. Large products of 16-bit activations take the codes by words, of which
two instructions make two weights.
"""

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(128)
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors
LARGE = 1 << 22
#: A code in the lowest bits of this pair of numbers, 128 or 1024, adds to them; and 1 more.
WORDS = {torch.bfloat16: (0x43004300, 129.0), torch.float16: (0x64006400, 1025.0)}


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
def _words_kernel(
    words, scales, x, out, M, N, groups, parts, words_o, scales_o, x_m,
    PAIR: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `_product_kernel`, for whole groups. A word has 16 codes; shifted by 2i, its halves have
    the codes i and i + 8 in their lowest bits."""
    program = tl.program_id(0).to(tl.int64)
    part, tile = program % parts, program // parts
    tiles = tl.cdiv(N, COLUMNS)
    columns = (tile % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tile // tiles) * ROWS + tl.arange(0, ROWS)
    there, here = columns < N, (rows < M)[:, None]
    lane = tl.arange(0, 64)
    x_tile = x + x_m * rows[:, None] + (lane // 8 * 16 + lane % 8)[None, :]
    words_tile = words + columns[:, None] * words_o + tl.arange(0, 8)[None, :]
    scales_tile = scales + scales_o * columns
    turns = (2 * tl.arange(0, 8))[None, None, :]
    share = tl.cdiv(groups, parts)
    first = part.to(tl.int32) * share
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(first, tl.minimum(first + share, groups)):
        low_values = tl.load(x_tile + group * GROUP, mask=here, other=0.0)
        high_values = tl.load(x_tile + group * GROUP + 8, mask=here, other=0.0)
        codes = tl.load(words_tile + group * 8, mask=there[:, None], other=0)
        pairs = ((codes[:, :, None] >> turns) & 0x00030003) | PAIR
        pairs = tl.reshape(pairs, [COLUMNS, 64])
        low = pairs.to(tl.int16).to(x.dtype.element_ty, bitcast=True) - ZERO
        high = (pairs >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True) - ZERO
        factor = tl.load(scales_tile + group, mask=there, other=0.0)
        product = tl.dot(low_values, tl.trans(low))
        product = tl.dot(high_values, tl.trans(high), product)
        total += product * factor.to(tl.float32)[None, :]
    at = (part * M + rows)[:, None] * N + columns[None, :]
    tl.store(out + at, total, mask=here & there[None, :])


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


def _large_tiles(M, N, groups):
    """The same where codes are taken by words; all programs of a few rows run at once."""
    if M > 16:
        return 128, 128, triton.cdiv(M, 128) * triton.cdiv(N, 128), 1
    tiles = triton.cdiv(N, 64)
    return 16, 64, tiles, max(1, min(PROGRAMS // tiles, triton.cdiv(groups, 8), 16))


def ternary_matmul(packed, scales, x, out):
    M, K = x.shape
    N = packed.shape[0]
    if M * N == 0:
        return
    groups = triton.cdiv(K, 128)
    large = N * K >= LARGE and K % 128 == 0 and packed.stride(0) % 4 == 0 and x.dtype in WORDS
    if large:
        rows, columns, tiles, parts = _large_tiles(M, N, groups)
    else:
        rows, columns, tiles, parts = _tiles(M, N, groups, x.element_size())
    sums = out
    if parts > 1:
        sums = torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    options = {"ROWS": rows, "COLUMNS": columns, "num_stages": 3}
    if large:
        # Four programs of a few rows share a multiprocessor.
        options |= {"num_warps": 8} if M > 16 else {"num_warps": 4, "maxnreg": 128}
        pair, zero = WORDS[x.dtype]
        words = packed.view(torch.int32)
        _words_kernel[(tiles * parts,)](
            words, scales, x, sums, M, N, groups, parts,
            words.stride(0), scales.stride(0), x.stride(0), PAIR=pair, ZERO=zero, **options,
        )  # fmt: skip
    else:
        _product_kernel[(tiles * parts,)](
            packed, scales, x, sums, M, K, N, groups, parts,
            packed.stride(0), scales.stride(0), x.stride(0), **options,
        )  # fmt: skip
    if parts > 1:
        _add_kernel[(triton.cdiv(M * N, 1024),)](sums, out, M * N, parts, BLOCK=1024)
