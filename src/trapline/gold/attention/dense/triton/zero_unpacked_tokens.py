# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Packed tokens that belong to no sequence: attention gives 0 for them, and so do its gradients.

How many there are is known on the device alone. So those programs clear them that compute the first
and the last sequence, each its share of the rows; where the boundaries hold every token there are
none, and a program has read one number too many.
"""

import triton
import triton.language as tl


@triton.jit
def clear_outside(
    x, cu, b, sequences, tokens, turn, tiles, by_row, by_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows of one head's matrix before the first sequence and after the last."""
    if b == 0:
        clear_rows(x, 0, tl.load(cu), turn, tiles, by_row, by_d, D, BLOCK_D, BLOCK)
    if b == sequences - 1:
        end = tl.load(cu + sequences)
        clear_rows(x, end, tokens, turn, tiles, by_row, by_d, D, BLOCK_D, BLOCK)


@triton.jit
def clear_rows(
    x, begin, end, turn, tiles, by_row, by_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `tiles`-th block of the rows begin … end, from block `turn` on."""
    for top in range(begin + turn * BLOCK, end, tiles * BLOCK):
        row = top + tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        places = x + row[:, None].to(tl.int64) * by_row + d[None, :] * by_d
        nothing = tl.zeros([BLOCK, BLOCK_D], x.dtype.element_ty)
        tl.store(places, nothing, mask=(row[:, None] < end) & (d[None, :] < D))
