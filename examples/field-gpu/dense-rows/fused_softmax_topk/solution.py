"""Softmax + top-k in Triton: one program per row, k rounds of argmax over the row."""

import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, p_ptr, i_ptr, V, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    cols = tl.arange(0, BLOCK)
    m = -float("inf")
    z = 0.0
    for s in range(0, V, BLOCK):
        x = tl.load(x_ptr + s + cols, mask=s + cols < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(x, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        z = z * tl.exp(m - safe) + tl.sum(tl.exp(x - safe), 0)
        m = new
    last_v = float("inf")
    last_i = -1
    for r in range(K):
        best_v = -float("inf")
        best_i = V
        for s in range(0, V, BLOCK):
            c = s + cols
            x = tl.load(x_ptr + c, mask=c < V, other=-float("inf")).to(tl.float32)
            live = (c < V) & ((x < last_v) | ((x == last_v) & (c > last_i)))
            v = tl.max(tl.where(live, x, -float("inf")), 0)
            i = tl.min(tl.where(live & (x == v), c, V), 0)
            take = (i < V) & ((best_i == V) | (v > best_v))
            best_v = tl.where(take, v, best_v)
            best_i = tl.where(take, i, best_i)
        tl.store(p_ptr + row * K + r, tl.exp(best_v - m) / z)
        tl.store(i_ptr + row * K + r, best_i.to(tl.int64))
        last_v = best_v
        last_i = best_i


def softmax_topk(logits, k, probs, indices):
    n, v = logits.shape
    if n:
        kernel[(n,)](logits, probs, indices, v, k, BLOCK=min(triton.next_power_of_2(v), 8192))
