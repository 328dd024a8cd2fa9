# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of rows that fit into registers: one program a row, one launch."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.softmax_topk.kernels_order import (
    LOG2_E,
    emit_in_order,
    emit_summary,
    exactly,
    larger,
    origin_of,
    places,
    temperature_of,
    threshold,
    value_of,
)


@triton.jit
def best_kernel(
    logits, temperatures, temperature, values, indices, lse, row_max,
    V, logits_row,
    BLOCK: tl.constexpr, PER_ROW: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K = 1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * logits_row + column, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    peak = tl.reduce(x, 0, larger)
    total = tl.sum(tl.exp2((x - origin_of(peak)) * (LOG2_E / temperature)), 0)
    is_best = inside & ((x >= peak) | (x != x))
    first = tl.min(tl.where(is_best, column, BLOCK), 0)
    tl.store(values + row, value_of(peak, peak, total, temperature, LOG))
    tl.store(indices + row, first.to(tl.int64))
    emit_summary(lse, row_max, row, peak, total, temperature)


@triton.jit(do_not_specialize=["logits_row"])
def short_kernel(
    logits, temperatures, temperature, kept_logits, kept_columns, values, indices, lse, row_max,
    V, K, logits_row,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, GROUPS: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr, PER_ROW: tl.constexpr,
    LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A threshold from group maxima leaves a few more than K; where it leaves too many, bisection.

    A group is what a few threads hold. With GROUPS ≥ 2K and no ties about 1.4 K logits remain.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * logits_row + column, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    each = tl.reduce(tl.reshape(x, [BLOCK // THREADS, THREADS]), 0, larger)
    maxima = tl.reduce(tl.reshape(each, [GROUPS, THREADS // GROUPS]), 1, larger)
    peak = tl.reduce(maxima, 0, larger)
    total = tl.sum(tl.exp2((x - origin_of(peak)) * (LOG2_E / temperature)), 0)
    kept_logits += row * CAP
    kept_columns += row * CAP
    if RANKED:
        chosen = inside & ((x < threshold(maxima, K)) == 0)
        place, count = places(chosen, THREADS)
        if count > CAP:
            chosen = exactly(x, column, inside, K, SHIFT)
            place, count = places(chosen, THREADS)
    else:
        chosen = exactly(x, column, inside, K, SHIFT)
        place, count = places(chosen, THREADS)
    tl.store(kept_logits + place, x, mask=chosen)
    tl.store(kept_columns + place, column, mask=chosen)
    tl.debug_barrier()
    emit_in_order(
        kept_logits, kept_columns, count, peak, total, temperature, row, values, indices, K,
        CAP, LOG, SHIFT, RANKED,
    )  # fmt: skip
    emit_summary(lse, row_max, row, peak, total, temperature)
