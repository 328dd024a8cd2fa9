# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Paged attention in plain Triton: what kernels can read, codes on pages, appending to pages.

A tile of codes is loaded as words: four 8-bit codes in 32 bits, four 4-bit codes in 16 bits. Word w
of a row holds elements 4w … 4w + 3, or for 4 bits (2w, 2w + D/2, 2w + 1, 2w + 1 + D/2). Piece j of
a tile is the j-th code of every word: a tile of a quarter of the width. A product over the width is
the sum of four products of pieces in any order of elements, so nothing moves between lanes: a word
goes from shared memory to the lane that multiplies it.

Every code is exact in float16. `OWN` pieces are decoded by inline instructions, two words at a
time: 0x6400 | n is 1024 + n for n < 1024, so a code is put under that pattern with its sign bit
flipped, which adds 8 or 128, and the constant is subtracted. The upper code of a byte is not
shifted: it counts sixteen times, and the subtraction is a multiply-add.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.paged import APPEND_SCHEMA, reference
from trapline.gold.device import beside, launched, on_their_device
from trapline.gold.errors import DTypeError, UnsupportedError
from trapline.gold.fallback import first_that_compiles
from trapline.gold.operators import operator, returns_nothing

MAX_WIDTH = 256

#: Kinds of pages, by dtype; all others are kind 0, numbers as they are.
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}
#: The largest code of pages that hold codes.
_LARGEST_CODES = {torch.int8: 127, torch.uint8: 7, torch.float8_e4m3fn: 448}

# --- reading codes ------------------------------------------------------------------------------

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


# --- work partition: programs take equal runs of all tiles --------------------------------------


