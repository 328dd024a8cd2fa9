# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's backward pass in plain Triton: every gradient has one owner, so it is repeatable.

`row_dots_kernel` makes δ = rowsum(dout · out) − dlse. `dkdv_kernel` owns a tile of keys and walks
the queries of all heads of the group, so the sum over the group stays in registers; it works on
transposed scores (keys by queries), formed as such and never transposed afterwards. `dq_kernel`
owns a tile of queries and walks the keys. No atomics, no buffer for dq. Read them beside
`oracle.attention_backward_tiled`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.attention.kernels_fwd import (
    LOG2_E,
    Layout,
    block_sizes,
    dense,
    empty_like,
    key_range,
    packed,
    require,
    rows_of,
    rule_flags,
    scored,
    sees,
    span,
)


@triton.jit
def row_dots_kernel(
    dout, out, dlse, delta, rows, H, T,
    dout_b, dout_h, dout_t, dout_d,
    out_b, out_h, out_t, out_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """delta[row] = dout · out − dlse, for rows numbered through (B, H, T)."""
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    b, h, t = row // T // H, row // T % H, row % T
    d = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < rows) & (d[None, :] < D)
    place = (b * dout_b + h * dout_h + t * dout_t)[:, None] + d[None, :] * dout_d
    left = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    place = (b * out_b + h * out_h + t * out_t)[:, None] + d[None, :] * out_d
    right = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(dlse + row, mask=row < rows, other=0.0)
    tl.store(delta + row, tl.sum(left * right, 1) - given, mask=row < rows)


@triton.jit
def weights_and_slopes(products, dweights, lse, delta, seen, scale, softcap, CAPPED: tl.constexpr):
    """Softmax weights of a tile, and the gradient of its scaled dot products, in either order."""
    scores = scored(products, scale, softcap, CAPPED)
    # A row without keys has lse −inf, and nothing in it is seen: any finite stand-in gives 0.
    finite = tl.where(lse == float("-inf"), 0.0, lse)
    weights = tl.exp2(tl.where(seen, (scores - finite) * LOG2_E, float("-inf")))
    slopes = weights * (dweights - delta)
    if CAPPED:
        slopes = slopes * (1.0 - (scores / softcap) * (scores / softcap))
    return weights, slopes


