# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""dk and dv in plain Triton: a program owns a tile of keys and walks the queries of its group.

The sum over the heads of a group stays in registers. Scores are formed transposed (keys by
queries), so that no accumulator is transposed afterwards: that is slow, and has been miscompiled.
"""

import triton
import triton.language as tl

from trapline.gold.attention.dense.triton.tiles import (
    head_of,
    queries_seeing,
    row_sums_of,
    rows_of,
    sees,
    span,
    turn_and_head,
    weights_and_slopes,
)
from trapline.gold.attention.dense.triton.zero_unpacked_tokens import clear_outside


@triton.jit
def dkdv_step(
    sums, keys, values, q, dout, sums_by_row, b, h, q_start, top, left,
    T, S, window, scale, mantissa, softcap, q_t, q_d, dout_t, dout_d, row_n, row_b, row_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to dk and dv; queries beyond T are rows of zeros and add 0."""
    sum_k, sum_v = sums
    t = top + tl.arange(0, BLOCK_T)
    s = left + tl.arange(0, BLOCK_S)
    queries = rows_of(q, b, h, top, T, q_t, q_d, D, BLOCK_D, BLOCK_T, TMA)
    products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    upstream = rows_of(dout, b, h, top, T, dout_t, dout_d, D, BLOCK_D, BLOCK_T, TMA)
    dweights = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
    row_delta, row_lse = row_sums_of(
        sums_by_row, b, h, q_start, top, T, row_n, row_b, row_h, BLOCK_T, PACKED
    )
    seen = sees(t[None, :], s[:, None], T, S, window, CAUSAL, WINDOWED)
    weights, slopes = weights_and_slopes(
        products, dweights, row_lse[None, :], row_delta[None, :], seen, scale, mantissa, softcap,
        CAPPED, MASKED,
    )  # fmt: skip
    sum_v = tl.dot(weights.to(upstream.dtype), upstream, sum_v, input_precision=PRECISION)
    sum_k = tl.dot(slopes.to(queries.dtype), queries, sum_k, input_precision=PRECISION)
    return sum_k, sum_v


@triton.jit(do_not_specialize=["tokens"])
def dkdv_kernel(
    q, k, v, dout, sums_by_row, dk, dv, tokens, cu_q, cu_k,
    T, S, H, R, window, scale, mantissa, power, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    dout_b, dout_h, dout_t, dout_d,
    dk_b, dk_g, dk_s, dk_d,
    row_n, row_b, row_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one key/value head; the first keys have the most to do."""
    tiles = tl.cdiv(S, BLOCK_S)
    turn, group = turn_and_head(tiles, CAUSAL)
    left = turn * BLOCK_S
    G = H // R
    b, g = group // G, group % G
    if PACKED:
        sequences = tl.num_programs(0) // (tiles * G)
        place = g * dk_g
        clear_outside(
            dk + place, cu_k, b, sequences, tokens, turn, tiles, dk_s, dk_d, D, BLOCK_D, BLOCK_S
        )
        clear_outside(
            dv + place, cu_k, b, sequences, tokens, turn, tiles, dk_s, dk_d, D, BLOCK_D, BLOCK_S
        )
    q_start, T = span(cu_q, b, T, PACKED)
    k_start, S = span(cu_k, b, S, PACKED)
    if left >= S:
        return
    k = head_of(k, b, g, k_start, k_b, k_g, k_s, TMA)
    v = head_of(v, b, g, k_start, v_b, v_g, v_s, TMA)
    keys = rows_of(k, b, g, left, S, k_s, k_d, D, BLOCK_D, BLOCK_S, TMA)
    values = rows_of(v, b, g, left, S, v_s, v_d, D, BLOCK_D, BLOCK_S, TMA)
    sums = (
        tl.zeros([BLOCK_S, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_S, BLOCK_D], tl.float32),
    )
    last = tl.minimum(left + BLOCK_S, S) - 1
    begin, clear, hidden, end = queries_seeing(
        left, last, T, S - T, window, CAUSAL, WINDOWED, BLOCK_T
    )
    for r in range(R):
        h = g * R + r
        q_head = head_of(q, b, h, q_start, q_b, q_h, q_t, TMA)
        dout_head = head_of(dout, b, h, q_start, dout_b, dout_h, dout_t, TMA)
        if CAUSAL or WINDOWED:
            for top in range(begin, clear, BLOCK_T):
                sums = dkdv_step(
                    sums, keys, values, q_head, dout_head, sums_by_row, b, h, q_start,
                    top, left, T, S, window, scale, mantissa, softcap, q_t, q_d, dout_t, dout_d,
                    row_n, row_b, row_h,
                    D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PACKED,
                    PRECISION, TMA, MASKED=True,
                )  # fmt: skip
        for top in range(clear, hidden, BLOCK_T):
            sums = dkdv_step(
                sums, keys, values, q_head, dout_head, sums_by_row, b, h, q_start,
                top, left, T, S, window, scale, mantissa, softcap, q_t, q_d, dout_t, dout_d,
                row_n, row_b, row_h,
                D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PACKED,
                PRECISION, TMA, MASKED=False,
            )  # fmt: skip
        if WINDOWED:
            for top in range(hidden, end, BLOCK_T):
                sums = dkdv_step(
                    sums, keys, values, q_head, dout_head, sums_by_row, b, h, q_start,
                    top, left, T, S, window, scale, mantissa, softcap, q_t, q_d, dout_t, dout_d,
                    row_n, row_b, row_h,
                    D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PACKED,
                    PRECISION, TMA, MASKED=True,
                )  # fmt: skip

    sum_k, sum_v = sums
    s = left + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    places = b * dk_b + g * dk_g + k_start * dk_s
    places += s[:, None].to(tl.int64) * dk_s + d[None, :] * dk_d
    inside = (s[:, None] < S) & (d[None, :] < D)
    tl.store(dk + places, (sum_k * power).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + places, sum_v.to(dv.dtype.element_ty), mask=inside)
