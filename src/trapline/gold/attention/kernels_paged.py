# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages in Triton, and appending to them.

Decoding reads every key and value once and computes little, so the keys of a sequence are split
over as many programs as fill the chip; a second kernel merges their parts by log-sum-exp. A program
serves all query heads of one key/value head, and all queries of a tile: row r = t · R + head. Codes
are never multiplied by their scale one by one: the key's scale goes to its column of scores, the
value's to its column of weights. Nothing beyond a sequence's length is loaded, so whatever lies
there cannot leak. Offsets are 64-bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.attention import fast_paged
from trapline.gold.attention.kernels_tiles import LN_2, LOG2_E, scored
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.kernels_device import processors

KERNELS = "trapline_paged_kernels"
WIDEST = 256


@triton.jit
def queries_of(cu_q, b, max_q, PACKED: tl.constexpr):
    """The first query of sequence b, and how many there are."""
    begin = b * max_q
    count = max_q
    if PACKED:
        begin = tl.load(cu_q + b)
        count = tl.load(cu_q + b + 1) - begin
    return begin, count


@triton.jit
def codes_of(byte, HIGH: tl.constexpr):
    """The 4-bit codes of a tile of bytes, low or high halves, as −8 … 7."""
    nibble = (byte >> 4) if HIGH else (byte & 15)
    return (nibble ^ 8).to(tl.int8) - 8


@triton.jit
def products_of(low, high, keys, HALVED: tl.constexpr, PRECISION: tl.constexpr):
    """Queries times keys, whose elements are as wide as the queries' or codes."""
    if HALVED:
        products = tl.dot(low, tl.trans(codes_of(keys, False).to(low.dtype)))
        products += tl.dot(high, tl.trans(codes_of(keys, True).to(low.dtype)))
    else:
        products = tl.dot(low, tl.trans(keys.to(low.dtype)), input_precision=PRECISION)
    return products


