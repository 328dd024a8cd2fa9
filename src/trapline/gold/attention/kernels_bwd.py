# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's backward pass in plain Triton: every gradient has one owner, so it is repeatable.

`rows_kernel` makes δ = rowsum(dout · out) − dlse and the log-sum-exp in base 2. `dkdv_kernel` owns
a tile of keys and walks the queries of all heads of the group, so the sum over the group stays in
registers; it works on transposed scores (keys by queries), formed as such and never transposed
afterwards. `dq_kernel` owns a tile of queries and walks the keys. No atomics, no buffer for dq.
With `FUSED` (deterministic=False) the first also adds its share to dq, in float32 by atomics, and
the second is not needed: five products instead of seven. Read them beside
`oracle.attention_backward_tiled`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.attention.kernels_tiles import (
    LOG2_E,
    Layout,
    Tile,
    as_descriptor,
    block_width,
    dense,
    described,
    empty_like,
    head_of,
    keys_seen,
    packed,
    queries_seeing,
    require,
    rows_of,
    rule_flags,
    scored,
    sees,
    span,
)


@triton.jit
def rows_kernel(
    dout, out, lse, dlse, delta, lse2, rows, H, T,
    dout_b, dout_h, dout_t, dout_d,
    out_b, out_h, out_t, out_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """delta[row] = dout · out − dlse and lse in base 2, for rows numbered through (B, H, T)."""
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    b, h, t = row // T // H, row // T % H, row % T
    d = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < rows) & (d[None, :] < D)
    place = (b * dout_b + h * dout_h + t * dout_t)[:, None] + d[None, :] * dout_d
    left = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    place = (b * out_b + h * out_h + t * out_t)[:, None] + d[None, :] * out_d
    right = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(dlse + row, mask=row < rows, other=0.0)
    natural = tl.load(lse + row, mask=row < rows, other=0.0)
    tl.store(delta + row, tl.sum(left * right, 1) - given, mask=row < rows)
    tl.store(lse2 + row, natural * LOG2_E, mask=row < rows)


