"""One node and query head a program: tiles of the prefix, then the ancestors one by one."""

import triton
import triton.language as tl


@triton.jit
def _node(q, k, v, parents, out, prefix, N, H, G, D, scale, parents_b,
          q_b, q_h, q_n, k_b, k_g, k_s, v_b, v_g, v_s,
          KEYS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    node, h, b = place % N, place // N % H, place // N // H
    g = h * G // H
    lanes = tl.arange(0, WIDTH)
    known = lanes < D
    query = tl.load(q + b * q_b + h * q_h + node * q_n + lanes, mask=known, other=0.0)
    query = query.to(tl.float32)
    keys, values = k + b * k_b + g * k_g, v + b * v_b + g * v_g
    largest = -float("inf")
    summed = 0.0
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, prefix, KEYS):
        rows = first + tl.arange(0, KEYS)
        inside = (rows < prefix)[:, None] & known[None, :]
        at = rows[:, None].to(tl.int64)
        key = tl.load(keys + at * k_s + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values + at * v_s + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(rows < prefix, tl.sum(key * query[None, :], 1) * scale, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp(scores - new)
        summed = summed * tl.exp(largest - new) + tl.sum(weights, 0)
        total = total * tl.exp(largest - new) + tl.sum(value * weights[:, None], 0)
        largest = new
    above = node.to(tl.int32)
    while above >= 0:
        row = (prefix + above).to(tl.int64)
        key = tl.load(keys + row * k_s + lanes, mask=known, other=0.0).to(tl.float32)
        value = tl.load(values + row * v_s + lanes, mask=known, other=0.0).to(tl.float32)
        score = tl.sum(key * query, 0) * scale
        new = tl.maximum(largest, score)
        weight = tl.exp(score - new)
        summed = summed * tl.exp(largest - new) + weight
        total = total * tl.exp(largest - new) + value * weight
        largest = new
        above = tl.load(parents + b * parents_b + above)
    tl.store(out + place * D + lanes, total / summed, mask=known)


def tree_attention(q, k, v, parents, prefix_len, out):
    B, H, N, D = q.shape
    if B * N:
        _node[(B * H * N,)](
            q, k, v, parents, out, prefix_len, N, H, k.shape[1], D, D**-0.5, parents.stride(0),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            KEYS=32, WIDTH=triton.next_power_of_2(D),
        )  # fmt: skip
