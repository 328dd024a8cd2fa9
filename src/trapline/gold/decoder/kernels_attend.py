# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of a short decoding step, from the joined projections to the heads' answers.

One kernel norms and turns queries and keys, stores the new key and value, and attends. The new
position is taken from registers, so nobody waits for it to be stored.

Rows may come in groups of BEAMS that share their first positions (`prefix`): those lie on the pages
of the group, and one program reads them once for all rows of a group. What a row has alone is its
tail, on pages of its own. Without groups everything is tail. Each program leaves its part with the
logarithm of its softmax sum, unless there is only one a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def turned(
    qkv, at, live, position, cosine, sine, norm, eps, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Heads that begin at `at`, (M, BLOCK_D), normed, turned, and rounded as when stored."""
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = D // 2
    partner = tl.where(d < half, d + half, d - half)
    inside = live[:, None] & (d < D)[None, :]
    own = tl.load(qkv + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(qkv + at[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        across = tl.load(norm + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
        own = (own * scale * weight).to(qkv.dtype.element_ty).to(tl.float32)
        other = (other * scale * across).to(qkv.dtype.element_ty).to(tl.float32)
    angle = position[:, None] * half + (d % half)[None, :]
    cos = tl.load(cosine + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sine + angle, mask=inside, other=0.0).to(tl.float32)
    sign = tl.where(d < half, -1.0, 1.0)[None, :]
    return (own * cos + sign * other * sin).to(qkv.dtype.element_ty)


@triton.jit
def over_pages(
    q, keys, values, table, g, begin, end, peak, total, weighted, scale,
    G, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds positions begin … end − 1 of a page table to a softmax that runs; scale has log2 e."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        inside = s < end
        page = tl.load(table + s // P, mask=inside, other=0).to(tl.int64)
        at = ((page * P + s % P) * G + g)[:, None] * D + d[None, :]
        stored = inside[:, None] & (d < D)[None, :]
        k = tl.load(keys + at, mask=stored, other=0.0)
        v = tl.load(values + at, mask=stored, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        correction = tl.exp2(peak - new_peak)
        total = total * correction + tl.sum(weights, 1)
        weighted = weighted * correction[:, None]
        weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision=PRECISION)
        peak = new_peak
    return peak, total, weighted


@triton.jit
def leave(
    out, lse, part, row, head, live, peak, total, weighted, rows, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes a part, and the logarithm (to 2) of its sum where parts are still to be merged."""
    d = tl.arange(0, BLOCK_D)
    empty = total == 0.0
    answer = weighted / tl.where(empty, 1.0, total)[:, None]
    at = (part * rows + row).to(tl.int64) * H + head
    inside = live[:, None] & (d < D)[None, :]
    tl.store(out + at[:, None] * D + d[None, :], answer.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + at, tl.where(empty, float("-inf"), peak + tl.log2(total)), mask=live)


@triton.jit
def attend_kernel(
    qkv, keys, values, pages, tails, prefix, positions, active, cosine, sine, q_norm, k_norm,
    out, lse, rows, G, qkv_row, pages_row, tails_row, scale, eps, window,
    common, splits,
    BEAMS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, P: tl.constexpr, TAIL_P: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of the common beginning of a group of rows, or of one row's tail, for one kv head.

    The first rows / BEAMS · G · common programs are of the first kind, the others of the second.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    H = G * R
    of_groups = 0
    if BEAMS > 1:
        of_groups = rows // BEAMS * G * common
    number = tl.program_id(0)
    if number < of_groups:
        if BEAMS > 1:
            split = number % common
            g = number // common % G
            group = number // (common * G)
            m = tl.arange(0, BLOCK_M)
            live = m < BEAMS * R
            row = group * BEAMS + m // R
            head = g * R + m % R
            position = tl.load(positions + row, mask=live, other=0)
            at = row.to(tl.int64) * qkv_row + head * D
            q = turned(qkv, at, live, position, cosine, sine, q_norm, eps, D, BLOCK_D)
            length = tl.load(prefix + group)
            oldest = 0
            if WINDOWED:
                now = tl.load(positions + group * BEAMS).to(tl.int32)
                oldest = tl.minimum(tl.maximum(now - window + 1, 0), length)
            chunk = tl.cdiv(tl.cdiv(length - oldest, common), BLOCK_S) * BLOCK_S
            begin = oldest + split * chunk
            end = tl.minimum(begin + chunk, length)
            peak, total, weighted = over_pages(
                q, keys, values, pages + group * pages_row, g, begin, end,
                tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, BLOCK_D], tl.float32), scale,
                G, D, BLOCK_D, BLOCK_S, P, PRECISION,
            )  # fmt: skip
            leave(out, lse, split, row, head, live, peak, total, weighted, rows, H, D, BLOCK_D)
    else:
        number -= of_groups
        split_t = number % splits
        g_t = number // splits % G
        row_t = number // (splits * G)
        m_t = tl.arange(0, 16)
        live_t = m_t < R
        now_t = tl.load(positions + row_t)
        origin = row_t.to(tl.int64) * qkv_row
        head_t = g_t * R + m_t
        place_t = tl.zeros([16], tl.int64) + now_t
        q_t = turned(
            qkv, origin + head_t * D, live_t, place_t, cosine, sine, q_norm, eps, D, BLOCK_D
        )
        before = 0
        if BEAMS > 1:
            before = tl.load(prefix + row_t // BEAMS)
        length_t = now_t.to(tl.int32) - before
        first = 0
        if WINDOWED:
            first = tl.minimum(tl.maximum(length_t - window + 1, 0), length_t)
        chunk_t = tl.cdiv(tl.cdiv(length_t - first, splits), BLOCK_S) * BLOCK_S
        begin_t = first + split_t * chunk_t
        end_t = tl.minimum(begin_t + chunk_t, length_t)
        table = tails + row_t.to(tl.int64) * tails_row
        peak_t = tl.full([16], float("-inf"), tl.float32)
        total_t = tl.zeros([16], tl.float32)
        weighted_t = tl.zeros([16, BLOCK_D], tl.float32)
        if split_t == 0:
            one = tl.arange(0, 1)
            d = tl.arange(0, BLOCK_D)
            fresh = turned(
                qkv, origin + (H + g_t) * D + one, one == 0, now_t + one,
                cosine, sine, k_norm, eps, D, BLOCK_D,
            )  # fmt: skip
            v_at = qkv + origin + (H + G + g_t) * D + d
            v_new = tl.load(v_at, mask=d < D, other=0.0)
            peak_t = tl.sum(q_t.to(tl.float32) * fresh.to(tl.float32), 1) * scale
            total_t += 1.0
            weighted_t += v_new.to(tl.float32)[None, :]
            page = tl.load(table + length_t // TAIL_P).to(tl.int64)
            slot = ((page * TAIL_P + length_t % TAIL_P) * G + g_t) * D + d
            writes = (d < D) & (tl.load(active + row_t) != 0)
            tl.store(keys + slot, tl.reshape(fresh, [BLOCK_D]), mask=writes)
            tl.store(values + slot, v_new, mask=writes)
        peak_t, total_t, weighted_t = over_pages(
            q_t, keys, values, table, g_t, begin_t, end_t, peak_t, total_t, weighted_t, scale,
            G, D, BLOCK_D, BLOCK_S, TAIL_P, PRECISION,
        )  # fmt: skip
        leave(
            out, lse, common + split_t, row_t + m_t * 0, head_t, live_t, peak_t, total_t,
            weighted_t, rows, H, D, BLOCK_D,
        )  # fmt: skip


@triton.jit
def merge_kernel(
    parts, lse, out, count, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: its parts weighed by their shares of the softmax sum."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_PARTS)
    at = part * heads.to(tl.int64) + head
    logs = tl.load(lse + at, mask=part < count, other=float("-inf"))
    shares = tl.exp2(logs - tl.max(logs, 0))
    shares = shares / tl.sum(shares, 0)
    d = tl.arange(0, BLOCK_D)
    inside = (part < count)[:, None] & (d < D)[None, :]
    values = tl.load(parts + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    answer = tl.sum(values * shares[:, None], 0)
    tl.store(out + head * D + d, answer.to(out.dtype.element_ty), mask=d < D)
