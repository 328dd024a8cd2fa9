"""Attention, one tile of queries a program: keys and values stream past a running softmax.

Scores are kept in units of log2, so that the exponential is a single instruction.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tiles(
    queries, total, largest, summed, k, v, k_stride, v_stride, rows, columns, lanes, known, shift,
    S, scale, first, last, KEYS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys from `first` to `last`; only a masked tile can hold a key that is not seen."""
    for start in range(first, last, KEYS):
        keys = start + columns
        inside = keys < S
        k_tile = k + keys[:, None].to(tl.int64) * k_stride + lanes[None, :]
        v_tile = v + keys[:, None].to(tl.int64) * v_stride + lanes[None, :]
        if MASKED:
            key = tl.load(k_tile, mask=inside[:, None] & known[None, :], other=0.0)
            value = tl.load(v_tile, mask=inside[:, None] & known[None, :], other=0.0)
        else:
            key = tl.load(k_tile, mask=known[None, :], other=0.0)
            value = tl.load(v_tile, mask=known[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + shift)
            scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen no key yet has nothing to rescale.
        base = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(largest - base)
        summed = summed * factor + tl.sum(weights, 1)
        total = total * factor[:, None]
        total = tl.dot(weights.to(value.dtype), value, total, input_precision="ieee")
        largest = new
    return total, largest, summed


@triton.jit
def _forward_kernel(
    q, k, v, out, lse, T, S, H, D, heads_per_group, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, QUERIES)
    program = tl.program_id(0)
    head = (program // tiles).to(tl.int64)
    batch, h = head // H, head % H
    group = h // heads_per_group
    # Late queries see the most keys: they come first.
    tile = tiles - 1 - program % tiles

    rows = tile * QUERIES + tl.arange(0, QUERIES)
    columns = tl.arange(0, KEYS)
    lanes = tl.arange(0, WIDTH)
    known = lanes < D
    there = (rows < T)[:, None] & known[None, :]
    q_tile = q + batch * q_b + h * q_h + rows[:, None].to(tl.int64) * q_t + lanes[None, :]
    queries = tl.load(q_tile, mask=there, other=0.0)
    keys, values = k + batch * k_b + group * k_h, v + batch * v_b + group * v_h

    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    summed = tl.zeros([QUERIES], tl.float32)
    shift = S - T
    last = S
    whole = S // KEYS * KEYS
    if CAUSAL:
        last = tl.minimum(S, tl.maximum(0, (tile + 1) * QUERIES + shift))
        whole = tl.maximum(0, tl.minimum(S, tile * QUERIES + 1 + shift)) // KEYS * KEYS
    total, largest, summed = _tiles(
        queries, total, largest, summed, keys, values, k_s, v_s, rows, columns, lanes, known,
        shift, S, scale, 0, whole, KEYS, CAUSAL, False,
    )  # fmt: skip
    total, largest, summed = _tiles(
        queries, total, largest, summed, keys, values, k_s, v_s, rows, columns, lanes, known,
        shift, S, scale, whole, last, KEYS, CAUSAL, True,
    )  # fmt: skip

    none = summed == 0.0
    result = total / tl.where(none, 1.0, summed)[:, None]
    place = head * T + rows
    tl.store(out + place[:, None] * D + lanes[None, :], result, mask=there)
    logarithm = tl.where(none, -float("inf"), (largest + tl.log2(summed)) * LN_2)
    tl.store(lse + place, logarithm, mask=rows < T)


def _tile(width, size):
    """Queries, keys, warps and stages of a program."""
    if size == 4:
        return (32, 32, 4, 2)
    return (128, 64, 8, 3) if width <= 128 else (64, 64, 8, 2)


def flash_attention(q, k, v, causal, out, lse):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    if B * H * T == 0:
        return
    width = max(16, triton.next_power_of_2(D))
    queries, keys, warps, stages = _tile(width, q.element_size())
    _forward_kernel[(B * H * triton.cdiv(T, queries),)](
        q, k, v, out, lse, T, S, H, D, H // G, D**-0.5 * LOG2_E,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        QUERIES=queries, KEYS=keys, WIDTH=width, CAUSAL=bool(causal),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
