# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Codes out of the words that hold them, four at a time, as 16-bit floats.

A tile of codes is loaded as words: four 8-bit codes in 32 bits, four 4-bit codes in 16 bits. Word w
of a row then holds elements 4w … 4w + 3, or for 4 bits (2w, 2w + D/2, 2w + 1, 2w + 1 + D/2). Piece
j of a tile is the j-th code of every word: a tile of a quarter of the width. A product over the
width is the sum of four products of pieces, whatever the order of elements, so nothing is ever
moved between lanes or packed again: a word goes from shared memory to the lane that multiplies it.

`OWN` pieces are made by our own instructions, two words at a time; the others are what the compiler
makes of it. Both are exact. Bit patterns: 0x4300 | n is 128 + n in bfloat16 for n < 128, and 0x6400
| n is 1024 + n in float16 for n < 1024; subtracting the constant leaves the code. Flipping a code's
sign bit first adds 8 or 128 to it, which the constant takes away again.
"""

import triton
import triton.language as tl

INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
INT4 = tl.constexpr(3)


@triton.jit
def pieces_of(words, KIND: tl.constexpr, DTYPE: tl.constexpr, OWN: tl.constexpr):
    """The four pieces of a tile of words."""
    if OWN and tl.float32 != DTYPE:
        if tl.bfloat16 == DTYPE:
            p0, p1, p2, p3 = own_bfloat16(words, KIND)
        else:
            p0, p1, p2, p3 = own_float16(words, KIND)
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
def float8_at(words, BIT: tl.constexpr, DTYPE: tl.constexpr):
    byte = ((words >> BIT) & 255).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def own_bfloat16(words, KIND: tl.constexpr):
    if KIND == INT4:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t, m; mov.b32 m, 0x43084308;
            lop3.b32 $0, $4, 0x000f000f, m, 0x6a;
            shr.u32 t, $4, 4; lop3.b32 $1, t, 0x000f000f, m, 0x6a;
            shr.u32 t, $4, 8; lop3.b32 $2, t, 0x000f000f, m, 0x6a;
            shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, m, 0x6a;
            sub.rn.bf16x2 $0, $0, m; sub.rn.bf16x2 $1, $1, m;
            sub.rn.bf16x2 $2, $2, m; sub.rn.bf16x2 $3, $3, m; }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif KIND == INT8:
        # Eight bits do not fit after 0x4300: the sign bit becomes 128 or 256, and is subtracted.
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, v, m; mov.b32 m, 0x43004300;
            prmt.b32 t, $4, $5, 0x4400; lop3.b32 u, t, 0x007f007f, m, 0xea;
            lop3.b32 v, t, 0x00800080, m, 0xea; sub.rn.bf16x2 $0, u, v;
            prmt.b32 t, $4, $5, 0x5511; lop3.b32 u, t, 0x007f007f, m, 0xea;
            lop3.b32 v, t, 0x00800080, m, 0xea; sub.rn.bf16x2 $1, u, v;
            prmt.b32 t, $4, $5, 0x6622; lop3.b32 u, t, 0x007f007f, m, 0xea;
            lop3.b32 v, t, 0x00800080, m, 0xea; sub.rn.bf16x2 $2, u, v;
            prmt.b32 t, $4, $5, 0x7733; lop3.b32 u, t, 0x007f007f, m, 0xea;
            lop3.b32 v, t, 0x00800080, m, 0xea; sub.rn.bf16x2 $3, u, v; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u; .reg .b16 h, i, x, y; .reg .f32 f, g;
            prmt.b32 t, $4, $5, 0x5140; mov.b32 {h, i}, t;
            cvt.rn.f16x2.e4m3x2 u, h; mov.b32 {x, y}, u;
            cvt.f32.f16 f, x; cvt.f32.f16 g, y; cvt.rn.bf16x2.f32 $0, g, f;
            cvt.rn.f16x2.e4m3x2 u, i; mov.b32 {x, y}, u;
            cvt.f32.f16 f, x; cvt.f32.f16 g, y; cvt.rn.bf16x2.f32 $1, g, f;
            prmt.b32 t, $4, $5, 0x7362; mov.b32 {h, i}, t;
            cvt.rn.f16x2.e4m3x2 u, h; mov.b32 {x, y}, u;
            cvt.f32.f16 f, x; cvt.f32.f16 g, y; cvt.rn.bf16x2.f32 $2, g, f;
            cvt.rn.f16x2.e4m3x2 u, i; mov.b32 {x, y}, u;
            cvt.f32.f16 f, x; cvt.f32.f16 g, y; cvt.rn.bf16x2.f32 $3, g, f; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return p0, p1, p2, p3


@triton.jit
def own_float16(words, KIND: tl.constexpr):
    if KIND == INT4:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t, m; mov.b32 m, 0x64086408;
            lop3.b32 $0, $4, 0x000f000f, m, 0x6a;
            shr.u32 t, $4, 4; lop3.b32 $1, t, 0x000f000f, m, 0x6a;
            shr.u32 t, $4, 8; lop3.b32 $2, t, 0x000f000f, m, 0x6a;
            shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, m, 0x6a;
            sub.rn.f16x2 $0, $0, m; sub.rn.f16x2 $1, $1, m;
            sub.rn.f16x2 $2, $2, m; sub.rn.f16x2 $3, $3, m; }""",
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
