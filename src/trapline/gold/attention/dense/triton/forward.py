# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's forward pass in plain Triton: one program per tile of queries, keys in tiles.

The recurrence is that of `oracle.attention_tiled`, in base 2 because the hardware has exp2. Keys
that every query of the tile sees are read in a loop without masks; only tiles at the edges (the
diagonal, the ends of a window, the last keys) are masked.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.dense import Problem
from trapline.gold.attention.dense.triton.tiles import (
    LN_2,
    Tile,
    as_descriptor,
    block_width,
    boundaries,
    can_describe,
    constants,
    has_tail,
    head_of,
    keys_seen,
    reach,
    rotated,
    rows_of,
    scored,
    sees,
    span,
    strides_of,
    tokens_of,
    turn_and_head,
    zero_unpacked_tokens,
)
from trapline.gold.device import LOG2_E, launched


@triton.jit
def forward_step(
    state, queries, k, v, b, g, top, start, T, S, window, scale, softcap,
    k_s, k_d, v_s, v_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state of the online softmax (peak, total, weighted sum) after one more tile of keys."""
    peak, total, weighted = state
    keys = rows_of(k, b, g, start, S, k_s, k_d, D, BLOCK_D, BLOCK_S, TMA, not MASKED)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    # One multiply-add per element: without a cap, scale and subtract the peak together.
    factor = scale * LOG2_E
    if CAPPED:
        scores = scored(scores, scale, softcap, CAPPED)
        factor = LOG2_E
    if MASKED:
        t = top + tl.arange(0, BLOCK_T)
        s = start + tl.arange(0, BLOCK_S)
        seen = sees(t[:, None], s[None, :], T, S, window, CAUSAL, WINDOWED)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    origin = new_peak
    if MASKED:
        # A row that has seen no key stays at −inf, and −inf − (−inf) is NaN.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - origin[:, None])
    correction = tl.exp2(peak - origin)
    total = total * correction + tl.sum(weights, 1)
    values = rows_of(v, b, g, start, S, v_s, v_d, D, BLOCK_D, BLOCK_S, TMA, not MASKED)
    weighted = tl.dot(
        weights.to(values.dtype), values, weighted * correction[:, None], input_precision=PRECISION
    )
    return new_peak, total, weighted


@launched
@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    q, k, v, out, lse, cu_q, cu_k, tokens,
    T, S, H, R, window, scale, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    out_b, out_h, out_t, out_d,
    lse_b, lse_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries of one head; the last queries have the most work."""
    tiles = tl.cdiv(T, BLOCK_T)
    turn, head = turn_and_head(tiles, CAUSAL)
    top = (tiles - 1 - turn) * BLOCK_T
    b, h = head // H, head % H
    g = h // R
    if PACKED:
        zero_unpacked_tokens(
            out + h * out_h, cu_q, b, tl.num_programs(0) // (tiles * H), tokens, T, turn, tiles,
            out_t, out_d, D, BLOCK_D, BLOCK_T,
        )  # fmt: skip
    q_start, T = span(cu_q, b, T, PACKED)
    k_start, S = span(cu_k, b, S, PACKED)
    if top >= T:
        return
    q = head_of(q, b, h, q_start, q_b, q_h, q_t, TMA)
    k = head_of(k, b, g, k_start, k_b, k_g, k_s, TMA)
    v = head_of(v, b, g, k_start, v_b, v_g, v_s, TMA)
    out += b * out_b + h * out_h + q_start * out_t
    lse += b * lse_b + h * lse_h + q_start

    queries = rows_of(q, b, h, top, T, q_t, q_d, D, BLOCK_D, BLOCK_T, TMA)
    state = (
        tl.full([BLOCK_T], float("-inf"), tl.float32),
        tl.zeros([BLOCK_T], tl.float32),
        tl.zeros([BLOCK_T, BLOCK_D], tl.float32),
    )
    last = tl.minimum(top + BLOCK_T, T) - 1
    begin, clear, hidden, end = keys_seen(
        top + S - T, last + S - T, S, window, CAUSAL, WINDOWED, BLOCK_S
    )
    if WINDOWED:
        for start in range(begin, clear, BLOCK_S):
            state = forward_step(
                state, queries, k, v, b, g, top, start, T, S, window, scale, softcap,
                k_s, k_d, v_s, v_d, D, BLOCK_D, BLOCK_T, BLOCK_S,
                CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=True,
            )  # fmt: skip
    for place in range(clear, hidden, BLOCK_S):
        start = place if CAUSAL else rotated(place, clear, hidden, turn * BLOCK_S)
        state = forward_step(
            state, queries, k, v, b, g, top, start, T, S, window, scale, softcap,
            k_s, k_d, v_s, v_d, D, BLOCK_D, BLOCK_T, BLOCK_S,
            CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=False,
        )  # fmt: skip
    if TAIL:
        for start in range(hidden, end, BLOCK_S):
            state = forward_step(
                state, queries, k, v, b, g, top, start, T, S, window, scale, softcap,
                k_s, k_d, v_s, v_d, D, BLOCK_D, BLOCK_T, BLOCK_S,
                CAUSAL, WINDOWED, CAPPED, PRECISION, TMA, MASKED=True,
            )  # fmt: skip

    peak, total, weighted = state
    t = top + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    places = out + t[:, None].to(tl.int64) * out_t + d[None, :] * out_d
    rows = (weighted / total[:, None]).to(out.dtype.element_ty)
    tl.store(places, rows, mask=(t[:, None] < T) & (d[None, :] < D))
    natural = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
    tl.store(lse + t, natural, mask=t < T)


def forward(
    problem: Problem, tile: Tile | None = None, tma: bool | None = None
) -> tuple[Tensor, Tensor]:
    """out like q, and lse in float32, (B,H,T) or (H, tokens).

    `tile`, and `tma` (tensor descriptors or pointers), override the choice by measurement.
    """
    q, k, v = problem.q, problem.k, problem.v
    window = reach(problem)
    T, S, heads, group = problem.sizes
    out, lse = q.new_empty(q.shape), q.new_empty(problem.lse_shape, dtype=torch.float32)
    tile = tile or tile_for(q, problem.causal or window > 0)
    programs = cdiv(T, tile.queries) * problem.sequences * heads
    if not programs:
        return out.zero_(), lse.zero_()
    tma = not problem.packed and can_describe(q, k, v) if tma is None else tma
    inputs: tuple[Any, ...] = (q, k, v)
    if tma:
        inputs = as_descriptor(q, tile.queries), *(as_descriptor(x, tile.keys) for x in (k, v))
    rows = lse.shape[-1]
    forward_kernel[(programs,)](
        *(*inputs, out, lse, *boundaries(problem), tokens_of(problem, q)),
        *(T, S, heads, group, window, problem.scale, problem.softcap),
        *(stride for x in (q, k, v, out) for stride in strides_of(problem, x)),
        *(0 if problem.packed else heads * rows, rows),
        **constants(problem, window),
        TMA=tma,
        TAIL=has_tail(problem, tile, window),
        **tile.launch(),
    )
    return out, lse


#: (width of a tile, whether any tile is masked) → tile for 16-bit inputs, by measurement
#: (docs/lab/attention.md).
TILES = {
    (64, False): Tile(64, 128, 4, 2),
    (64, True): Tile(64, 64, 4, 2),
    (128, False): Tile(128, 64, 4, 2),
    (128, True): Tile(128, 64, 4, 2),
    (256, False): Tile(128, 64, 8, 2),
    (256, True): Tile(128, 64, 8, 2),
}


def tile_for(q: Tensor, masked: bool) -> Tile:
    """float32 needs twice the memory and uses no tensor cores: small tiles."""
    if q.dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    return TILES[max(64, block_width(q)), masked]
