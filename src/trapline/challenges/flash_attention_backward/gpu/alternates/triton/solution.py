"""One query, or one key, a program, without matrix products."""

import triton
import triton.language as tl


@triton.jit
def _of_query(dout, q, k, v, out, lse, dq, T, S, H, G, D, scale, causal,
              o_b, o_h, o_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
              KEYS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    t, h, b = place % T, place // T % H, place // T // H
    g = h * G // H
    lanes = tl.arange(0, WIDTH)
    wide = lanes < D
    query = tl.load(q + b * q_b + h * q_h + t * q_t + lanes, mask=wide, other=0.0).to(tl.float32)
    gradient = tl.load(dout + b * o_b + h * o_h + t * o_t + lanes, mask=wide, other=0.0).to(
        tl.float32
    )
    output = tl.load(out + place * D + lanes, mask=wide, other=0.0).to(tl.float32)
    minus = tl.sum(gradient * output, 0)
    last = S
    if causal:
        last = tl.maximum(tl.minimum(S, (t + S - T + 1).to(tl.int32)), 0)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, last, KEYS):
        places = first + tl.arange(0, KEYS)
        inside = (places < last)[:, None] & wide[None, :]
        at_k = k + b * k_b + g * k_h + places[:, None].to(tl.int64) * k_s + lanes[None, :]
        at_v = v + b * v_b + g * v_h + places[:, None].to(tl.int64) * v_s + lanes[None, :]
        keys = tl.load(at_k, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(at_v, mask=inside, other=0.0).to(tl.float32)
        scores = tl.sum(keys * query[None, :], 1) * scale - tl.load(lse + place)
        weights = tl.exp(tl.where(places < last, scores, -float("inf")))
        slope = weights * (tl.sum(values * gradient[None, :], 1) - minus)
        total += tl.sum(slope[:, None] * keys, 0)
    tl.store(dq + place * D + lanes, total * scale, mask=lanes < D)


@triton.jit
def _of_key(dout, q, k, v, out, lse, dk, dv, T, S, H, G, D, scale, causal,
            o_b, o_h, o_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
            QUERIES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    s, g, b = place % S, place // S % G, place // S // G
    lanes = tl.arange(0, WIDTH)
    wide = lanes < D
    key = tl.load(k + b * k_b + g * k_h + s * k_s + lanes, mask=wide, other=0.0).to(tl.float32)
    value = tl.load(v + b * v_b + g * v_h + s * v_s + lanes, mask=wide, other=0.0).to(tl.float32)
    begin = 0
    if causal:
        begin = tl.maximum((s - S + T).to(tl.int32), 0)
    key_sum = tl.zeros([WIDTH], tl.float32)
    value_sum = tl.zeros([WIDTH], tl.float32)
    for member in range(H // G):
        h = g * (H // G) + member
        for first in range(begin, T, QUERIES):
            places = first + tl.arange(0, QUERIES)
            inside = (places < T)[:, None] & wide[None, :]
            rows = places[:, None].to(tl.int64)
            at_q = q + b * q_b + h * q_h + rows * q_t + lanes[None, :]
            at_o = dout + b * o_b + h * o_h + rows * o_t + lanes[None, :]
            at_out = out + ((b * H + h) * T + rows) * D + lanes[None, :]
            queries = tl.load(at_q, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.load(at_o, mask=inside, other=0.0).to(tl.float32)
            outputs = tl.load(at_out, mask=inside, other=0.0).to(tl.float32)
            saved = tl.load(lse + (b * H + h) * T + places, mask=places < T, other=float("inf"))
            weights = tl.exp(tl.sum(queries * key[None, :], 1) * scale - saved)
            minus = tl.sum(outputs * gradient, 1)
            slope = weights * (tl.sum(gradient * value[None, :], 1) - minus)
            key_sum += tl.sum(slope[:, None] * queries, 0)
            value_sum += tl.sum(weights[:, None] * gradient, 0)
    tl.store(dk + place * D + lanes, key_sum * scale, mask=lanes < D)
    tl.store(dv + place * D + lanes, value_sum, mask=lanes < D)


def flash_attention_backward(dout, q, k, v, out, lse, causal, dq, dk, dv):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    strides = *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    sizes = T, S, H, G, D, D**-0.5, int(causal)
    width = triton.next_power_of_2(D)
    if B * H * T:
        _of_query[(B * H * T,)](dout, q, k, v, out, lse, dq, *sizes, *strides, KEYS=32, WIDTH=width)
    if B * G * S:
        _of_key[(B * G * S,)](
            dout, q, k, v, out, lse, dk, dv, *sizes, *strides, QUERIES=32, WIDTH=width
        )
