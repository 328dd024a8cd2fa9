# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Writing new keys and values to their pages in one launch: turned, quantised, or as they come.

A row is taken as two halves, d and d + ⌈D/2⌉: they are a pair of RoPE, and the two codes of a byte
of 4-bit pages. `fast_paged` has the same in torch, to be read beside it: codes and scales agree bit
for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import beside


@triton.jit
def nearest(x):
    """Rounded to an integer, halves to even: beyond 2²³ float32 has no fractions to keep."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def scale_above(exact):
    """The smallest float16 that is no smaller, so that no code clips; NaN where there is none."""
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


def append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> None:
    """Launches the kernel; nothing where there are no tokens."""
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
        TOP=largest_code(k_pages.dtype),
        num_warps=2,
        # Products are rounded before they are added, as torch does it.
        enable_fp_fusion=False,
    )


def largest_code(dtype: torch.dtype) -> int:
    """Of pages that hold codes; 0 of others."""
    return {torch.int8: 127, torch.uint8: 7, torch.float8_e4m3fn: 448}.get(dtype, 0)


def strides_of(scales: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scales is None else scales.stride()
