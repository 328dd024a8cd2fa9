# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's forward pass in plain Triton: one program per query tile, keys streamed by tiles.

Read it beside `oracle.attention_tiled`: the same recurrence, in base 2 because the hardware has
exp2. The keys that every query of the tile sees come in a loop without masks; only the tiles at
the edges (the diagonal, a window's ends, the last keys) are masked.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.dense.triton.tiles import (
    LN_2,
    Layout,
    Tile,
    as_descriptor,
    block_width,
    dense,
    described,
    empty_like,
    has_tail,
    head_of,
    keys_seen,
    packed,
    reach,
    require,
    rows_of,
    rule_flags,
    scored,
    sees,
    span,
    turn_and_head,
    turned,
)
from trapline.gold.attention.dense.triton.zero_unpacked_tokens import clear_outside
from trapline.gold.device import LOG2_E


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
    # One multiply-add an element: without a cap, the scale waits for the subtraction of the peak.
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
        # A row that has seen no key stays at −inf, and −inf − (−inf) is not a number.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - origin[:, None])
    correction = tl.exp2(peak - origin)
    total = total * correction + tl.sum(weights, 1)
    values = rows_of(v, b, g, start, S, v_s, v_d, D, BLOCK_D, BLOCK_S, TMA, not MASKED)
    weighted = tl.dot(
        weights.to(values.dtype), values, weighted * correction[:, None], input_precision=PRECISION
    )
    return new_peak, total, weighted


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
    """out and lse of one tile of queries of one head; the last queries have the most to do."""
    tiles = tl.cdiv(T, BLOCK_T)
    turn, head = turn_and_head(tiles, CAUSAL)
    top = (tiles - 1 - turn) * BLOCK_T
    b, h = head // H, head % H
    g = h // R
    if PACKED:
        clear_outside(
            out + h * out_h, cu_q, b, tl.num_programs(0) // (tiles * H), tokens, turn, tiles,
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
        start = place if CAUSAL else turned(place, clear, hidden, turn * BLOCK_S)
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
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """out (B,H,T,D) and lse (B,H,T) float32, of q (B,H,T,D) and k, v (B,G,S,D)."""
    return launch(q, k, v, dense(q, k), causal, window, softcap, scale)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (tokens,H,D) and lse (H,tokens) float32, of packed q (tokens,H,D) and k, v (…,G,D)."""
    layout = packed(q, k, cu_q, cu_k, max_q, max_k)
    return launch(q, k, v, layout, causal, window, softcap, scale)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    tile: Tile | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The pass with a tile and a way to read (tensor descriptors or pointers) of one's choice."""
    require(q)
    window = reach(layout, window)
    out, lse = empty_like(q), q.new_empty(layout.lse_shape, dtype=torch.float32)
    longest, _, heads, _ = layout.sizes
    tile = tile or tile_for(q, causal or window > 0)
    programs = cdiv(longest, tile.queries) * layout.batches * heads
    if not programs:
        return out.zero_(), lse.zero_()
    strides = [stride for x in (q, k, v, out) for stride in layout.strides(x)]
    tma = described(layout, q, k, v) if tma is None else tma
    inputs: tuple[Any, ...] = (q, k, v)
    if tma:
        inputs = as_descriptor(q, tile.queries), *(as_descriptor(x, tile.keys) for x in (k, v))
    forward_kernel[(programs,)](
        *(*inputs, out, lse, layout.cu_q, layout.cu_k, layout.tokens(q)),
        *(*layout.sizes, window, scale, softcap),
        *(*strides, *layout.lse_strides),
        **rule_flags(q, layout, causal, window, softcap),
        TMA=tma,
        TAIL=has_tail(layout, tile, causal, window),
        **tile.launch(),
    )
    return out, lse


#: Width of a tile, whether any is masked → the tile, for 16-bit inputs, found by measurement
#: (docs/components/flash_attention_kernels.md).
TILES = {
    (64, False): Tile(64, 128, 4, 2),
    (64, True): Tile(64, 64, 4, 2),
    (128, False): Tile(128, 64, 4, 2),
    (128, True): Tile(128, 64, 4, 2),
    (256, False): Tile(128, 64, 8, 2),
    (256, True): Tile(128, 64, 8, 2),
}


def tile_for(q: Tensor, masked: bool) -> Tile:
    """float32 takes twice the room and no tensor cores: small tiles."""
    if q.dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    return TILES[max(64, block_width(q)), masked]
