"""One program a token and head for the copy, one a sequence and query head for attention."""

import triton
import triton.language as tl


@triton.jit
def _copy(new, pages, slots, G, D, page_size, n_n, n_g, p_p, p_s, p_g, WIDTH: tl.constexpr):
    token = (tl.program_id(0) // G).to(tl.int64)
    head = tl.program_id(0) % G
    slot = tl.load(slots + token)
    if slot >= 0:
        lanes = tl.arange(0, WIDTH)
        row = tl.load(new + token * n_n + head * n_g + lanes, mask=lanes < D)
        at = pages + slot // page_size * p_p + slot % page_size * p_s + head * p_g
        tl.store(at + lanes, row, mask=lanes < D)


@triton.jit
def _attend(q, k_pages, v_pages, table, lengths, out, H, G, D, page_size, scale, q_b, q_h,
            kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b,
            ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, h = program // H, program % H
    g = h * G // H
    lanes = tl.arange(0, WIDTH)
    known = lanes < D
    query = tl.load(q + batch * q_b + h * q_h + lanes, mask=known, other=0.0).to(tl.float32)
    length = tl.load(lengths + batch)
    largest = -float("inf")
    summed = 0.0
    total = tl.zeros([WIDTH], tl.float32)
    rows = tl.arange(0, ROWS)
    # Page by page.
    for number in range(tl.cdiv(length, page_size)):
        page = tl.load(table + batch * table_b + number).to(tl.int64)
        inside = (rows < page_size) & (number * page_size + rows < length)
        tile = inside[:, None] & known[None, :]
        at_k = k_pages + page * kp_p + g * kp_g + rows[:, None] * kp_s + lanes[None, :]
        at_v = v_pages + page * vp_p + g * vp_g + rows[:, None] * vp_s + lanes[None, :]
        keys = tl.load(at_k, mask=tile, other=0.0).to(tl.float32)
        values = tl.load(at_v, mask=tile, other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(keys * query[None, :], 1) * scale, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp(scores - new)
        summed = summed * tl.exp(largest - new) + tl.sum(weights, 0)
        total = total * tl.exp(largest - new) + tl.sum(values * weights[:, None], 0)
        largest = new
    result = total / tl.where(summed == 0.0, 1.0, summed)
    tl.store(out + program * D + lanes, result, mask=known)


def paged_append(k, v, k_pages, v_pages, slots):
    tokens, G, D = k.shape
    if tokens:
        for new, pages in ((k, k_pages), (v, v_pages)):
            _copy[(tokens * G,)](
                new, pages, slots, G, D, pages.shape[1], *new.stride()[:2], *pages.stride()[:3],
                WIDTH=triton.next_power_of_2(D),
            )  # fmt: skip


def paged_attention(q, k_pages, v_pages, block_table, seq_lens, out):
    B, H, D = q.shape
    page_size, G = k_pages.shape[1], k_pages.shape[2]
    if B:
        _attend[(B * H,)](
            q, k_pages, v_pages, block_table, seq_lens, out, H, G, D, page_size, D**-0.5,
            *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], block_table.stride(0),
            ROWS=triton.next_power_of_2(page_size), WIDTH=triton.next_power_of_2(D),
        )  # fmt: skip
