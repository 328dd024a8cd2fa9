"""One query a program: two passes over the keys, the first for the maximum. No matrix products."""

import triton
import triton.language as tl


@triton.jit
def _query(q, k, v, out, lse, T, S, H, G, D, scale, causal,
           q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
           KEYS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    t, h, b = place % T, place // T % H, place // T // H
    g = h * G // H
    lanes = tl.arange(0, WIDTH)
    wide = lanes < D
    row = tl.load(q + b * q_b + h * q_h + t * q_t + lanes, mask=wide, other=0.0).to(tl.float32)
    keys, values = k + b * k_b + g * k_h, v + b * v_b + g * v_h
    last = S
    if causal:
        last = tl.maximum(tl.minimum(S, (t + S - T + 1).to(tl.int32)), 0)
    largest = -float("inf")
    for first in range(0, last, KEYS):
        places = first + tl.arange(0, KEYS)
        inside = (places < last)[:, None] & wide[None, :]
        at = keys + places[:, None].to(tl.int64) * k_s + lanes[None, :]
        tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(places < last, tl.sum(tile * row[None, :], 1) * scale, -float("inf"))
        largest = tl.maximum(largest, tl.max(scores, 0))
    summed = 0.0
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, last, KEYS):
        places = first + tl.arange(0, KEYS)
        inside = (places < last)[:, None] & wide[None, :]
        at = keys + places[:, None].to(tl.int64) * k_s + lanes[None, :]
        tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(places < last, tl.sum(tile * row[None, :], 1) * scale, -float("inf"))
        weights = tl.exp(scores - largest)
        summed += tl.sum(weights, 0)
        at = values + places[:, None].to(tl.int64) * v_s + lanes[None, :]
        tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tile * weights[:, None], 0)
    none = summed == 0.0
    tl.store(out + place * D + lanes, total / tl.where(none, 1.0, summed), mask=wide)
    tl.store(lse + place, tl.where(none, -float("inf"), largest + tl.log(summed)))


def flash_attention(q, k, v, causal, out, lse):
    B, H, T, D = q.shape
    if B * H * T:
        _query[(B * H * T,)](
            q, k, v, out, lse, T, k.shape[2], H, k.shape[1], D, D**-0.5, int(causal),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            KEYS=32, WIDTH=triton.next_power_of_2(D),
        )  # fmt: skip
