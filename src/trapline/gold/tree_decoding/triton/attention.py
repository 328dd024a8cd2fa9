# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of a tree's nodes, or of a drafted block, in one launch a layer.

A program serves one kv head of one row and a few of its nodes. From the joined projections it norms
and rotates queries and keys, stores the tree's keys and values behind the committed ones, and
attends over the committed positions and the ancestors of each node. Every program computes the
tree's few keys itself, so that programs do not wait for each other.

A drafter's context grows by the tokens of the previous round. Their projections (`fresh`) are
rotated, used and stored between context and block.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.decoder.triton.step_attention import apply_rope, softmax_update
from trapline.gold.device import launched


@triton.jit
def committed(
    keys, values, first, start, end, g, G, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Keys and values (BLOCK_S, BLOCK_D) of a row from position `start`; zero from `end` on."""
    d = tl.arange(0, BLOCK_D)
    s = start + tl.arange(0, BLOCK_S)
    at = ((first + s) * G + g)[:, None] * D + d[None, :]
    stored = (s < end)[:, None] & (d < D)[None, :]
    k = tl.load(keys + at, mask=stored, other=0.0)
    v = tl.load(values + at, mask=stored, other=0.0)
    return k, v


@triton.jit
def absorb_seen(
    q, k, v, shown, peak, total, weighted, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Online softmax over a tile; `shown` (M, T) is the mask."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(shown, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - origin[:, None])
    correction = tl.exp2(peak - origin)
    total = total * correction + tl.sum(weights, 1)
    weighted = weighted * correction[:, None]
    weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision=PRECISION)
    return new_peak, total, weighted


@launched
@triton.jit
def tree_attend_kernel(
    qkv,  # (rows · nodes, (H + 2G) · D)
    keys, values,  # (rows · room, G, D) of this layer
    lengths,  # (rows,) committed positions
    known,  # (rows,) how many of them are stored; the others are `fresh`
    depths,  # (rows · nodes,)
    seen,  # (rows, nodes, nodes) bytes
    cosine, sine, q_norm, k_norm,
    fresh,  # (rows · W, …) projections of what was committed last, this layer's first
    out,  # (rows · nodes, H · D)
    stream, features,  # the stream (rows · nodes, C) is copied to features, if there are any
    nodes, room, G, W, qkv_row, fresh_row, feature_row, C, scale, eps, chunks,
    QN: tl.constexpr, BLOCK_Q: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) % chunks
    g = tl.program_id(0) // chunks % G
    row = (tl.program_id(0) // (chunks * G)).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    stored = length
    if fresh is not None:
        stored = tl.load(known + row).to(tl.int32)
    first = row * room
    d = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    node = chunk * QN + m // R
    head = g * R + m % R
    live = (m < QN * R) & (node < nodes)
    t = tl.arange(0, BLOCK_T)
    there = t < nodes
    # No kernel in flight writes committed positions, so they may be read before the wait.
    k, v = committed(keys, values, first, 0, stored, g, G, D, BLOCK_D, BLOCK_S)
    place = tl.load(depths + row * nodes + node, mask=live, other=0) + length
    place_t = tl.load(depths + row * nodes + t, mask=there, other=0) + length
    shown = tl.load(
        seen + (row * nodes + node)[:, None] * nodes + t[None, :],
        mask=live[:, None] & there[None, :],
        other=0,
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = (row * nodes + node) * qkv_row + head * D
    q = apply_rope(qkv, at, live, place, cosine, sine, q_norm, eps, D, BLOCK_D)
    at_t = (row * nodes + t) * qkv_row + (G * R + g) * D
    own_k = apply_rope(qkv, at_t, there, place_t, cosine, sine, k_norm, eps, D, BLOCK_D)
    inside = there[:, None] & (d < D)[None, :]
    own_v = tl.load(qkv + (at_t + G * D)[:, None] + d[None, :], mask=inside, other=0.0)
    if fresh is None and chunk == 0:
        slot = ((first + length + t) * G + g)[:, None] * D + d[None, :]
        fits = inside & (length + t < room)[:, None]
        tl.store(keys + slot, own_k, mask=fits)
        tl.store(values + slot, own_v, mask=fits)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak, total, weighted = absorb_seen(
        q, own_k, own_v, shown != 0, peak, total, weighted, scale, PRECISION
    )
    if fresh is not None:
        w = tl.arange(0, BLOCK_W)
        new = (w < W) & (stored + w < length)
        at_w = (row * W + w) * fresh_row + g * D
        new_k = apply_rope(fresh, at_w, new, stored + w, cosine, sine, k_norm, eps, D, BLOCK_D)
        within = new[:, None] & (d < D)[None, :]
        new_v = tl.load(fresh + (at_w + G * D)[:, None] + d[None, :], mask=within, other=0.0)
        if chunk == 0:
            spot = ((first + stored + w) * G + g)[:, None] * D + d[None, :]
            room_left = within & (stored + w < room)[:, None]
            tl.store(keys + spot, new_k, mask=room_left)
            tl.store(values + spot, new_v, mask=room_left)
        peak, total, weighted = absorb_seen(
            q, new_k, new_v, live[:, None] & new[None, :], peak, total, weighted, scale, PRECISION
        )
    peak, total, weighted = softmax_update(
        q, k, v, 0, stored, peak, total, weighted, scale, BLOCK_S, PRECISION
    )
    for start in range(BLOCK_S, stored, BLOCK_S):
        k, v = committed(keys, values, first, start, stored, g, G, D, BLOCK_D, BLOCK_S)
        peak, total, weighted = softmax_update(
            q, k, v, start, stored, peak, total, weighted, scale, BLOCK_S, PRECISION
        )
    answer = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    goal = ((row * nodes + node) * (G * R) + head)[:, None] * D + d[None, :]
    tl.store(out + goal, answer.to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    if features is not None:
        # Each head copies its part of the channels.
        c = g * BLOCK_C + tl.arange(0, BLOCK_C)
        one = chunk * QN + tl.arange(0, BLOCK_Q)
        line = row * nodes + one
        copied = ((tl.arange(0, BLOCK_Q) < QN) & (one < nodes))[:, None] & (c < C)[None, :]
        kept = tl.load(stream + line[:, None] * C + c[None, :], mask=copied, other=0.0)
        tl.store(features + line[:, None] * feature_row + c[None, :], kept, mask=copied)
