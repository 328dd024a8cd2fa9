# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Codes out of the words that hold them, four at a time, as 16-bit floats.

A tile of codes is loaded as words: four 8-bit codes in 32 bits, four 4-bit codes in 16 bits. Word w
of a row then holds elements 4w … 4w + 3, or for 4 bits (2w, 2w + D/2, 2w + 1, 2w + 1 + D/2). Piece
j of a tile is the j-th code of every word: a tile of a quarter of the width. A product over the
width is the sum of four products of pieces, whatever the order of elements, so nothing is ever
moved between lanes or packed again: a word goes from shared memory to the lane that multiplies it.

Every code is exact in float16. `OWN` pieces are made by our own instructions, two words at a time:
0x6400 | n is 1024 + n for n < 1024, so a code is put under that pattern, its sign bit flipped,
which adds 8 or 128 to it, and the constant is subtracted. The upper code of a byte need not be
shifted: it counts sixteen times, and the subtraction is a multiply-add. The other pieces are what
the compiler makes of it.
"""

import triton
import triton.language as tl

INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
INT4 = tl.constexpr(3)


@triton.jit
def pieces_of(words, KIND: tl.constexpr, DTYPE: tl.constexpr, OWN: tl.constexpr):
    """The four pieces of a tile of words."""
    if OWN and tl.float16 == DTYPE:
        p0, p1, p2, p3 = own_pieces(words, KIND)
    elif KIND == FP8:
        p0, p1 = float8_at(words, 0, DTYPE), float8_at(words, 8, DTYPE)
        p2, p3 = float8_at(words, 16, DTYPE), float8_at(words, 24, DTYPE)
    elif KIND == INT8:
        p0, p1 = ((words << 24) >> 24).to(DTYPE), ((words << 16) >> 24).to(DTYPE)
        p2, p3 = ((words << 8) >> 24).to(DTYPE), (words >> 24).to(DTYPE)
    else:
        wide = words.to(tl.int32)
        p0, p1 = ((wide << 28) >> 28).to(DTYPE), ((wide << 24) >> 28).to(DTYPE)
        p2, p3 = ((wide << 20) >> 28).to(DTYPE), ((wide << 16) >> 28).to(DTYPE)
    return p0, p1, p2, p3


@triton.jit
def log2_of(x, OWN: tl.constexpr):
    """By the one instruction for it; the compiler's own is twenty, and no better for scales."""
    if OWN:
        found = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        found = tl.log2(x)
    return found


@triton.jit
def float8_at(words, BIT: tl.constexpr, DTYPE: tl.constexpr):
    byte = ((words >> BIT) & 255).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def own_pieces(words, KIND: tl.constexpr):
    if KIND == INT4:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, m, n, f, g; mov.b32 m, 0x64086408; mov.b32 n, 0x64806480;
            mov.b32 f, 0x2c002c00; mov.b32 g, 0xd480d480; shr.u32 u, $4, 8;
            lop3.b32 t, $4, 0x000f000f, m, 0x6a; sub.rn.f16x2 $0, t, m;
            lop3.b32 t, $4, 0x00f000f0, n, 0x6a; fma.rn.f16x2 $1, t, f, g;
            lop3.b32 t, u, 0x000f000f, m, 0x6a; sub.rn.f16x2 $2, t, m;
            lop3.b32 t, u, 0x00f000f0, n, 0x6a; fma.rn.f16x2 $3, t, f, g; }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif KIND == INT8:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t, m; mov.b32 m, 0x64806480;
            prmt.b32 t, $4, $5, 0x4400; lop3.b32 t, t, 0x00ff00ff, m, 0x6a;
            sub.rn.f16x2 $0, t, m;
            prmt.b32 t, $4, $5, 0x5511; lop3.b32 t, t, 0x00ff00ff, m, 0x6a;
            sub.rn.f16x2 $1, t, m;
            prmt.b32 t, $4, $5, 0x6622; lop3.b32 t, t, 0x00ff00ff, m, 0x6a;
            sub.rn.f16x2 $2, t, m;
            prmt.b32 t, $4, $5, 0x7733; lop3.b32 t, t, 0x00ff00ff, m, 0x6a;
            sub.rn.f16x2 $3, t, m; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 h, i;
            prmt.b32 t, $4, $5, 0x5140; mov.b32 {h, i}, t;
            cvt.rn.f16x2.e4m3x2 $0, h; cvt.rn.f16x2.e4m3x2 $1, i;
            prmt.b32 t, $4, $5, 0x7362; mov.b32 {h, i}, t;
            cvt.rn.f16x2.e4m3x2 $2, h; cvt.rn.f16x2.e4m3x2 $3, i; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return p0, p1, p2, p3