@triton.jit
def programs_for(pairs, work, most):
    """Number of programs, at most `most`, that share the work.

    If it costs little, a number for which every run ends with a pair of sequence and head when all
    lengths are equal: then nothing is split, and no program starts a pair in its middle.
    """
    some = tl.maximum(pairs, 1)
    even = tl.where(some >= most, tl.cdiv(some, tl.cdiv(some, most)), most // some * some)
    return tl.minimum(tl.where(4 * even >= 3 * most, even, most), work)


@triton.jit
def share_before(pid, work, programs):
    """⌊pid · work / programs⌋ without a product that leaves 32 bits."""
    return pid * (work // programs) + pid * (work % programs) // programs


@triton.jit
def owner_of(unit, work, programs, NARROW: tl.constexpr):
    """The program whose share contains this unit of work."""
    if NARROW:
        owner = ((unit + 1) * programs - 1) // work
    else:
        owner = (((unit + 1).to(tl.int64) * programs - 1) // work).to(tl.int32)
    return owner


# --- appending: new keys and values are written to their pages in one launch --------------------
#
# A row is read as two halves, d and d + ⌈D/2⌉: they are a pair of RoPE, and the two codes of a byte
# of 4-bit pages. `paged.reference` has the same in torch; codes and scales agree bit for bit.


@triton.jit
def nearest(x):
    """Rounded to an integer, halves to even: beyond 2²³ float32 has no fractions to keep."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def scale_above(exact):
    """The smallest float16 not below `exact`, so that no code clips; NaN if there is none."""
    half = exact.to(tl.float16)
    above = (half.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    rounded = tl.where(half.to(tl.float32) < exact, above, half)
    return tl.where(exact <= 65504.0, rounded, float("nan"))


@triton.jit
def store_rows(
    rows, pages, scales, cosine, sine, token, page, place, G, rows_token, rows_head, turn_token,
    page_page, page_head, page_place, scale_page, scale_head, scale_place,
    D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """A block of heads of one token. TOP is the largest code; 0 where rows stay as they are."""
    HALF: tl.constexpr = (D + 1) // 2
    # 64 bits: a head's pages may lie together, far from the next head's.
    g = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    here = (g < G)[:, None] & (d < HALF)[None, :]
    there = here & (d < D - HALF)[None, :]
    source = rows + token * rows_token + g[:, None] * rows_head + d[None, :]
    low = tl.load(source, mask=here, other=0.0)
    high = tl.load(source + HALF, mask=there, other=0.0)
    if cosine is not None:
        cos = tl.load(cosine + token * turn_token + d, mask=d < HALF, other=0.0).to(tl.float32)
        sin = tl.load(sine + token * turn_token + d, mask=d < HALF, other=0.0).to(tl.float32)
        left, right = low.to(tl.float32), high.to(tl.float32)
        # Rounded to the rows' dtype, as if they had been stored between.
        low = (left * cos[None, :] - right * sin[None, :]).to(rows.dtype.element_ty)
        high = (right * cos[None, :] + left * sin[None, :]).to(rows.dtype.element_ty)
    target = pages + page * page_page + g[:, None] * page_head + place * page_place + d[None, :]
    if TOP == 0:
        tl.store(target, low, mask=here)
        tl.store(target + HALF, high, mask=there)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        # A maximum passes NaN by, a sum does not; rows that overflow a sum have no scale either.
        largest += 0.0 * (tl.sum(low, 1) + tl.sum(high, 1))
        scale = scale_above(tl.div_rn(largest, tl.full([BLOCK_G], TOP, tl.float32)))
        scale_target = scales + page * scale_page + g * scale_head + place * scale_place
        tl.store(scale_target, scale, mask=g < G)
        divisor = tl.where(largest == 0.0, 1.0, scale.to(tl.float32))[:, None]
        # Divided as IEEE says, as torch does: the compiler's own division may be off by a bit.
        divisor = tl.broadcast_to(divisor, [BLOCK_G, BLOCK_D])
        low, high = tl.div_rn(low, divisor), tl.div_rn(high, divisor)
        if TOP == 448:
            tl.store(target, low.to(pages.dtype.element_ty), mask=here)
            tl.store(target + HALF, high.to(pages.dtype.element_ty), mask=there)
        elif TOP == 127:
            tl.store(target, nearest(low).to(tl.int8), mask=here)
            tl.store(target + HALF, nearest(high).to(tl.int8), mask=there)
        else:
            codes = (nearest(low).to(tl.int32) & 15) | ((nearest(high).to(tl.int32) & 15) << 4)
            tl.store(target, codes.to(tl.uint8), mask=here)


@launched
@triton.jit
def append_kernel(
    k, v, k_pages, v_pages, k_scale, v_scale, slots, cosine, sine, G,
    k_token, k_head, v_token, v_head, turn_token,
    k_page, k_page_head, k_place, v_page, v_page_head, v_place,
    ks_page, ks_head, ks_place, vs_page, vs_head, vs_place,
    P: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """One token; keys and values are the two programs of the last axis."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    page, place = slot // P, slot % P
    if tl.program_id(2) == 0:
        store_rows(
            k, k_pages, k_scale, cosine, sine, token, page, place, G, k_token, k_head, turn_token,
            k_page, k_page_head, k_place, ks_page, ks_head, ks_place, D, BLOCK_G, BLOCK_D, TOP,
        )  # fmt: skip
    else:
        store_rows(
            v, v_pages, v_scale, None, None, token, page, place, G, v_token, v_head, turn_token,
            v_page, v_page_head, v_place, vs_page, vs_head, vs_place, D, BLOCK_G, BLOCK_D, TOP,
        )  # fmt: skip


def append(*arguments: Any) -> None:
    """Launch the kernel, unless there are no tokens. The arguments are those of the schema."""
    k, v, k_pages, v_pages, slots, k_scale, v_scale, cosine, sine = arguments
    tokens, G, D = k.shape
    if not tokens:
        return
    if cosine is not None and sine is not None:
        # Rows of angles are read by one stride: they may be any view, but the same one.
        cosine, sine = cosine.contiguous(), sine.contiguous()
    slots = beside(slots)
    block = min(8, triton.next_power_of_2(G))
    append_kernel[(tokens, cdiv(G, block), 2)](
        *(k, v, k_pages, v_pages, k_scale, v_scale, slots, cosine, sine, G),
        *(*k.stride()[:2], *v.stride()[:2], 0 if cosine is None else cosine.stride(0)),
        *(*k_pages.stride()[:3], *v_pages.stride()[:3]),
        *(*strides_of(k_scale), *strides_of(v_scale)),
        P=k_pages.shape[2],
        D=D,
        BLOCK_G=block,
        BLOCK_D=triton.next_power_of_2((D + 1) // 2),
        TOP=_LARGEST_CODES.get(k_pages.dtype, 0),
        num_warps=2,
        # Products are rounded before they are added, as torch does it.
        enable_fp_fusion=False,
    )


def in_words(pages: Tensor, kind: int) -> Tensor:
    """Pages of codes as words of four; others unchanged."""
    if not kind:
        return pages
    word = torch.int16 if kind == 3 else torch.int32
    return pages.view(torch.uint8).view(word)


def in_eights(tree: Tensor) -> Tensor:
    """A mask of bytes as words of eight: the first word of every row.

    The kernel ignores what it reads beyond the mask in the last word of a row.
    """
    rows, columns = tree.shape
    if columns < 8 or tree.stride(1) != 1 or tree.stride(0) % 8 or tree.data_ptr() % 8:
        room = tree.new_empty((rows, cdiv(columns, 8) * 8))
        room[:, :columns] = tree
        tree = room
    return tree[:, :8].view(torch.int64)


def strides_of(scales: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scales is None else scales.stride()


def supports(q: Tensor, *pages: Tensor) -> str | None:
    """None, or the reason why the kernels cannot read these tensors."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{q.dtype} (float16, bfloat16 and float32 are supported)"
    if not 1 <= q.shape[-1] <= MAX_WIDTH:
        return f"heads {q.shape[-1]} wide (1 to {MAX_WIDTH} are supported)"
    if any(x.stride(-1) != 1 for x in (q, *pages)):
        return "heads whose elements are not adjacent in memory"
    for x in pages:
        size = {torch.uint8: 2}.get(x.dtype, 4)
        if x.dtype in KINDS and any(n % size for n in (x.shape[-1], *x.stride()[:-1])):
            return (
                f"rows of {q.shape[-1]} codes with strides {x.stride()}: codes are read four at a "
                f"time, so both must be multiples of {size} bytes"
            )
    return None


def require(q: Tensor, *pages: Tensor) -> None:
    """An error if the kernels cannot read these tensors."""
    reason = supports(q, *pages)
    if reason is not None:
        kind = DTypeError if reason.startswith("torch.") else UnsupportedError
        raise kind(f"the paged kernels do not support {reason}; use impl='torch'")


@operator("trapline_paged_kernels", APPEND_SCHEMA, returns_nothing)
@on_their_device
def append_operator(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, *others: Any) -> None:
    """Write tokens to their slots, in place."""
    require_gpu(k)
    for rows, pages in ((k, k_pages), (v, v_pages)):
        require(rows)
        if pages.stride(-1) != 1:
            raise UnsupportedError(
                f"the paged kernels need pages whose rows are contiguous, got strides "
                f"{pages.stride()}; use impl='torch'"
            )
    given = k, v, k_pages, v_pages, *others
    tiers = {"triton": partial(append, *given), "torch": partial(reference.append, *given)}
    first_that_compiles("paged append", tiers)


def require_gpu(x: Tensor) -> None:
    if not (x.is_cuda or triton.knobs.runtime.interpret):
        raise UnsupportedError(
            f"impl='kernels' needs CUDA tensors, got tensors on {x.device}; use impl='torch'"
        )
