# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the backward's Gluon kernels share: how programs are dealt, and what Gluon lacks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Keys, or queries, of one warpgroup: what one tensor-core instruction takes.
ROWS = gl.constexpr(64)


@gluon.jit
def dealt(tiles, groups, bunch):
    """This program's group and tile: tile 0 of each group of a bunch, then tile 1, and so on.

    Tiles are numbered from the one with the most work, so what is left at the end is short; and
    groups that are worked on together find each other's data in the L2 cache.
    """
    pid = gl.program_id(0)
    start = pid // (bunch * tiles) * bunch
    inside = pid % (bunch * tiles)
    wide = gl.minimum(bunch, groups - start)
    return start + inside % wide, inside // wide


@gluon.jit
def exp2(x):
    """2^x by the hardware's own instruction: numbers below 2^-126 become 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