@triton.jit
def weights_and_slopes(
    products, dweights, lse2, delta, seen, scale, softcap,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax weights of a tile, and the gradient of its scaled dot products, in either order."""
    if CAPPED:
        scores = scored(products, scale, softcap, CAPPED)
        weights = tl.exp2(scores * LOG2_E - lse2)
    else:
        weights = tl.exp2(products * (scale * LOG2_E) - lse2)
    if MASKED:
        # A row without keys has lse −inf and weights of inf up to here; nothing of it is seen.
        weights = tl.where(seen, weights, 0.0)
    slopes = weights * (dweights - delta)
    if CAPPED:
        slopes = slopes * (1.0 - (scores / softcap) * (scores / softcap))
    return weights, slopes


@triton.jit
def dkdv_step(
    sums, keys, values, q, dout, lse2, delta, dq, b, h, top, left, T, S, window, scale, softcap,
    q_t, q_d, dout_t, dout_d, dq_t, dq_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to dk and dv; queries beyond T are rows of zeros and add 0."""
    sum_k, sum_v = sums
    t = top + tl.arange(0, BLOCK_T)
    s = left + tl.arange(0, BLOCK_S)
    queries = rows_of(q, b, h, top, T, q_t, q_d, D, BLOCK_D, BLOCK_T, TMA)
    products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    upstream = rows_of(dout, b, h, top, T, dout_t, dout_d, D, BLOCK_D, BLOCK_T, TMA)
    dweights = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
    row_lse = tl.load(lse2 + t, mask=t < T, other=0.0)
    row_delta = tl.load(delta + t, mask=t < T, other=0.0)
    seen = sees(t[None, :], s[:, None], T, S, window, CAUSAL, WINDOWED)
    weights, slopes = weights_and_slopes(
        products, dweights, row_lse[None, :], row_delta[None, :], seen, scale, softcap,
        CAPPED, MASKED,
    )  # fmt: skip
    sum_v = tl.dot(weights.to(upstream.dtype), upstream, sum_v, input_precision=PRECISION)
    slopes = slopes.to(queries.dtype)
    sum_k = tl.dot(slopes, queries, sum_k, input_precision=PRECISION)
    if FUSED:
        # (width, queries): the gradient's transpose, so that no accumulator is transposed.
        part = tl.dot(tl.trans(keys), slopes, input_precision=PRECISION)
        d = tl.arange(0, BLOCK_D)
        places = dq + d[:, None].to(tl.int64) * dq_d + t[None, :].to(tl.int64) * dq_t
        inside = (d[:, None] < D) & (t[None, :] < T)
        tl.atomic_add(places, part * scale, mask=inside, sem="relaxed")
    return sum_k, sum_v


@triton.jit
def dkdv_kernel(
    q, k, v, dout, delta, lse2, dk, dv, dq, cu_q, cu_k,
    T, S, H, R, window, scale, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    dout_b, dout_h, dout_t, dout_d,
    dk_b, dk_g, dk_s, dk_d,
    dq_b, dq_h, dq_t, dq_d,
    lse_b, lse_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one key/value head; the first keys have the most to do."""
    tiles = tl.cdiv(S, BLOCK_S)
    left = (tl.program_id(0) % tiles) * BLOCK_S
    group = (tl.program_id(0) // tiles).to(tl.int64)
    G = H // R
    b, g = group // G, group % G
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
        dq_head = dq + b * dq_b + h * dq_h + q_start * dq_t
        row = b * lse_b + h * lse_h + q_start
        if CAUSAL or WINDOWED:
            for top in range(begin, clear, BLOCK_T):
                sums = dkdv_step(
                    sums, keys, values, q_head, dout_head, lse2 + row, delta + row, dq_head,
                    b, h, top, left, T, S, window, scale, softcap,
                    q_t, q_d, dout_t, dout_d, dq_t, dq_d,
                    D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED,
                    PRECISION, TMA, FUSED, MASKED=True,
                )  # fmt: skip
        for top in range(clear, hidden, BLOCK_T):
            sums = dkdv_step(
                sums, keys, values, q_head, dout_head, lse2 + row, delta + row, dq_head,
                b, h, top, left, T, S, window, scale, softcap,
                q_t, q_d, dout_t, dout_d, dq_t, dq_d,
                D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED,
                PRECISION, TMA, FUSED, MASKED=False,
            )  # fmt: skip
        if WINDOWED:
            for top in range(hidden, end, BLOCK_T):
                sums = dkdv_step(
                    sums, keys, values, q_head, dout_head, lse2 + row, delta + row, dq_head,
                    b, h, top, left, T, S, window, scale, softcap,
                    q_t, q_d, dout_t, dout_d, dq_t, dq_d,
                    D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED,
                    PRECISION, TMA, FUSED, MASKED=True,
                )  # fmt: skip

    sum_k, sum_v = sums
    s = left + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    places = b * dk_b + g * dk_g + k_start * dk_s
    places += s[:, None].to(tl.int64) * dk_s + d[None, :] * dk_d
    inside = (s[:, None] < S) & (d[None, :] < D)
    tl.store(dk + places, (sum_k * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + places, sum_v.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def dq_step(
    sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
    T, S, window, scale, softcap, k_s, k_d, v_s, v_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to dq."""
    keys = rows_of(k, b, g, start, S, k_s, k_d, D, BLOCK_D, BLOCK_S, TMA)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    values = rows_of(v, b, g, start, S, v_s, v_d, D, BLOCK_D, BLOCK_S, TMA)
    dweights = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
    t = top + tl.arange(0, BLOCK_T)
    s = start + tl.arange(0, BLOCK_S)
    seen = sees(t[:, None], s[None, :], T, S, window, CAUSAL, WINDOWED)
    _, slopes = weights_and_slopes(
        products, dweights, row_lse[:, None], row_delta[:, None], seen, scale, softcap,
        CAPPED, MASKED,
    )  # fmt: skip
    return tl.dot(slopes.to(keys.dtype), keys, sum_q, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    q, k, v, dout, delta, lse2, dq, cu_q, cu_k,
    T, S, H, R, window, scale, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    dout_b, dout_h, dout_t, dout_d,
    dq_b, dq_h, dq_t, dq_d,
    lse_b, lse_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head; the last queries have the most to do."""
    tiles = tl.cdiv(T, BLOCK_T)
    top = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_T
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    g = h // R
    q_start, T = span(cu_q, b, T, PACKED)
    k_start, S = span(cu_k, b, S, PACKED)
    if top >= T:
        return
    q = head_of(q, b, h, q_start, q_b, q_h, q_t, TMA)
    dout = head_of(dout, b, h, q_start, dout_b, dout_h, dout_t, TMA)
    k = head_of(k, b, g, k_start, k_b, k_g, k_s, TMA)
    v = head_of(v, b, g, k_start, v_b, v_g, v_s, TMA)
    dq += b * dq_b + h * dq_h + q_start * dq_t
    row = b * lse_b + h * lse_h + q_start

    t = top + tl.arange(0, BLOCK_T)
    queries = rows_of(q, b, h, top, T, q_t, q_d, D, BLOCK_D, BLOCK_T, TMA)
    upstream = rows_of(dout, b, h, top, T, dout_t, dout_d, D, BLOCK_D, BLOCK_T, TMA)
    row_lse = tl.load(lse2 + row + t, mask=t < T, other=0.0)
    row_delta = tl.load(delta + row + t, mask=t < T, other=0.0)
    sum_q = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    last = tl.minimum(top + BLOCK_T, T) - 1
    begin, clear, hidden, end = keys_seen(
        top + S - T, last + S - T, S, window, CAUSAL, WINDOWED, BLOCK_S
    )
    if WINDOWED:
        for start in range(begin, clear, BLOCK_S):
            sum_q = dq_step(
                sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
                T, S, window, scale, softcap, k_s, k_d, v_s, v_d,
                D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=True,
            )  # fmt: skip
    for start in range(clear, hidden, BLOCK_S):
        sum_q = dq_step(
            sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
            T, S, window, scale, softcap, k_s, k_d, v_s, v_d,
            D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=False,
        )  # fmt: skip
    for start in range(hidden, end, BLOCK_S):
        sum_q = dq_step(
            sum_q, queries, upstream, row_lse, row_delta, k, v, b, g, top, start,
            T, S, window, scale, softcap, k_s, k_d, v_s, v_d,
            D, BLOCK_D, BLOCK_T, BLOCK_S, CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)
    places = dq + t[:, None].to(tl.int64) * dq_t + d[None, :] * dq_d
    inside = (t[:, None] < T) & (d[None, :] < D)
    tl.store(places, (sum_q * scale).to(dq.dtype.element_ty), mask=inside)


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
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `kernels_fwd.forward`, from what it gave."""
    layout = dense(q, k)
    rules = causal, window, softcap, scale
    return launch(dout, dlse, q, k, v, out, lse, layout, *rules, deterministic)


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
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `kernels_fwd.varlen_forward`, from what it gave."""
    layout = packed(q, k, cu_q, cu_k, max_q, max_k)
    rules = causal, window, softcap, scale
    return launch(dout, dlse, q, k, v, out, lse, layout, *rules, deterministic)


def row_sums(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """δ, and lse in base 2: float32, laid out as lse."""
    delta, lse2 = lse.new_empty((2, *layout.lse_shape), dtype=torch.float32)
    wide = block_width(dout)
    block = max(1, 8192 // wide)
    programs = triton.cdiv(delta.numel(), block)
    if programs:
        rows_kernel[(programs,)](
            *(dout, out, lse.contiguous(), dlse.contiguous(), delta, lse2),
            *(delta.numel(), layout.sizes[2], layout.lse_shape[-1]),
            *(*layout.strides(dout), *layout.strides(out)),
            D=dout.shape[-1],
            BLOCK_D=wide,
            BLOCK_T=block,
        )
    return delta, lse2


class Tiles(NamedTuple):
    """Of the kernel that owns keys, of the one that owns queries, and of the fused one."""

    keys: Tile
    queries: Tile
    fused: Tile


#: Width of a tile → the tiles, for 16-bit inputs, found by measurement (docs/components).
TILES = {
    64: Tiles(keys=Tile(64, 128, 8, 2), queries=Tile(128, 64, 8, 2), fused=Tile(64, 128, 8, 2)),
    128: Tiles(keys=Tile(64, 128, 8, 2), queries=Tile(128, 64, 8, 2), fused=Tile(64, 128, 8, 2)),
    256: Tiles(keys=Tile(32, 64, 8, 1), queries=Tile(64, 32, 8, 1), fused=Tile(32, 64, 8, 1)),
}


def tiles_for(q: Tensor) -> Tiles:
    """float32 takes twice the room and no tensor cores: small tiles."""
    if q.dtype == torch.float32:
        return Tiles(*[Tile(32, 32, 4, 1)] * 3)
    return TILES[max(64, block_width(q))]


def launch(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    deterministic: bool,
    tiles: Tiles | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pass with tiles and a way to read (tensor descriptors or pointers) of one's choice."""
    require(q)
    tiles = tiles or tiles_for(q)
    if tma is None:
        tma = described(layout, q, k, v, dout)
    read = q, k, v, dout
    rows = row_sums(dout, out, lse, dlse, layout)
    numbers = (
        *(layout.cu_q, layout.cu_k, *layout.sizes, window, scale, softcap),
        *(stride for x in read for stride in layout.strides(x)),
    )
    flags = rule_flags(q, layout, causal, window, softcap) | {"TMA": tma}
    dk, dv = empty_like(k), empty_like(v)
    dq = empty_like(q) if deterministic else zeros_by_width(q, layout)
    tile = tiles.keys if deterministic else tiles.fused
    if programs := triton.cdiv(layout.sizes[1], tile.keys) * layout.batches * layout.groups:
        dkdv_kernel[(programs,)](
            *(*tiled(read, tile, tma), *rows, dk, dv, dq, *numbers),
            *(*layout.strides(dk), *layout.strides(dq), *layout.lse_strides),
            **flags,
            FUSED=not deterministic,
            **tile.launch(),
        )
    if not deterministic:
        return dq.to(q.dtype, memory_format=torch.contiguous_format), dk, dv
    tile = tiles.queries
    if programs := triton.cdiv(layout.sizes[0], tile.queries) * layout.batches * layout.sizes[2]:
        dq_kernel[(programs,)](
            *(*tiled(read, tile, tma), *rows, dq, *numbers),
            *(*layout.strides(dq), *layout.lse_strides),
            **flags,
            **tile.launch(),
        )
    return dq, dk, dv


def tiled(read: tuple[Tensor, ...], tile: Tile, tma: bool) -> tuple[Any, ...]:
    """q, k, v and dout as a kernel reads them."""
    if not tma:
        return read
    rows = tile.queries, tile.keys, tile.keys, tile.queries
    return tuple(as_descriptor(x, n) for x, n in zip(read, rows, strict=True))


def zeros_by_width(q: Tensor, layout: Layout) -> Tensor:
    """float32 zeros of q's shape whose positions lie side by side, as in the tiles of dqᵀ."""
    if layout.cu_q is None:
        return q.new_zeros(q.mT.shape, dtype=torch.float32).mT
    return q.new_zeros(q.permute(1, 2, 0).shape, dtype=torch.float32).permute(2, 0, 1)
