"""Flash attention in Triton: tiles are multiplied in half precision, on the tensor cores."""

import triton
import triton.language as tl


@triton.jit
def kernel(Q, K, V, O, L, T, S, H, G, d, scale, q0, q1, q2, k0, k1, k2, v0, v1, v2,
           CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    tiles = tl.cdiv(T, M)
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // (H // G)
    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    i = tl.arange(0, D)
    ok = (m < T)[:, None] & (i < d)[None, :]
    at_q = Q + b * q0 + h * q1 + m[:, None].to(tl.int64) * q2 + i[None, :]
    q = tl.load(at_q, mask=ok, other=0.0).to(tl.float16)
    acc = tl.zeros([M, D], tl.float32)
    top = tl.full([M], -float("inf"), tl.float32)
    z = tl.zeros([M], tl.float32)
    for s in range(0, S, N):
        n = s + tl.arange(0, N)
        tile = (n < S)[:, None] & (i < d)[None, :]
        at_k = K + b * k0 + g * k1 + n[:, None].to(tl.int64) * k2 + i[None, :]
        at_v = V + b * v0 + g * v1 + n[:, None].to(tl.int64) * v2 + i[None, :]
        k = tl.load(at_k, mask=tile, other=0.0).to(tl.float16)
        v = tl.load(at_v, mask=tile, other=0.0).to(tl.float16)
        x = tl.dot(q, tl.trans(k)) * scale
        live = (n < S)[None, :]
        if CAUSAL:
            live = live & (n[None, :] <= m[:, None] + S - T)
        x = tl.where(live, x, -float("inf"))
        new = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(x - safe[:, None])
        f = tl.exp(top - safe)
        z = z * f + tl.sum(p, 1)
        acc = acc * f[:, None] + tl.dot(p.to(tl.float16), v)
        top = new
    none = z == 0
    y = acc / tl.where(none, 1.0, z)[:, None]
    at = bh * T + m
    tl.store(O + at[:, None] * d + i[None, :], y, mask=ok)
    tl.store(L + at, tl.where(none, -float("inf"), top + tl.log(z)), mask=m < T)


def flash_attention(q, k, v, causal, out, lse):
    B, H, T, d = q.shape
    if B * H * T == 0:
        return
    kernel[(B * H * triton.cdiv(T, 64),)](
        q, k, v, out, lse, T, k.shape[2], H, k.shape[1], d, d**-0.5,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        CAUSAL=bool(causal), M=64, N=32, D=max(16, triton.next_power_of_2(d)),
    )
