# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""dq in plain Triton: a program owns a tile of queries and walks the keys they see."""

import triton
import triton.language as tl

from trapline.gold.attention.dense.triton.tiles import (
    head_of,
    keys_seen,
    row_sums_of,
    rows_of,
    sees,
    span,
    turn_and_head,
    turned,
    weights_and_slopes,
)
from trapline.gold.attention.dense.triton.zero_unpacked_tokens import clear_outside


@triton.jit
def dq_step(
    sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
    T, S, window, scale, mantissa, softcap, k_s, k_d, v_s, v_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to dq."""
    keys = rows_of(k, b, g, start, S, k_s, k_d, D, BLOCK_D, BLOCK_S, TMA, not MASKED)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    values = rows_of(v, b, g, start, S, v_s, v_d, D, BLOCK_D, BLOCK_S, TMA, not MASKED)
    dweights = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
    t = top + tl.arange(0, BLOCK_T)
    s = start + tl.arange(0, BLOCK_S)
    seen = sees(t[:, None], s[None, :], T, S, window, CAUSAL, WINDOWED)
    _, slopes = weights_and_slopes(
        products, dweights, row_lse[:, None], row_delta[:, None], seen, scale, mantissa, softcap,
        CAPPED, MASKED,
    )  # fmt: skip
    return tl.dot(slopes.to(keys.dtype), keys, sum_q, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens"])
def dq_kernel(
    q, k, v, dout, sums_by_row, dq, tokens, cu_q, cu_k,
    T, S, H, R, window, scale, mantissa, power, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    dout_b, dout_h, dout_t, dout_d,
    dq_b, dq_h, dq_t, dq_d,
    row_n, row_b, row_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head; the last queries have the most to do."""
    tiles = tl.cdiv(T, BLOCK_T)
    turn, head = turn_and_head(tiles, CAUSAL)
    top = (tiles - 1 - turn) * BLOCK_T
    b, h = head // H, head % H
    g = h // R
    if PACKED:
        clear_outside(
            dq + h * dq_h, cu_q, b, tl.num_programs(0) // (tiles * H), tokens, turn, tiles,
            dq_t, dq_d, D, BLOCK_D, BLOCK_T,
        )  # fmt: skip
    q_start, T = span(cu_q, b, T, PACKED)
    k_start, S = span(cu_k, b, S, PACKED)
    if top >= T:
        return
    q = head_of(q, b, h, q_start, q_b, q_h, q_t, TMA)
    dout = head_of(dout, b, h, q_start, dout_b, dout_h, dout_t, TMA)
    k = head_of(k, b, g, k_start, k_b, k_g, k_s, TMA)
    v = head_of(v, b, g, k_start, v_b, v_g, v_s, TMA)
    dq += b * dq_b + h * dq_h + q_start * dq_t

    t = top + tl.arange(0, BLOCK_T)
    queries = rows_of(q, b, h, top, T, q_t, q_d, D, BLOCK_D, BLOCK_T, TMA)
    upstream = rows_of(dout, b, h, top, T, dout_t, dout_d, D, BLOCK_D, BLOCK_T, TMA)
    row_delta, row_lse = row_sums_of(
        sums_by_row, b, h, q_start, top, T, row_n, row_b, row_h, BLOCK_T, PACKED
    )
    sum_q = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    last = tl.minimum(top + BLOCK_T, T) - 1
    begin, clear, hidden, end = keys_seen(
        top + S - T, last + S - T, S, window, CAUSAL, WINDOWED, BLOCK_S
    )
    if WINDOWED:
        for start in range(begin, clear, BLOCK_S):
            sum_q = dq_step(
                sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
                T, S, window, scale, mantissa, softcap, k_s, k_d, v_s, v_d,
                D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=True,
            )  # fmt: skip
    for place in range(clear, hidden, BLOCK_S):
        start = place if CAUSAL else turned(place, clear, hidden, turn * BLOCK_S)
        sum_q = dq_step(
            sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
            T, S, window, scale, mantissa, softcap, k_s, k_d, v_s, v_d,
            D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=False,
        )  # fmt: skip
    if TAIL:
        for start in range(hidden, end, BLOCK_S):
            sum_q = dq_step(
                sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
                T, S, window, scale, mantissa, softcap, k_s, k_d, v_s, v_d,
                D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=True,
            )  # fmt: skip

    d = tl.arange(0, BLOCK_D)
    places = dq + t[:, None].to(tl.int64) * dq_t + d[None, :] * dq_d
    inside = (t[:, None] < T) & (d[None, :] < D)
    tl.store(places, (sum_q * power).to(dq.dtype.element_ty), mask=inside)
