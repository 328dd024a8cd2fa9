# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The first two steps of a draft: new context and block side by side.

Both the tokens committed last and the block must be fused or embedded and then projected before the
drafter's first attention, independently of each other. Separately these are four dependent
launches; here some programs of a launch serve the context and the others the block.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.decoder.triton.step_linear import (
    load_square_sums,
    matmul_tile,
    prefetch_rows,
    rms_factor,
)
from trapline.gold.device import launched


@launched
@triton.jit
def begin_kernel(
    features, w, gain, context, sums,  # (lines, K) times (N, K) gives context (lines, N)
    ids, table, weight, x, y, squares,  # the block's stream (M, N), as `embed_kernel` leaves it
    lines, N, K, features_row, w_row, tiles, programs,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `programs` fuse features and their square sums; the others embed the block."""
    number = tl.program_id(0)
    if number < programs:
        tile = number % tiles
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        b = number // tiles * BLOCK_B + tl.arange(0, BLOCK_B)
        scale = tl.load(gain + n, mask=n < N, other=0.0)
        if PDL:
            prefetch_rows(w, n, N, K, w_row, AHEAD)
            gdc_wait()
            gdc_launch_dependents()
        total = matmul_tile(
            features, w, b, n, lines, N, K, features_row, w_row,
            BLOCK_B, BLOCK_N, BLOCK_K, SPLIT, EVEN, PRECISION,
        )  # fmt: skip
        inside = (n < N)[:, None] & (b < lines)[None, :]
        fused = tl.where(inside, total.to(context.dtype.element_ty).to(tl.float32), 0.0)
        scaled = fused * scale.to(tl.float32)[:, None]
        at = b.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(context + at, scaled.to(context.dtype.element_ty), mask=inside)
        tl.store(sums + tile * lines + b, tl.sum(fused * fused, 0), mask=b < lines)
    else:
        row = (number - programs).to(tl.int64)
        c = tl.arange(0, BLOCK)
        factor = tl.load(weight + c, mask=c < N, other=0.0)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        token = tl.load(ids + row)
        found = tl.load(table + token * N + c, mask=c < N, other=0.0)
        tl.store(x + row * N + c, found, mask=c < N)
        wide = found.to(tl.float32)
        tl.store(y + row * N + c, (wide * factor.to(tl.float32)).to(y.dtype.element_ty), mask=c < N)
        tl.store(squares + row, tl.sum(wide * wide, 0))


@triton.jit
def normed_product(
    number, x, w, squares, out, lines, N, K, tiles, count, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tile `number` of a product of normed x; rows of x, w and out are contiguous."""
    n = number % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    b = number // tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w, n, N, K, K, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    sums = load_square_sums(squares, b, lines, count, PARTS)
    total = matmul_tile(
        x, w, b, n, lines, N, K, K, K, BLOCK_B, BLOCK_N, BLOCK_K, SPLIT, EVEN, PRECISION
    )
    total *= rms_factor(sums, K, eps)
    inside = (n < N)[:, None] & (b < lines)[None, :]
    places = out + b.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def project_kernel(
    context, context_w, context_sums, fresh, fresh_lines, fresh_N, fresh_tiles, count,
    y, w, squares, qkv, lines, N, tiles,
    K, programs, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Keys and values of new context for all layers; q, k, v of the block for the first."""
    number = tl.program_id(0)
    if number < programs:
        normed_product(
            number, context, context_w, context_sums, fresh, fresh_lines, fresh_N, K, fresh_tiles,
            count, eps, BLOCK_B, BLOCK_N, BLOCK_K, SPLIT, PARTS, EVEN, AHEAD, PRECISION, PDL,
        )  # fmt: skip
    else:
        normed_product(
            number - programs, y, w, squares, qkv, lines, N, K, tiles,
            1, eps, BLOCK_B, BLOCK_N, BLOCK_K, SPLIT, 1, EVEN, AHEAD, PRECISION, PDL,
        )  # fmt: skip
