# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's backward pass in plain Triton: one program owns each gradient, so it is repeatable.

`rows_kernel` computes δ = rowsum(dout · out) − dlse and the log-sum-exp in base 2. `dkdv_kernel`
owns a tile of keys, `dq_kernel` a tile of queries: seven products per tile instead of the five of a
kernel that adds to dq by atomics, and still faster than one (docs/lab/attention.md). The recurrence
is that of `oracle.attention_backward_tiled`.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.dense import Problem
from trapline.gold.attention.dense.triton.tiles import (
    Tile,
    as_descriptor,
    block_width,
    boundaries,
    can_describe,
    constants,
    has_tail,
    head_of,
    keys_seen,
    queries_seeing,
    reach,
    rotated,
    row_sums_of,
    rows_of,
    sees,
    span,
    strides_of,
    tokens_of,
    turn_and_head,
    weights_and_slopes,
    zero_unpacked_tokens,
)
from trapline.gold.device import LOG2_E, launched


@launched
@triton.jit
def rows_kernel(
    dout, out, lse, dlse, sums_by_row, mantissa, H, T,
    dout_b, dout_h, dout_t, dout_d,
    out_b, out_h, out_t, out_d,
    row_n, row_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """δ times the mantissa, and lse in base 2, of a tile of queries of one head; 0 from T on."""
    tiles = row_h // BLOCK_T
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (d[None, :] < D)
    row = t[:, None].to(tl.int64)
    place = b * dout_b + h * dout_h + row * dout_t + d[None, :] * dout_d
    left = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    place = b * out_b + h * out_h + row * out_t + d[None, :] * out_d
    right = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    natural = tl.load(lse + head * T + t, mask=t < T, other=0.0)
    place = sums_by_row + head * row_h + t
    delta = tl.sum(left * right, 1)
    if dlse is not None:
        delta -= tl.load(dlse + head * T + t, mask=t < T, other=0.0)
    tl.store(place, delta * mantissa)
    tl.store(place + row_n, natural * LOG2_E)


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


@launched
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
    """dk and dv of one tile of keys of one key/value head; the first keys have the most work."""
    tiles = tl.cdiv(S, BLOCK_S)
    turn, group = turn_and_head(tiles, CAUSAL)
    left = turn * BLOCK_S
    G = H // R
    b, g = group // G, group % G
    if PACKED:
        sequences = tl.num_programs(0) // (tiles * G)
        place = g * dk_g
        zero_unpacked_tokens(
            dk + place, cu_k, b, sequences, tokens, S, turn, tiles, dk_s, dk_d, D, BLOCK_D, BLOCK_S
        )
        zero_unpacked_tokens(
            dv + place, cu_k, b, sequences, tokens, S, turn, tiles, dk_s, dk_d, D, BLOCK_D, BLOCK_S
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


@launched
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
    """dq of one tile of queries of one head; the last queries have the most work."""
    tiles = tl.cdiv(T, BLOCK_T)
    turn, head = turn_and_head(tiles, CAUSAL)
    top = (tiles - 1 - turn) * BLOCK_T
    b, h = head // H, head % H
    g = h // R
    if PACKED:
        zero_unpacked_tokens(
            dq + h * dq_h, cu_q, b, tl.num_programs(0) // (tiles * H), tokens, T, turn, tiles,
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
        start = place if CAUSAL else rotated(place, clear, hidden, turn * BLOCK_S)
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


def parts_of(scale: float) -> tuple[float, float]:
    """A scale as its mantissa and a power of two.

    Slopes are rounded to 16 bits before a product. Rounding them scaled or unscaled changes the
    error of dq and dk by ± 3 % on a given input and by nothing on average (docs/lab/attention.md).
    cuDNN rounds scaled ones, but the whole scale would push small slopes out of float16's range;
    the mantissa alone gives the same roundings.
    """
    mantissa, exponent = math.frexp(scale)
    return mantissa, 2.0**exponent


#: The most queries of a tile.
MAX_TILE = 128


def row_sums(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, mantissa: float
) -> Tensor:
    """δ times the mantissa, then lse in base 2: float32 (2, B, H, T padded to whole tiles)."""
    *batches, heads, rows = problem.lse_shape
    found = lse.new_empty((2, *(batches or [1]), heads, cdiv(rows, MAX_TILE) * MAX_TILE))
    wide = block_width(dout)
    block = min(MAX_TILE, 4096 // wide)
    rows_kernel[(found.shape[-1] // block * (lse.numel() // rows),)](
        *(
            dout,
            out,
            lse.contiguous(),
            None if dlse is None else dlse.contiguous(),
            found,
            mantissa,
            heads,
            rows,
        ),
        *(*strides_of(problem, dout), *strides_of(problem, out), found.stride(0), found.shape[-1]),
        D=dout.shape[-1],
        BLOCK_D=wide,
        BLOCK_T=block,
    )
    return found


class BackwardTiles(NamedTuple):
    """Tiles of the kernel that owns keys and of the one that owns queries."""

    keys: Tile
    queries: Tile


#: (width of a tile, whether any tile is masked) → tiles for 16-bit inputs, by measurement
#: (docs/lab/attention.md).
TILES = {
    (64, False): BackwardTiles(keys=Tile(64, 64, 4, 2), queries=Tile(64, 64, 4, 2)),
    (64, True): BackwardTiles(keys=Tile(128, 64, 4, 2), queries=Tile(64, 64, 4, 2)),
    (128, False): BackwardTiles(keys=Tile(64, 64, 4, 2), queries=Tile(64, 64, 4, 2)),
    (128, True): BackwardTiles(keys=Tile(64, 64, 4, 2), queries=Tile(128, 64, 8, 3)),
    (256, False): BackwardTiles(keys=Tile(64, 64, 8, 1), queries=Tile(64, 32, 4, 2)),
    (256, True): BackwardTiles(keys=Tile(64, 64, 8, 1), queries=Tile(64, 32, 4, 2)),
}


def tiles_for(q: Tensor, masked: bool) -> BackwardTiles:
    """float32 needs twice the memory and uses no tensor cores: small tiles."""
    if q.dtype == torch.float32:
        return BackwardTiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    return TILES[max(64, block_width(q)), masked]


def backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tiles: BackwardTiles | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, bitwise repeatable.

    `tiles`, and `tma` (tensor descriptors or pointers), override the choice by measurement.
    """
    q, k, v = problem.q, problem.k, problem.v
    T, S, heads, group = problem.sizes
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not (problem.sequences and T and S and heads and group and q.numel()):
        return dq.zero_(), dk.zero_(), dv.zero_()
    window = reach(problem)
    tiles = tiles or tiles_for(q, problem.causal or window > 0)
    if tma is None:
        tma = not problem.packed and can_describe(q, k, v)
        if tma and not can_describe(dout):  # autograd may expand a single number
            dout = dout.contiguous()
    read = q, k, v, dout
    mantissa, power = parts_of(problem.scale)
    rows = row_sums(problem, out, lse, dout, dlse, mantissa)
    kind, batch, head, _ = rows.stride()
    row_strides = kind, 0 if problem.packed else batch, head
    numbers = (
        *(*boundaries(problem), T, S, heads, group, window),
        *(problem.scale, mantissa, power, problem.softcap),
        *(stride for x in read for stride in strides_of(problem, x)),
    )
    flags = constants(problem, window) | {"TMA": tma}
    tile = tiles.keys
    dkdv_kernel[(cdiv(S, tile.keys) * problem.sequences * (heads // group),)](
        *(*inputs_for(read, tile, tma), rows, dk, dv, tokens_of(problem, k), *numbers),
        *(*strides_of(problem, dk), *row_strides),
        **flags,
        **tile.launch(),
    )
    tile = tiles.queries
    dq_kernel[(cdiv(T, tile.queries) * problem.sequences * heads,)](
        *(*inputs_for(read, tile, tma), rows, dq, tokens_of(problem, q), *numbers),
        *(*strides_of(problem, dq), *row_strides),
        **flags,
        TAIL=has_tail(problem, tile, window),
        **tile.launch(),
    )
    return dq, dk, dv


def inputs_for(read: tuple[Tensor, ...], tile: Tile, tma: bool) -> tuple[Any, ...]:
    """q, k, v and dout as descriptors or as they are."""
    if not tma:
        return read
    sizes = tile.queries, tile.keys, tile.keys, tile.queries
    return tuple(as_descriptor(x, n) for x, n in zip(read, sizes, strict=True))
