# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Parts of the same rows, from several programs, merged by their share of the softmax."""

import triton
import triton.language as tl

from trapline.gold.attention.paged.triton.rows import rows_from


@triton.jit
def part_at(parts, stats, slot, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The largest scores, sums and weighted sums of a tile of rows, as one program stored them."""
    d = tl.arange(0, BLOCK_D)
    # Another multiprocessor wrote them: what this one has cached may be older.
    peak = tl.load(stats + slot * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + slot * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
    inside = mask[:, None] & (d < D)[None, :]
    at = parts + slot[:, None] * D + d[None, :]
    return peak, total, tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def merge_four(
    parts, stats, slot, step, left, live, peak, total, acc, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Adds up to four parts, `step` apart, `left` of them there: all loads, then all arithmetic."""
    m0, n0, x0 = part_at(parts, stats, slot, live, D, BLOCK_D)
    m1, n1, x1 = part_at(parts, stats, slot + step, live & (left > 1), D, BLOCK_D)
    m2, n2, x2 = part_at(parts, stats, slot + 2 * step, live & (left > 2), D, BLOCK_D)
    m3, n3, x3 = part_at(parts, stats, slot + 3 * step, live & (left > 3), D, BLOCK_D)
    new_peak = tl.maximum(peak, tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)))
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    c = tl.exp2(peak - origin)
    c0, c1 = tl.exp2(m0 - origin), tl.exp2(m1 - origin)
    c2, c3 = tl.exp2(m2 - origin), tl.exp2(m3 - origin)
    total = total * c + n0 * c0 + n1 * c1 + n2 * c2 + n3 * c3
    acc = acc * c[:, None] + x0 * c0[:, None] + x1 * c1[:, None]
    acc += x2 * c2[:, None] + x3 * c3[:, None]
    return new_peak, total, acc


@triton.jit
def merge(
    parts, stats, prefix_parts, prefix_stats, out, first, last, begin_q, top, count, g, R, H,
    queries, parts_of_prefix, out_row, out_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """All parts of a tile of `count` rows, programs first … last, and those of a shared prefix.

    The first program ended with these rows and stored them second (slot 2p + 1); the others began
    with them.
    """
    d = tl.arange(0, BLOCK_D)
    for begin in range(0, count, ROWS):
        r = begin + tl.arange(0, ROWS)
        live = r < count
        _, row, head, _ = rows_from(top + begin, begin_q, 0, g, R, ROWS, ALONE)
        slot = (2 * first + 1) * BLOCK_M + r.to(tl.int64)
        peak, total, acc = part_at(parts, stats, slot, live, D, BLOCK_D)
        for p in range(first + 1, last + 1, 4):
            slot = 2 * p * BLOCK_M + r.to(tl.int64)
            peak, total, acc = merge_four(
                parts, stats, slot, 2 * BLOCK_M, last + 1 - p, live, peak, total, acc, D, BLOCK_D
            )
        if prefix_parts is not None:
            for p in range(0, parts_of_prefix, 4):
                slot = (p * queries + row) * H + head
                peak, total, acc = merge_four(
                    prefix_parts, prefix_stats, slot, queries * H, parts_of_prefix - p, live,
                    peak, total, acc, D, BLOCK_D,
                )  # fmt: skip
        answer = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
        inside = live[:, None] & (d < D)[None, :]
        tl.store(target, answer.to(out.dtype.element_ty), mask=inside)
