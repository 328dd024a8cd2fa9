# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Softmax in the registers of a warpgroup, between two products of the tensor cores (Gluon).

A tile of scores is 64 queries tall. The tensor cores leave a row of it in four neighbouring lanes,
and take the weights back in the same places: nothing here moves between threads but each row's
peak.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Queries of one warpgroup: what one tensor-core instruction takes.
ROWS = gl.constexpr(64)


@gluon.jit
def masked(scores, row, start, T, S, CAUSAL: gl.constexpr):
    """−inf where a query (from `row` on) does not see a key (from `start` on)."""
    BLOCK_S: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = scores.type.layout
    t = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    end = gl.minimum(t + (S - T + 1), S) if CAUSAL else t * 0 + S
    s = gl.arange(0, BLOCK_S, layout=gl.SliceLayout(0, layout))
    seen = gl.expand_dims(s, 0) < gl.expand_dims(end - start, 1)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def weigh(scores, peak, total, scale, MASKED: gl.constexpr, FIRST: gl.constexpr):
    """One step of the online softmax: weights, peak, total and what earlier sums shrink by.

    A row's scores lie in four lanes. The peak is needed by all of them at once; the total is kept
    in eight parts a row, two a lane, and added up only at the end. Reducing over the middle of a
    reshaped tile gives the arithmetic units independent chains instead of one long one.
    """
    BLOCK_S: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = scores.type.layout
    highest = gl.max(gl.max(gl.max(scores.reshape([ROWS, 2, BLOCK_S // 16, 8]), 2), 1), 1)
    highest = gl.convert_layout(highest, gl.SliceLayout(1, layout), assert_trivial=True)
    if not FIRST:
        highest = gl.maximum(peak, highest)
    origin = highest * scale
    if MASKED:
        # A row that has seen no key stays at −inf, and −inf − (−inf) is not a number.
        origin = gl.where(highest == float("-inf"), 0.0, origin)
    weights = gl.exp2(scores * scale - gl.expand_dims(origin, 1))
    parts = gl.sum(weights.reshape([ROWS, BLOCK_S // 8, 8]), 1)
    shrink = origin
    if not FIRST:
        shrink = gl.exp2(peak * scale - origin)
        across: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        parts += total * gl.expand_dims(gl.convert_layout(shrink, across, assert_trivial=True), 1)
    return weights, highest, parts, shrink


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Two 16-bit weights in each 32-bit register, the way the tensor cores take them.

    As 16-bit values the compiler would take every pair apart and put it together again in each
    turn of the loop.
    """
    low, high = gl.split(weights.reshape([ROWS, weights.shape[1] // 2, 2]))
    kind: gl.constexpr = "f16" if dtype == gl.float16 else "bf16"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{kind}x2.f32 $0, $2, $1;",
        "=r,r,r",
        [low, high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """The same registers as a left operand of a product with accumulators of this layout."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [pairs],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    weights = gl.join(low, high).reshape([ROWS, pairs.shape[1] * 2]).to(dtype, bitcast=True)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
