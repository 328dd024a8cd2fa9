# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of a decoding step, from the joined projections to the output of the heads.

One kernel applies head norms and RoPE, stores the new key and value, and attends. The new position
is used from registers. Cached positions do not depend on this step, so the first tile of them is
loaded before the projections are ready.

Rows may come in groups of BEAMS that share their first positions (`prefix`) on the pages of the
group; one program reads these once for all rows of the group. The tail of a row lies on its own
pages. Without groups everything is tail. Each program writes a partial result with the logarithm of
its softmax sum, unless it is the only one of a row. Few partial results are merged by the last
program of a group, many by `merge_kernel`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.decoder.triton.step_linear import prefetch, prefetch_share
from trapline.gold.device import launched


@triton.jit
def apply_rope(
    qkv, at, live, position, cosine, sine, norm, eps, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Heads that begin at `at` (M, BLOCK_D), with norm and RoPE, rounded as when stored."""
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
def load_kv_tile(
    keys, values, table, start, end, g, G,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Keys and values (BLOCK_S, BLOCK_D) from position `start` on; zero from `end` on."""
    d = tl.arange(0, BLOCK_D)
    s = start + tl.arange(0, BLOCK_S)
    inside = s < end
    page = tl.load(table + s // P, mask=inside, other=0).to(tl.int64)
    at = ((page * P + s % P) * G + g)[:, None] * D + d[None, :]
    stored = inside[:, None] & (d < D)[None, :]
    k = tl.load(keys + at, mask=stored, other=0.0)
    v = tl.load(values + at, mask=stored, other=0.0)
    return k, v


@triton.jit
def prefetch_kv_tile(
    keys, values, table, start, end, g, G,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Prefetches what `load_kv_tile` will read, a cache line at a time, if start < end."""
    if start < end:
        s = tl.minimum(start + tl.arange(0, BLOCK_S), end - 1)
        page = tl.load(table + s // P).to(tl.int64)
        lines: tl.constexpr = BLOCK_D // 64 if BLOCK_D > 64 else 1
        line = tl.minimum(tl.arange(0, lines) * 64, D - 1)
        at = ((page * P + s % P) * G + g)[:, None] * D + line[None, :]
        prefetch(keys + at)
        prefetch(values + at)


@triton.jit
def softmax_update(
    q, k, v, start, end, peak, total, weighted, scale,
    BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one tile to a running softmax; `scale` includes log2 e."""
    inside = start + tl.arange(0, BLOCK_S) < end
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # Without any key so far, −inf − (−inf) would be NaN.
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - origin[:, None])
    correction = tl.exp2(peak - origin)
    total = total * correction + tl.sum(weights, 1)
    weighted = weighted * correction[:, None]
    weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision=PRECISION)
    return new_peak, total, weighted


@triton.jit
def store_partial(
    out, lse, part, row, head, live, peak, total, weighted, rows, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes a partial result, and log2 of its softmax sum if it is to be merged."""
    d = tl.arange(0, BLOCK_D)
    empty = total == 0.0
    answer = weighted / tl.where(empty, 1.0, total)[:, None]
    at = (part * rows + row).to(tl.int64) * H + head
    inside = live[:, None] & (d < D)[None, :]
    tl.store(out + at[:, None] * D + d[None, :], answer.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + at, tl.where(empty, float("-inf"), peak + tl.log2(total)), mask=live)


@triton.jit
def merge_by_last_program(
    parts, lse, out, arrived, group, g, rows, G, programs,
    BEAMS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Counts a group's programs for one kv head; the last one merges the results of all its rows.

    The barrier orders all threads' stores before the count, which releases and acquires. Loads of
    other programs' stores bypass L1, which may hold stale lines.
    """
    tl.debug_barrier()
    place = arrived + group * G + g
    before = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu")
    if before == programs - 1:
        tl.store(place, 0)
        m = tl.arange(0, BLOCK_M)
        live = m < BEAMS * R
        row = group.to(tl.int64) * BEAMS + m // R
        at = row * (G * R) + g * R + m % R
        d = tl.arange(0, BLOCK_D)
        inside = live[:, None] & (d < D)[None, :]
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for part in tl.static_range(PARTS):
            here = (part * rows + row) * (G * R) + g * R + m % R
            log = tl.load(lse + here, mask=live, other=0.0, cache_modifier=".cg")
            peak = tl.maximum(peak, log)
        total = tl.zeros([BLOCK_M], tl.float32)
        answer = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for part in tl.static_range(PARTS):
            here = (part * rows + row) * (G * R) + g * R + m % R
            log = tl.load(lse + here, mask=live, other=0.0, cache_modifier=".cg")
            places = here[:, None] * D + d[None, :]
            value = tl.load(parts + places, mask=inside, other=0.0, cache_modifier=".cg")
            share = tl.exp2(log - peak)
            total += share
            answer += value * share[:, None]
        answer = answer / total[:, None]
        tl.store(out + at[:, None] * D + d[None, :], answer.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend_prefix(
    number, qkv, keys, values, pages, prefix, positions, cosine, sine, q_norm,
    out, lse, rows, G, qkv_row, pages_row, scale, eps, window, common,
    BEAMS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, P: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, after, after_count,
):  # fmt: skip
    """One split of a group's prefix, for all its rows and one kv head."""
    split = number % common
    g = number // common % G
    group = number // (common * G)
    m = tl.arange(0, BLOCK_M)
    live = m < BEAMS * R
    row = group * BEAMS + m // R
    head = g * R + m % R
    position = tl.load(positions + row, mask=live, other=0)
    length = tl.load(prefix + group)
    oldest = 0
    if WINDOWED:
        now = tl.load(positions + group * BEAMS).to(tl.int32)
        oldest = tl.minimum(tl.maximum(now - window + 1, 0), length)
    chunk = tl.cdiv(tl.cdiv(length - oldest, common), 16) * 16
    begin = oldest + split * chunk
    end = tl.minimum(begin + chunk, length)
    table = pages + group.to(tl.int64) * pages_row
    k, v = load_kv_tile(keys, values, table, begin, end, g, G, D, BLOCK_D, BLOCK_S, P)
    if PDL:
        prefetch_kv_tile(keys, values, table, begin + BLOCK_S, end, g, G, D, BLOCK_D, BLOCK_S, P)
        gdc_wait()
        gdc_launch_dependents()
        if after is not None:
            prefetch_share(after, after_count)
    at = row.to(tl.int64) * qkv_row + head * D
    q = apply_rope(qkv, at, live, position, cosine, sine, q_norm, eps, D, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak, total, weighted = softmax_update(
        q, k, v, begin, end, peak, total, weighted, scale, BLOCK_S, PRECISION
    )
    for start in range(begin + BLOCK_S, end, BLOCK_S):
        k, v = load_kv_tile(keys, values, table, start, end, g, G, D, BLOCK_D, BLOCK_S, P)
        peak, total, weighted = softmax_update(
            q, k, v, start, end, peak, total, weighted, scale, BLOCK_S, PRECISION
        )
    store_partial(out, lse, split, row, head, live, peak, total, weighted, rows, G * R, D, BLOCK_D)


@triton.jit
def attend_tail(
    number, qkv, keys, values, tails, prefix, positions, active, cosine, sine, q_norm, k_norm,
    out, lse, rows, G, qkv_row, tails_row, scale, eps, window, common, splits,
    BEAMS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, P: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, after, after_count,
):  # fmt: skip
    """One split of one row's tail for one kv head; the first one has the new position."""
    split = number % splits
    g = number // splits % G
    row = (number // (splits * G)).to(tl.int64)
    position = tl.load(positions + row)
    before = 0
    if BEAMS > 1:
        before = tl.load(prefix + row // BEAMS)
    length = position.to(tl.int32) - before
    oldest = 0
    if WINDOWED:
        oldest = tl.minimum(tl.maximum(length - window + 1, 0), length)
    chunk = tl.cdiv(tl.cdiv(length - oldest, splits), 16) * 16
    begin = oldest + split * chunk
    end = tl.minimum(begin + chunk, length)
    table = tails + row * tails_row
    k, v = load_kv_tile(keys, values, table, begin, end, g, G, D, BLOCK_D, BLOCK_S, P)
    page = tl.load(table + length // P).to(tl.int64)
    writes = tl.load(active + row) != 0
    if PDL:
        prefetch_kv_tile(keys, values, table, begin + BLOCK_S, end, g, G, D, BLOCK_D, BLOCK_S, P)
        gdc_wait()
        gdc_launch_dependents()
        if after is not None:
            prefetch_share(after, after_count)
    m = tl.arange(0, 16)
    at = row * qkv_row + (g * R + m) * D
    q = apply_rope(qkv, at, m < R, m * 0 + position, cosine, sine, q_norm, eps, D, BLOCK_D)
    peak = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    weighted = tl.zeros([16, BLOCK_D], tl.float32)
    if split == 0:
        one = tl.arange(0, 1)
        d = tl.arange(0, BLOCK_D)
        at_new = row * qkv_row + (G * R + g) * D
        key = apply_rope(
            qkv, at_new + one, one == 0, position + one, cosine, sine, k_norm, eps, D, BLOCK_D
        )
        value = tl.load(qkv + at_new + G * D + d, mask=d < D, other=0.0)
        peak = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
        total += 1.0
        weighted += value.to(tl.float32)[None, :]
        slot = ((page * P + length % P) * G + g) * D + d
        # Not `(d < D) & writes`: the interpreter of Triton 3.9 rejects masks made from scalars.
        stored = d < tl.where(writes, D, 0)
        tl.store(keys + slot, tl.reshape(key, [BLOCK_D]), mask=stored)
        tl.store(values + slot, value, mask=stored)
    peak, total, weighted = softmax_update(
        q, k, v, begin, end, peak, total, weighted, scale, BLOCK_S, PRECISION
    )
    for start in range(begin + BLOCK_S, end, BLOCK_S):
        k, v = load_kv_tile(keys, values, table, start, end, g, G, D, BLOCK_D, BLOCK_S, P)
        peak, total, weighted = softmax_update(
            q, k, v, start, end, peak, total, weighted, scale, BLOCK_S, PRECISION
        )
    head = g * R + m
    part = common + split
    store_partial(
        out, lse, part, row + m * 0, head, m < R, peak, total, weighted, rows, G * R, D, BLOCK_D
    )


@launched
@triton.jit
def attend_kernel(
    qkv, keys, values, pages, tails, prefix, positions, active, cosine, sine, q_norm, k_norm,
    out, lse, merged, arrived, rows, G, qkv_row, pages_row, tails_row, scale, eps, window,
    common, splits,
    BEAMS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, P: tl.constexpr, TAIL_P: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
    after=None, after_count=0,
):  # fmt: skip
    """The first rows / BEAMS · G · common programs read prefixes, the others tails.

    `after` are weights of the next kernel to prefetch: memory is mostly idle during attention.
    """
    number = tl.program_id(0)
    programs = common + BEAMS * splits
    if BEAMS > 1:
        of_groups = rows // BEAMS * G * common
        if number < of_groups:
            attend_prefix(
                number, qkv, keys, values, pages, prefix, positions, cosine, sine, q_norm,
                out, lse, rows, G, qkv_row, pages_row, scale, eps, window, common,
                BEAMS, R, D, BLOCK_D, BLOCK_M, BLOCK_S, P, WINDOWED, PRECISION, PDL,
                after, after_count,
            )  # fmt: skip
            if PARTS > 0:
                merge_by_last_program(
                    out, lse, merged, arrived, number // (common * G), number // common % G,
                    rows, G, programs, BEAMS, R, D, BLOCK_D, BLOCK_M, PARTS,
                )  # fmt: skip
            return
        number -= of_groups
    attend_tail(
        number, qkv, keys, values, tails, prefix, positions, active, cosine, sine, q_norm, k_norm,
        out, lse, rows, G, qkv_row, tails_row, scale, eps, window, common, splits,
        BEAMS, R, D, BLOCK_D, BLOCK_S, TAIL_P, WINDOWED, PRECISION, PDL, after, after_count,
    )  # fmt: skip
    if PARTS > 0:
        merge_by_last_program(
            out, lse, merged, arrived, number // (splits * G * BEAMS), number // splits % G,
            rows, G, programs, BEAMS, R, D, BLOCK_D, BLOCK_M, PARTS,
        )  # fmt: skip


@launched
@triton.jit
def merge_kernel(
    parts, lse, out, count, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: partial results weighted by their softmax sums."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_PARTS)
    at = part.to(tl.int64) * heads + head
    logs = tl.load(lse + at, mask=part < count, other=float("-inf"))
    shares = tl.exp2(logs - tl.max(logs, 0))
    shares = shares / tl.sum(shares, 0)
    d = tl.arange(0, BLOCK_D)
    inside = (part < count)[:, None] & (d < D)[None, :]
    values = tl.load(parts + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    answer = tl.sum(values * shares[:, None], 0)
    tl.store(out + head * D + d, answer.to(out.dtype.element_ty), mask=d < D)
