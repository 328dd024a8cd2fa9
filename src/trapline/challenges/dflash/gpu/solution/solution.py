"""Attention of all nodes of a draft tree: each sees the prefix, its ancestors and itself.

A first kernel writes down the ancestors of every node. The second attends to a part of the keys,
so that a long prefix fills the GPU, and the third merges the parts by their maxima. The query heads
that share a key head are rows of one tile.
"""

import torch
import triton
import triton.language as tl

PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
LEAST_PART = 256


@triton.jit
def _ancestors_kernel(parents, seen, N, parents_b, NODES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    batch, node = program // N, (program % N).to(tl.int32)
    lanes = tl.arange(0, NODES)
    row = lanes == node
    above = tl.load(parents + batch * parents_b + node)
    while above >= 0:
        row = row | (lanes == above)
        above = tl.load(parents + batch * parents_b + above)
    tl.store(seen + program * N + lanes, row.to(tl.int8), mask=lanes < N)


@triton.jit
def _part_kernel(
    q, k, v, seen, parts_out, parts_max, parts_sum, prefix, N, H, G, D, scale, parts, tiles,
    q_b, q_h, q_n, k_b, k_g, k_s, v_b, v_g, v_s,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    part, tile = program % parts, program // parts % tiles
    group, batch = program // parts // tiles % G, program // parts // tiles // G
    members = H // G
    rows = tile.to(tl.int32) * ROWS + tl.arange(0, ROWS)
    there = rows < members * N
    head, node = group * members + rows // N, rows % N
    lanes = tl.arange(0, WIDTH)
    known = lanes < D
    at_q = q + batch * q_b + head * q_h + node * q_n
    inside = there[:, None] & known[None, :]
    queries = tl.load(at_q[:, None] + lanes[None, :], mask=inside, other=0.0)

    length = prefix + N
    share = tl.cdiv(tl.cdiv(length, parts), KEYS) * KEYS
    first = part.to(tl.int32) * share
    last = tl.minimum(first + share, length)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    own = seen + (batch * N + node)[:, None] * N
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        here = keys < last
        tile_k = here[:, None] & known[None, :]
        at = keys[:, None].to(tl.int64)
        key = tl.load(
            k + batch * k_b + group * k_g + at * k_s + lanes[None, :], mask=tile_k, other=0.0
        )
        value = tl.load(
            v + batch * v_b + group * v_g + at * v_s + lanes[None, :], mask=tile_k, other=0.0
        )
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        in_tree = here & (keys >= prefix)
        visible = tl.load(
            own + (keys - prefix)[None, :], mask=there[:, None] & in_tree[None, :], other=0
        )
        visible = (here & (keys < prefix))[None, :] | (visible != 0)
        scores = tl.where(visible, scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp(scores - base[:, None])
        factor = tl.exp(largest - base)
        summed = summed * factor + tl.sum(weights, 1)
        total = total * factor[:, None]
        total = tl.dot(weights.to(value.dtype), value, total, input_precision="ieee")
        largest = new
    place = ((batch * H + head) * N + node) * parts + part
    tl.store(parts_out + place[:, None] * D + lanes[None, :], total, mask=inside)
    tl.store(parts_max + place, largest, mask=there)
    tl.store(parts_sum + place, summed, mask=there)


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
    # Every node sees itself, so that one of the parts has a maximum.
    largest = tl.max(maxima, 0)
    factors = tl.exp(maxima - largest)
    result = tl.sum(totals * factors[:, None], 0) / tl.sum(sums * factors, 0)
    tl.store(out + place * D + lanes, result, mask=lanes < D)


def tree_attention(q, k, v, parents, prefix_len, out):
    B, H, N, D = q.shape
    G = k.shape[1]
    if B * N == 0:
        return
    seen = torch.empty((B, N, N), dtype=torch.int8, device=q.device)
    _ancestors_kernel[(B * N,)](
        parents, seen, N, parents.stride(0), NODES=triton.next_power_of_2(N)
    )
    width = max(16, triton.next_power_of_2(D))
    small = q.element_size() == 4 or width > 128
    rows = 16 if H // G * N <= 16 or small else 64
    tiles = triton.cdiv(H // G * N, rows)
    wanted = triton.cdiv(PROGRAMS, B * G * tiles)
    parts = max(1, min(wanted, triton.cdiv(prefix_len + N, LEAST_PART), 64))
    totals = torch.empty((B, H, N, parts, D), dtype=torch.float32, device=q.device)
    maxima = torch.empty((B, H, N, parts), dtype=torch.float32, device=q.device)
    sums = torch.empty((B, H, N, parts), dtype=torch.float32, device=q.device)
    _part_kernel[(B * G * tiles * parts,)](
        q, k, v, seen, totals, maxima, sums, prefix_len, N, H, G, D, D**-0.5, parts, tiles,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        ROWS=rows, KEYS=32 if small else 64, WIDTH=width, num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge_kernel[(B * H * N,)](
        totals, maxima, sums, out, parts, D, PARTS=triton.next_power_of_2(parts), WIDTH=width
    )
