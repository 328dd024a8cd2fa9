"""Gradients of attention: weights are computed again from the scores and the saved lse.

One kernel gives dk and dv of a tile of keys, another dq of a tile of queries; nothing is added up
in memory, so that the same call gives the same bits.
"""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _delta_kernel(
    out, dout, delta, queries, T, H, D, o_b, o_h, o_t, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Σ out · dout of every query."""
    places = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    there = (places < queries)[:, None] & (lanes < D)[None, :]
    saved = tl.load(out + places[:, None] * D + lanes[None, :], mask=there, other=0.0)
    t, h, b = places % T, places // T % H, places // T // H
    at = b * o_b + h * o_h + t * o_t
    gradient = tl.load(dout + at[:, None] + lanes[None, :], mask=there, other=0.0)
    total = tl.sum(saved.to(tl.float32) * gradient.to(tl.float32), 1)
    tl.store(delta + places, total, mask=places < queries)


@triton.jit
def _weights(queries, keys, lse, rows, columns, shift, S, scale, CAUSAL: tl.constexpr):
    """The softmax of a tile, (queries, keys); 0 where a query does not see a key."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    seen = (columns < S)[None, :]
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + shift)
    # A query that sees no key has the lse −inf.
    base = tl.where(lse == -float("inf"), 0.0, lse)
    return tl.exp2(tl.where(seen, scores - base[:, None], -float("inf")) * LOG2_E)


@triton.jit
def _keys_kernel(
    dout, q, k, v, lse, delta, dk, dv, T, S, H, D, heads_per_group, scale,
    o_b, o_h, o_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, KEYS)
    program = tl.program_id(0)
    head = (program // tiles).to(tl.int64)
    groups = H // heads_per_group
    batch, group = head // groups, head % groups
    first_key = program % tiles * KEYS
    columns = first_key + tl.arange(0, KEYS)
    lanes = tl.arange(0, WIDTH)
    known = lanes < D
    there = (columns < S)[:, None] & known[None, :]
    at = columns[:, None].to(tl.int64)
    keys = k + batch * k_b + group * k_h + at * k_s + lanes[None, :]
    values = v + batch * v_b + group * v_h + at * v_s + lanes[None, :]
    keys = tl.load(keys, mask=there, other=0.0)
    values = tl.load(values, mask=there, other=0.0)

    shift = S - T
    first_query = 0
    if CAUSAL:
        first_query = tl.maximum(0, first_key - shift) // QUERIES * QUERIES
    key_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    value_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    for member in range(heads_per_group):
        h = group * heads_per_group + member
        for start in range(first_query, T, QUERIES):
            rows = start + tl.arange(0, QUERIES)
            inside = rows < T
            tile = inside[:, None] & known[None, :]
            at_q = q + batch * q_b + h * q_h + rows[:, None].to(tl.int64) * q_t + lanes[None, :]
            at_o = dout + batch * o_b + h * o_h + rows[:, None].to(tl.int64) * o_t + lanes[None, :]
            queries = tl.load(at_q, mask=tile, other=0.0)
            gradient = tl.load(at_o, mask=tile, other=0.0)
            place = (batch * H + h) * T + rows
            saved = tl.load(lse + place, mask=inside, other=0.0)
            minus = tl.load(delta + place, mask=inside, other=0.0)
            weights = _weights(queries, keys, saved, rows, columns, shift, S, scale, CAUSAL)
            narrow = tl.trans(weights.to(gradient.dtype))
            value_sum = tl.dot(narrow, gradient, value_sum, input_precision="ieee")
            slope = tl.dot(gradient, tl.trans(values), input_precision="ieee")
            slope = (weights * (slope - minus[:, None])).to(queries.dtype)
            key_sum = tl.dot(tl.trans(slope), queries, key_sum, input_precision="ieee")
    place = (head * S + columns)[:, None] * D + lanes[None, :]
    tl.store(dk + place, key_sum * scale, mask=there)
    tl.store(dv + place, value_sum, mask=there)


@triton.jit
def _queries_kernel(
    dout, q, k, v, lse, delta, dq, T, S, H, D, heads_per_group, scale,
    o_b, o_h, o_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, QUERIES)
    program = tl.program_id(0)
    head = (program // tiles).to(tl.int64)
    batch, h = head // H, head % H
    group = h // heads_per_group
    tile = tiles - 1 - program % tiles
    rows = tile * QUERIES + tl.arange(0, QUERIES)
    lanes = tl.arange(0, WIDTH)
    known = lanes < D
    inside = rows < T
    there = inside[:, None] & known[None, :]
    at = rows[:, None].to(tl.int64)
    queries = q + batch * q_b + h * q_h + at * q_t + lanes[None, :]
    gradient = dout + batch * o_b + h * o_h + at * o_t + lanes[None, :]
    queries = tl.load(queries, mask=there, other=0.0)
    gradient = tl.load(gradient, mask=there, other=0.0)
    place = head * T + rows
    saved = tl.load(lse + place, mask=inside, other=0.0)
    minus = tl.load(delta + place, mask=inside, other=0.0)

    shift = S - T
    last = S
    if CAUSAL:
        last = tl.minimum(S, tl.maximum(0, (tile + 1) * QUERIES + shift))
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, last, KEYS):
        columns = start + tl.arange(0, KEYS)
        part = (columns < S)[:, None] & known[None, :]
        at_key = columns[:, None].to(tl.int64)
        at_k = k + batch * k_b + group * k_h + at_key * k_s + lanes[None, :]
        at_v = v + batch * v_b + group * v_h + at_key * v_s + lanes[None, :]
        keys = tl.load(at_k, mask=part, other=0.0)
        values = tl.load(at_v, mask=part, other=0.0)
        weights = _weights(queries, keys, saved, rows, columns, shift, S, scale, CAUSAL)
        slope = tl.dot(gradient, tl.trans(values), input_precision="ieee")
        slope = (weights * (slope - minus[:, None])).to(keys.dtype)
        total = tl.dot(slope, keys, total, input_precision="ieee")
    tl.store(dq + place[:, None] * D + lanes[None, :], total * scale, mask=there)


def _tile(width, size):
    """Queries, keys, warps and stages of a program."""
    if size == 4:
        return (16, 32, 4, 1) if width > 128 else (32, 32, 4, 1)
    return (64, 64, 4, 2) if width <= 128 else (32, 32, 4, 1)


def flash_attention_backward(dout, q, k, v, out, lse, causal, dq, dk, dv):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    width = max(16, triton.next_power_of_2(D))
    queries, keys, warps, stages = _tile(width, q.element_size())
    strides = *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    sizes = T, S, H, D, H // G, D**-0.5
    options = {"QUERIES": queries, "KEYS": keys, "WIDTH": width, "CAUSAL": bool(causal)}
    options |= {"num_warps": warps, "num_stages": stages}
    delta = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    if B * H * T:
        _delta_kernel[(triton.cdiv(B * H * T, 16),)](
            out, dout, delta, B * H * T, T, H, D, *dout.stride()[:3], ROWS=16, WIDTH=width
        )
        _queries_kernel[(B * H * triton.cdiv(T, queries),)](
            dout, q, k, v, lse, delta, dq, *sizes, *strides, **options
        )
    if B * G * S:
        _keys_kernel[(B * G * triton.cdiv(S, keys),)](
            dout, q, k, v, lse, delta, dk, dv, *sizes, *strides, **options
        )
