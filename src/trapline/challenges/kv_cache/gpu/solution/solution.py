"""Pages of keys and values: a scattered copy, and attention of one query per sequence.

A sequence is cut into parts that are attended to by different programs, so that a few long
sequences fill the GPU; a second kernel merges the parts by their maxima.
"""

import torch
import triton
import triton.language as tl

PROGRAMS = 528  # four for each of an H200's 132 multiprocessors
LEAST_PART = 256


@triton.jit
def _append_kernel(
    k, v, k_pages, v_pages, slots, G, D, page_size,
    k_n, k_g, v_n, v_g, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page, row = slot // page_size, slot % page_size
    lanes = tl.arange(0, BLOCK)
    head, column = lanes // D, lanes % D
    there = (lanes < G * D) & (slot >= 0)
    key = tl.load(k + token * k_n + head * k_g + column, mask=there)
    value = tl.load(v + token * v_n + head * v_g + column, mask=there)
    tl.store(k_pages + page * kp_p + row * kp_s + head * kp_g + column, key, mask=there)
    tl.store(v_pages + page * vp_p + row * vp_s + head * vp_g + column, value, mask=there)


@triton.jit
def _part_kernel(
    q, k_pages, v_pages, table, lengths, parts_out, parts_max, parts_sum,
    H, G, D, page_size, scale, parts, q_b, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b,
    HEADS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    part, group = program % parts, program // parts % G
    batch = program // parts // G
    members = H // G
    length = tl.load(lengths + batch)
    share = tl.cdiv(tl.cdiv(length, parts), KEYS) * KEYS
    first = part.to(tl.int32) * share
    last = tl.minimum(first + share, length)

    heads = tl.arange(0, HEADS)
    lanes = tl.arange(0, WIDTH)
    known = lanes < D
    there = (heads < members)[:, None] & known[None, :]
    head = group * members + heads
    queries = tl.load(q + batch * q_b + head[:, None] * q_h + lanes[None, :], mask=there, other=0.0)
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    summed = tl.zeros([HEADS], tl.float32)
    for start in range(first, last, KEYS):
        positions = start + tl.arange(0, KEYS)
        inside = positions < last
        page = tl.load(table + batch * table_b + positions // page_size, mask=inside, other=0)
        page, row = page.to(tl.int64), positions % page_size
        tile = inside[:, None] & known[None, :]
        at_k = page * kp_p + row * kp_s + group * kp_g
        at_v = page * vp_p + row * vp_s + group * vp_g
        keys = tl.load(k_pages + at_k[:, None] + lanes[None, :], mask=tile, other=0.0)
        values = tl.load(v_pages + at_v[:, None] + lanes[None, :], mask=tile, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        factor = tl.exp(largest - new)
        summed = summed * factor + tl.sum(weights, 1)
        total = total * factor[:, None]
        total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
        largest = new
    place = (batch * H + head) * parts + part
    tl.store(parts_out + place[:, None] * D + lanes[None, :], total, mask=there)
    tl.store(parts_max + place, largest, mask=heads < members)
    tl.store(parts_sum + place, summed, mask=heads < members)


@triton.jit
def _merge_kernel(
    parts_out, parts_max, parts_sum, out, parts, D, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, PARTS)
    lanes = tl.arange(0, WIDTH)
    there = each < parts
    maxima = tl.load(parts_max + place * parts + each, mask=there, other=-float("inf"))
    sums = tl.load(parts_sum + place * parts + each, mask=there, other=0.0)
    at = (place * parts + each)[:, None] * D + lanes[None, :]
    inside = there[:, None] & (lanes < D)[None, :]
    totals = tl.load(parts_out + at, mask=inside, other=0.0)
    largest = tl.max(maxima, 0)
    factors = tl.where(maxima == -float("inf"), 0.0, tl.exp(maxima - largest))
    summed = tl.sum(sums * factors, 0)
    total = tl.sum(totals * factors[:, None], 0)
    result = total / tl.where(summed == 0.0, 1.0, summed)
    tl.store(out + place * D + lanes, result, mask=lanes < D)


def paged_append(k, v, k_pages, v_pages, slots):
    tokens, G, D = k.shape
    if tokens == 0:
        return
    block = triton.next_power_of_2(G * D)
    _append_kernel[(tokens,)](
        k, v, k_pages, v_pages, slots, G, D, k_pages.shape[1],
        *k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


def paged_attention(q, k_pages, v_pages, block_table, seq_lens, out):
    B, H, D = q.shape
    page_size, G = k_pages.shape[1], k_pages.shape[2]
    if B == 0:
        return
    longest = max(block_table.shape[1] * page_size, 1)
    parts = max(1, min(triton.cdiv(PROGRAMS, B * G), triton.cdiv(longest, LEAST_PART), 128))
    width = max(16, triton.next_power_of_2(D))
    totals = torch.empty((B, H, parts, D), dtype=torch.float32, device=q.device)
    maxima = torch.empty((B, H, parts), dtype=torch.float32, device=q.device)
    sums = torch.empty((B, H, parts), dtype=torch.float32, device=q.device)
    _part_kernel[(B * G * parts,)](
        q, k_pages, v_pages, block_table, seq_lens, totals, maxima, sums,
        H, G, D, page_size, D**-0.5, parts, *q.stride()[:2],
        *k_pages.stride()[:3], *v_pages.stride()[:3], block_table.stride(0),
        HEADS=max(16, triton.next_power_of_2(H // G)), KEYS=32 if q.element_size() == 4 else 64,
        WIDTH=width, num_warps=4, num_stages=3,
    )  # fmt: skip
    _merge_kernel[(B * H,)](
        totals, maxima, sums, out, parts, D, PARTS=triton.next_power_of_2(parts), WIDTH=width
    )