@triton.jit
def scales_at(scales, page, g, place, inside, by_page, by_head, by_place):
    """The scales of a tile of positions, in float32."""
    at = page * by_page + g * by_head + place * by_place
    return tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def seen_by(position, s, inside, live, row, first, tree, tree_row, window, WINDOWED: tl.constexpr):
    """Which positions s each query sees: what came before it, or what the tree names."""
    if tree is not None:
        fresh = s - first
        asked = live[:, None] & inside[None, :] & (fresh[None, :] >= 0)
        named = tl.load(tree + row[:, None] * tree_row + fresh[None, :], mask=asked, other=0)
        seen = inside[None, :] & ((fresh[None, :] < 0) | (named != 0))
    else:
        seen = inside[None, :] & (s[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (position[:, None] - s[None, :] < window)
    return seen


@triton.jit
def attention_kernel(
    q, k_pages, v_pages, k_scale, v_scale, block_table, seq_lens, cu_q, tree, out, lse,
    max_q, G, R, window, scale, softcap, splits, queries,
    q_row, q_head, table_row, tree_row,
    k_page, k_head, k_place, v_page, v_head, v_place,
    ks_page, ks_head, ks_place, vs_page, vs_head, vs_place,
    out_split, out_row, out_head,
    P: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    PACKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one key/value head of one sequence, over one split of its keys.

    HALF is the number of elements a stored row has columns for: D, or D/2 when a byte holds two.
    """
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    split = tl.program_id(2)
    begin_q, new = queries_of(cu_q, b, max_q, PACKED)
    top = tl.program_id(1) * BLOCK_M
    if top >= new * R:
        return
    length = tl.load(seq_lens + b)
    first = length - new  # where the first query stands

    r = top + tl.arange(0, BLOCK_M)
    t = r // R
    live = t < new
    row = (begin_q + t).to(tl.int64)
    head = g * R + r % R
    d = tl.arange(0, BLOCK_D)
    wide = d < HALF
    places = q + row[:, None] * q_row + head[:, None] * q_head + d[None, :]
    low = tl.load(places, mask=live[:, None] & wide[None, :], other=0.0)
    high = low
    if HALF < D:
        high = tl.load(places + HALF, mask=live[:, None] & wide[None, :], other=0.0)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weighted_high = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    chunk = tl.cdiv(tl.cdiv(length, splits), BLOCK_S) * BLOCK_S
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    if WINDOWED:
        oldest = tl.maximum(first + top // R - window + 1, 0)
        begin = tl.maximum(begin, oldest // BLOCK_S * BLOCK_S)
    for start in range(begin, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        inside = s < end
        page = tl.load(block_table + b * table_row + s // P, mask=inside, other=0).to(tl.int64)
        place = s % P
        stored = inside[:, None] & wide[None, :]
        k_places = k_pages + (page * k_page + g * k_head + place * k_place)[:, None] + d[None, :]
        v_places = v_pages + (page * v_page + g * v_head + place * v_place)[:, None] + d[None, :]
        keys = tl.load(k_places, mask=stored, other=0.0)
        values = tl.load(v_places, mask=stored, other=0.0)
        products = products_of(low, high, keys, HALF < D, PRECISION)
        if k_scale is not None:
            products *= scales_at(
                k_scale, page, g, place, inside, ks_page, ks_head, ks_place
            )[None, :]  # fmt: skip
        scores = scored(products, scale, softcap, CAPPED) * LOG2_E
        seen = seen_by(first + t, s, inside, live, row, first, tree, tree_row, window, WINDOWED)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key stays at −inf, and −inf − (−inf) is not a number.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - origin[:, None])
        correction = tl.exp2(peak - origin)
        total = total * correction + tl.sum(weights, 1)
        if v_scale is not None:
            weights *= scales_at(
                v_scale, page, g, place, inside, vs_page, vs_head, vs_place
            )[None, :]  # fmt: skip
        weighted = weighted * correction[:, None]
        rounded = weights.to(low.dtype)
        if HALF < D:
            weighted += tl.dot(rounded, codes_of(values, False).to(low.dtype))
            weighted_high = weighted_high * correction[:, None]
            weighted_high += tl.dot(rounded, codes_of(values, True).to(low.dtype))
        else:
            weighted += tl.dot(rounded, values.to(low.dtype), input_precision=PRECISION)
        peak = new_peak

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    places = (
        out + split * out_split + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
    )
    written = live[:, None] & wide[None, :]
    tl.store(places, (weighted / total[:, None]).to(out.dtype.element_ty), mask=written)
    if HALF < D:
        answer = (weighted_high / total[:, None]).to(out.dtype.element_ty)
        tl.store(places + HALF, answer, mask=written)
    if lse is not None:
        natural = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
        tl.store(lse + (split * queries + row) * (G * R) + head, natural, mask=live)


@triton.jit
def merge_kernel(
    parts, lse, out, splits, queries, H, out_row, out_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one query: its splits weighed by their share of the softmax sum."""
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    split = tl.arange(0, BLOCK_SPLITS)
    at = (split.to(tl.int64) * queries + row) * H + head
    logs = tl.load(lse + at, mask=split < splits, other=float("-inf"))
    peak = tl.max(logs, 0)
    shares = tl.exp2((logs - tl.where(peak == float("-inf"), 0.0, peak)) * LOG2_E)
    total = tl.sum(shares, 0)
    shares = shares / tl.where(total == 0.0, 1.0, total)
    d = tl.arange(0, BLOCK_D)
    inside = (split[:, None] < splits) & (d[None, :] < D)
    rows = tl.load(parts + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    answer = tl.sum(rows * shares[:, None], 0).to(out.dtype.element_ty)
    tl.store(out + row * out_row + head * out_head + d, answer, mask=d < D)


@triton.jit
def nearest(x):
    """Rounded to an integer, halves to even: beyond 2²³ float32 has no fractions to keep."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def scale_above(exact):
    """The smallest float16 that is no smaller: the largest code never clips."""
    half = exact.to(tl.float16)
    above = (half.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    return tl.where(half.to(tl.float32) < exact, above, half)


@triton.jit
def append_kernel(
    rows, pages, scales, slots, G, rows_token, rows_head,
    page_page, page_head, page_place, scale_page, scale_head, scale_place,
    P: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """One head of one token. TOP is the largest code; 0 where rows are stored as they come."""
    token = (tl.program_id(0) // G).to(tl.int64)
    g = tl.program_id(0) % G
    slot = tl.load(slots + token)
    if slot < 0:
        return
    page, place = slot // P, slot % P
    d = tl.arange(0, BLOCK_D)
    source = rows + token * rows_token + g * rows_head + d
    target = pages + page * page_page + g * page_head + place * page_place + d
    low = tl.load(source, mask=d < HALF, other=0.0)
    if TOP == 0:
        tl.store(target, low, mask=d < HALF)
    else:
        low = low.to(tl.float32)
        high = tl.load(source + HALF, mask=(d < HALF) & (d < D - HALF), other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0))
        scale = scale_above(largest / TOP)
        tl.store(scales + page * scale_page + g * scale_head + place * scale_place, scale)
        divisor = tl.where(largest == 0.0, 1.0, scale.to(tl.float32))
        if TOP == 448:
            codes = (low / divisor).to(pages.dtype.element_ty)
        elif HALF == D:
            codes = nearest(low / divisor).to(tl.int8)
        else:
            low_codes = nearest(low / divisor).to(tl.int32) & 15
            high_codes = nearest(high / divisor).to(tl.int32) & 15
            codes = (low_codes | (high_codes << 4)).to(tl.uint8)
        tl.store(target, codes, mask=d < HALF)


def splits_for(programs: int, processors: int, positions: int, block: int) -> int:
    """As many as fill the chip twice over, and no more than there are tiles of keys."""
    tiles = -(-positions // block)
    return max(1, min(2 * processors // max(programs, 1), tiles, 64))


def _attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor | None,
    max_q: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
    out: Tensor,
) -> None:
    require(q, k_pages, v_pages)
    (queries, H, D), (_, G, P, half) = q.shape, k_pages.shape
    B, R = len(seq_lens), H // G
    if not queries:
        return
    block_m = min(64, max(16, triton.next_power_of_2(R * max_q)))
    block_s = 64 if half <= 128 else 32
    tiles = triton.cdiv(R * max_q, block_m)
    positions = block_table.shape[1] * P
    splits = splits_for(B * G * tiles, processors(q), positions, block_s)
    parts, lse = out, None
    if splits > 1:
        parts = q.new_empty((splits, queries, H, D), dtype=torch.float32)
        lse = q.new_empty((splits, queries, H), dtype=torch.float32)
    attention_kernel[(B * G, tiles, splits)](
        *(q, k_pages, v_pages, k_scale, v_scale, block_table, seq_lens, cu_q, tree_mask),
        *(parts, lse, max_q, G, R, window, scale, softcap, splits, queries),
        *(q.stride(0), q.stride(1), block_table.stride(0)),
        0 if tree_mask is None else tree_mask.stride(0),
        *(*k_pages.stride()[:3], *v_pages.stride()[:3]),
        *(*strides_of(k_scale), *strides_of(v_scale)),
        *((0, *out.stride()[:2]) if splits == 1 else parts.stride()[:3]),
        P=P,
        D=D,
        HALF=half,
        BLOCK_D=max(16, triton.next_power_of_2(half)),
        BLOCK_M=block_m,
        BLOCK_S=block_s,
        PACKED=cu_q is not None,
        WINDOWED=window > 0,
        CAPPED=softcap > 0.0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
    )
    if lse is not None:
        merge_kernel[(queries * H,)](
            *(parts, lse, out, splits, queries, H, *out.stride()[:2]),
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            BLOCK_SPLITS=triton.next_power_of_2(splits),
        )


def _append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    tokens, G, D = k.shape
    for rows, pages, scales in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        require(rows, pages)
        half = pages.shape[-1]
        if tokens:
            append_kernel[(tokens * G,)](
                *(rows, pages, scales, slots, G, *rows.stride()[:2]),
                *(*pages.stride()[:3], *strides_of(scales)),
                P=pages.shape[2],
                D=D,
                HALF=half,
                BLOCK_D=triton.next_power_of_2(half),
                TOP=largest_code(pages.dtype),
                num_warps=1,
            )


def largest_code(dtype: torch.dtype) -> int:
    """Of pages that hold codes; 0 of others."""
    return {torch.int8: 127, torch.uint8: 7, torch.float8_e4m3fn: 448}.get(dtype, 0)


def strides_of(scales: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scales is None else scales.stride()


def require(q: Tensor, *others: Tensor) -> None:
    """What the kernels take."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {q.dtype}")
    if not 1 <= q.shape[-1] <= WIDEST:
        raise RangeError(f"the kernels take heads up to {WIDEST} wide, not {q.shape[-1]}")
    if any(x.stride(-1) != 1 for x in (q, *others)):
        raise RangeError("the kernels need the elements of a head beside each other")


_LIBRARY: Any = fast_paged.define(KERNELS)
_LIBRARY.impl("attention", _attention, "CUDA")
_LIBRARY.impl("append", _append, "CUDA")