@triton.jit
def dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, cu_q, cu_k,
    T, S, H, R, window, scale, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    dout_b, dout_h, dout_t, dout_d,
    dk_b, dk_g, dk_s, dk_d,
    lse_b, lse_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one key/value head."""
    tiles = tl.cdiv(S, BLOCK_S)
    left = (tl.program_id(0) % tiles) * BLOCK_S
    group = (tl.program_id(0) // tiles).to(tl.int64)
    G = H // R
    b, g = group // G, group % G
    q_start, T = span(cu_q, b, T, PACKED)
    k_start, S = span(cu_k, b, S, PACKED)
    if left >= S:
        return
    k += b * k_b + g * k_g + k_start * k_s
    v += b * v_b + g * v_g + k_start * v_s
    dk += b * dk_b + g * dk_g + k_start * dk_s
    dv += b * dk_b + g * dk_g + k_start * dk_s

    s = left + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    keys = rows_of(k, s, k_s, d, k_d, S, D)
    values = rows_of(v, s, v_s, d, v_d, S, D)
    sum_k = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    sum_v = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    # Seen from the keys, the past is the future: queries from the first that sees this tile on.
    begin = 0
    end = T
    if CAUSAL:
        begin = tl.maximum(begin, left - S + T)
    if WINDOWED:
        begin = tl.maximum(begin, left - window + 1 - S + T)
        end = tl.minimum(end, tl.minimum(left + BLOCK_S, S) - 1 + window - S + T)
    for h in range(g * R, g * R + R):
        q_head = q + b * q_b + h * q_h + q_start * q_t
        dout_head = dout + b * dout_b + h * dout_h + q_start * dout_t
        row = b * lse_b + h * lse_h + q_start
        for top in range(begin, end, BLOCK_T):
            t = top + tl.arange(0, BLOCK_T)
            queries = rows_of(q_head, t, q_t, d, q_d, T, D)
            upstream = rows_of(dout_head, t, dout_t, d, dout_d, T, D)
            row_lse = tl.load(lse + row + t, mask=t < T, other=float("-inf"))
            row_delta = tl.load(delta + row + t, mask=t < T, other=0.0)
            products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            dweights = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
            seen = sees(t[None, :], s[:, None], T, S, window, CAUSAL, WINDOWED)
            weights, slopes = weights_and_slopes(
                products,
                dweights,
                row_lse[None, :],
                row_delta[None, :],
                seen,
                scale,
                softcap,
                CAPPED,
            )
            sum_v += tl.dot(weights.to(upstream.dtype), upstream, input_precision=PRECISION)
            sum_k += tl.dot(slopes.to(queries.dtype), queries, input_precision=PRECISION)

    places = s[:, None].to(tl.int64) * dk_s + d[None, :] * dk_d
    inside = (s[:, None] < S) & (d[None, :] < D)
    tl.store(dk + places, (sum_k * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + places, sum_v.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def dq_kernel(
    q, k, v, dout, lse, delta, dq, cu_q, cu_k,
    T, S, H, R, window, scale, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    dout_b, dout_h, dout_t, dout_d,
    dq_b, dq_h, dq_t, dq_d,
    lse_b, lse_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head."""
    tiles = tl.cdiv(T, BLOCK_T)
    top = (tl.program_id(0) % tiles) * BLOCK_T
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    g = h // R
    q_start, T = span(cu_q, b, T, PACKED)
    k_start, S = span(cu_k, b, S, PACKED)
    if top >= T:
        return
    q += b * q_b + h * q_h + q_start * q_t
    k += b * k_b + g * k_g + k_start * k_s
    v += b * v_b + g * v_g + k_start * v_s
    dout += b * dout_b + h * dout_h + q_start * dout_t
    dq += b * dq_b + h * dq_h + q_start * dq_t
    row = b * lse_b + h * lse_h + q_start

    t = top + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    queries = rows_of(q, t, q_t, d, q_d, T, D)
    upstream = rows_of(dout, t, dout_t, d, dout_d, T, D)
    row_lse = tl.load(lse + row + t, mask=t < T, other=float("-inf"))
    row_delta = tl.load(delta + row + t, mask=t < T, other=0.0)
    sum_q = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    last = tl.minimum(top + BLOCK_T, T) - 1
    begin, end = key_range(top + S - T, last + S - T, S, window, CAUSAL, WINDOWED)
    for start in range(begin, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        keys = rows_of(k, s, k_s, d, k_d, S, D)
        values = rows_of(v, s, v_s, d, v_d, S, D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        dweights = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
        seen = sees(t[:, None], s[None, :], T, S, window, CAUSAL, WINDOWED)
        _, slopes = weights_and_slopes(
            products, dweights, row_lse[:, None], row_delta[:, None], seen, scale, softcap, CAPPED
        )
        sum_q += tl.dot(slopes.to(keys.dtype), keys, input_precision=PRECISION)

    places = t[:, None].to(tl.int64) * dq_t + d[None, :] * dq_d
    inside = (t[:, None] < T) & (d[None, :] < D)
    tl.store(dq + places, (sum_q * scale).to(dq.dtype.element_ty), mask=inside)


def backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    deterministic: bool = True,  # noqa: ARG001 - there is no other way yet
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `kernels_fwd.forward`, from what it gave."""
    layout = dense(q, k)
    delta = row_dots(dout, out, dlse, layout)
    return _backward(q, k, v, dout, lse, delta, layout, causal, window, softcap, scale)


def varlen_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    deterministic: bool = True,  # noqa: ARG001 - there is no other way yet
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `kernels_fwd.varlen_forward`, from what it gave."""
    layout = packed(q, k, cu_q, cu_k, max_q, max_k)
    delta = row_dots(dout, out, dlse, layout)
    return _backward(q, k, v, dout, lse, delta, layout, causal, window, softcap, scale)


def row_dots(dout: Tensor, out: Tensor, dlse: Tensor, layout: Layout) -> Tensor:
    """δ in float32, laid out as lse."""
    delta = dout.new_empty(layout.lse_shape, dtype=torch.float32)
    blocks = {key: size for key, size in block_sizes(dout).items() if key != "BLOCK_S"}
    programs = triton.cdiv(delta.numel(), blocks["BLOCK_T"])
    if programs:
        row_dots_kernel[(programs,)](
            *(dout, out, dlse.contiguous(), delta),
            *(delta.numel(), layout.sizes[2], layout.lse_shape[-1]),
            *(*layout.strides(dout), *layout.strides(out)),
            **blocks,
        )
    return delta


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    layout: Layout,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    require(q)
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    longest_q, longest_k, heads, share = layout.sizes
    blocks, flags = block_sizes(q), rule_flags(q, layout, causal, window, softcap)
    inputs = q, k, v, dout, lse.contiguous(), delta
    shared = *layout.sizes, window, scale, softcap
    strides = [stride for x in (q, k, v, dout) for stride in layout.strides(x)]
    programs = triton.cdiv(longest_k, blocks["BLOCK_S"]) * layout.batches * (heads // share)
    if programs:
        dkdv_kernel[(programs,)](
            *(*inputs, dk, dv, layout.cu_q, layout.cu_k, *shared, *strides),
            *(*layout.strides(dk), *layout.lse_strides),
            **blocks,
            **flags,
        )
    programs = triton.cdiv(longest_q, blocks["BLOCK_T"]) * layout.batches * heads
    if programs:
        dq_kernel[(programs,)](
            *(*inputs, dq, layout.cu_q, layout.cu_k, *shared, *strides),
            *(*layout.strides(dq), *layout.lse_strides),
            **blocks,
            **flags,
        )
    return dq, dk, dv
