"""A paged KV cache in Triton: one program per sequence and kv head, page after page."""

import triton
import triton.language as tl


@triton.jit
def write(src, dst, slots, rows, d, page, s0, s1, p0, p1, p2, D: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    slot = tl.load(slots + n)
    i = tl.arange(0, D)
    ok = (i < d) & (slot >= 0)
    x = tl.load(src + n * s0 + g * s1 + i, mask=ok)
    tl.store(dst + (slot // page) * p0 + (slot % page) * p1 + g * p2 + i, x, mask=ok)


@triton.jit
def attend(q, kp, vp, table, lens, out, H, G, d, page, scale, q0, q1, k0, k1, k2, v0, v1, v2, t0,
           R: tl.constexpr, P: tl.constexpr, D: tl.constexpr):
    b = (tl.program_id(0) // G).to(tl.int64)
    g = tl.program_id(0) % G
    share = H // G
    r = tl.arange(0, R)
    i = tl.arange(0, D)
    p = tl.arange(0, P)
    rows = (r < share)[:, None] & (i < d)[None, :]
    x = tl.load(q + b * q0 + (g * share + r)[:, None] * q1 + i[None, :], mask=rows, other=0.0)
    x = x.to(tl.float32)
    n = tl.load(lens + b)
    m = tl.full([R], -float("inf"), tl.float32)
    z = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    for j in range(0, (n + page - 1) // page):
        at = tl.load(table + b * t0 + j).to(tl.int64)
        live = (p < page) & (j * page + p < n)
        ok = live[:, None] & (i < d)[None, :]
        k = tl.load(kp + at * k0 + p[:, None] * k1 + g * k2 + i[None, :], mask=ok, other=0.0)
        v = tl.load(vp + at * v0 + p[:, None] * v1 + g * v2 + i[None, :], mask=ok, other=0.0)
        s = tl.sum(x[:, None, :] * k.to(tl.float32)[None, :, :], 2) * scale
        s = tl.where(live[None, :], s, -float("inf"))
        top = tl.maximum(m, tl.max(s, 1))
        w = tl.exp(s - top[:, None])
        f = tl.exp(m - top)
        z = z * f + tl.sum(w, 1)
        acc = acc * f[:, None] + tl.sum(w[:, :, None] * v.to(tl.float32)[None, :, :], 1)
        m = top
    y = acc / tl.where(z == 0, 1.0, z)[:, None]
    tl.store(out + (b * H + g * share + r)[:, None] * d + i[None, :], y, mask=rows)


def paged_append(k, v, k_pages, v_pages, slots):
    n, g, d = k.shape
    for first in range(0, n, 32768):
        part = slice(first, first + 32768)
        for src, dst in ((k[part], k_pages), (v[part], v_pages)):
            write[(src.shape[0], g)](
                src, dst, slots[part], n, d, dst.shape[1], *src.stride()[:2], *dst.stride()[:3],
                D=triton.next_power_of_2(d),
            )


def paged_attention(q, k_pages, v_pages, block_table, seq_lens, out):
    b, h, d = q.shape
    page, g = k_pages.shape[1:3]
    if b:
        attend[(b * g,)](
            q, k_pages, v_pages, block_table, seq_lens, out, h, g, d, page, d**-0.5,
            *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], block_table.stride(0),
            R=triton.next_power_of_2(h // g), P=triton.next_power_of_2(page),
            D=triton.next_power_of_2(d),
        )
