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
def _weights(
    scores, lse, rows, columns, shift, S, scale, CAUSAL: tl.constexpr, MASKED: tl.constexpr
):
    """The softmax of a tile; 0 where a query does not see a key.

    `lse`, `rows` and `columns` are vectors along the axes of the tile, which may be transposed.
    """
    # A query that sees no key has the lse −inf.
    base = tl.where(lse == -float("inf"), 0.0, lse) * LOG2_E
    powers = scores * (scale * LOG2_E) - base
    if MASKED:
        seen = columns < S
        if CAUSAL:
            seen = seen & (columns <= rows + shift)
        powers = tl.where(seen, powers, -float("inf"))
    return tl.exp2(powers)


@triton.jit
def _query_tiles(
    key_sum, value_sum, keys, values, q, dout, lse, delta, q_t, o_t, columns, lanes, known, shift,
    T, S, scale, first, last, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from `first` to `last` of one head give to dk and dv.

    Scores lie there as (keys, queries), so that products take them without a transposition. A query
    beyond the end adds nothing: its gradient is 0.
    """
    for start in range(first, last, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        inside = rows < T
        tile = inside[:, None] & known[None, :]
        at = rows[:, None].to(tl.int64)
        queries = tl.load(q + at * q_t + lanes[None, :], mask=tile, other=0.0)
        gradient = tl.load(dout + at * o_t + lanes[None, :], mask=tile, other=0.0)
        saved = tl.load(lse + rows, mask=inside, other=0.0)[None, :]
        minus = tl.load(delta + rows, mask=inside, other=0.0)[None, :]
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        weights = _weights(
            scores, saved, rows[None, :], columns[:, None], shift, S, scale, CAUSAL, MASKED
        )
        narrow = weights.to(gradient.dtype)
        value_sum = tl.dot(narrow, gradient, value_sum, input_precision="ieee")
        slope = tl.dot(values, tl.trans(gradient), input_precision="ieee")
        slope = (weights * (slope - minus)).to(queries.dtype)
        key_sum = tl.dot(slope, queries, key_sum, input_precision="ieee")
    return key_sum, value_sum


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
    first, whole, last = 0, 0, T
    if CAUSAL:
        # From `whole` on, queries see every key of this tile.
        first = tl.maximum(0, first_key - shift) // QUERIES * QUERIES
        whole = tl.cdiv(tl.maximum(0, first_key + KEYS - 1 - shift), QUERIES) * QUERIES
        whole = tl.minimum(whole, tl.cdiv(T, QUERIES) * QUERIES)
    key_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    value_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    for member in range(heads_per_group):
        h = group * heads_per_group + member
        queries = q + batch * q_b + h * q_h
        gradient = dout + batch * o_b + h * o_h
        place = (batch * H + h) * T
        if CAUSAL:
            key_sum, value_sum = _query_tiles(
                key_sum, value_sum, keys, values, queries, gradient, lse + place, delta + place,
                q_t, o_t, columns, lanes, known, shift, T, S, scale, first,
                tl.minimum(whole, last), QUERIES, CAUSAL, True,
            )  # fmt: skip
        key_sum, value_sum = _query_tiles(
            key_sum, value_sum, keys, values, queries, gradient, lse + place, delta + place,
            q_t, o_t, columns, lanes, known, shift, T, S, scale, whole, last,
            QUERIES, CAUSAL, False,
        )  # fmt: skip
    place = (head * S + columns)[:, None] * D + lanes[None, :]
    tl.store(dk + place, key_sum * scale, mask=there)
    tl.store(dv + place, value_sum, mask=there)


@triton.jit
def _key_tiles(
    total, queries, gradient, saved, minus, k, v, k_s, v_s, rows, lanes, known, shift,
    S, scale, first, last, KEYS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from `first` to `last` give to dq."""
    for start in range(first, last, KEYS):
        columns = start + tl.arange(0, KEYS)
        tile = known[None, :]
        if MASKED:
            tile = (columns < S)[:, None] & tile
        at = columns[:, None].to(tl.int64)
        keys = tl.load(k + at * k_s + lanes[None, :], mask=tile, other=0.0)
        values = tl.load(v + at * v_s + lanes[None, :], mask=tile, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        weights = _weights(
            scores, saved, rows[:, None], columns[None, :], shift, S, scale, CAUSAL, MASKED
        )
        slope = tl.dot(gradient, tl.trans(values), input_precision="ieee")
        slope = (weights * (slope - minus)).to(keys.dtype)
        total = tl.dot(slope, keys, total, input_precision="ieee")
    return total


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
    saved = tl.load(lse + place, mask=inside, other=0.0)[:, None]
    minus = tl.load(delta + place, mask=inside, other=0.0)[:, None]

    shift = S - T
    last = S
    whole = S // KEYS * KEYS
    if CAUSAL:
        # Up to `whole`, every query of this tile sees every key.
        last = tl.minimum(S, tl.maximum(0, (tile + 1) * QUERIES + shift))
        whole = tl.maximum(0, tl.minimum(S, tile * QUERIES + 1 + shift)) // KEYS * KEYS
    keys, values = k + batch * k_b + group * k_h, v + batch * v_b + group * v_h
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    total = _key_tiles(
        total, queries, gradient, saved, minus, keys, values, k_s, v_s, rows, lanes, known, shift,
        S, scale, 0, whole, KEYS, CAUSAL, False,
    )  # fmt: skip
    total = _key_tiles(
        total, queries, gradient, saved, minus, keys, values, k_s, v_s, rows, lanes, known, shift,
        S, scale, whole, last, KEYS, CAUSAL, True,
    )  # fmt: skip
    tl.store(dq + place[:, None] * D + lanes[None, :], total * scale, mask=there)


def _tile(width, size):
    """Rows that a program holds, rows that stream past it, warps and stages."""
    if size == 4:
        return (32, 16, 8, 1) if width > 128 else (32, 32, 4, 1)
    return (128, 64, 8, 2) if width <= 128 else (32, 32, 4, 1)


def flash_attention_backward(dout, q, k, v, out, lse, causal, dq, dk, dv):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    width = max(16, triton.next_power_of_2(D))
    held, streamed, warps, stages = _tile(width, q.element_size())
    strides = *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    sizes = T, S, H, D, H // G, D**-0.5
    options = {"WIDTH": width, "CAUSAL": bool(causal), "num_warps": warps, "num_stages": stages}
    delta = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    if B * H * T:
        _delta_kernel[(triton.cdiv(B * H * T, 16),)](
            out, dout, delta, B * H * T, T, H, D, *dout.stride()[:3], ROWS=16, WIDTH=width
        )
        _queries_kernel[(B * H * triton.cdiv(T, held),)](
            dout, q, k, v, lse, delta, dq, *sizes, *strides,
            QUERIES=held, KEYS=streamed, **options,
        )  # fmt: skip
    if B * G * S:
        _keys_kernel[(B * G * triton.cdiv(S, held),)](
            dout, q, k, v, lse, delta, dk, dv, *sizes, *strides,
            QUERIES=streamed, KEYS=held, **options,
        )  # fmt: skip
