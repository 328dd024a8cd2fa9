# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decoding over pages on Hopper GPUs, in Gluon: programs of one warp that the copy engine feeds.

The work is shared as in `kernels_paged_shares`, the same answer by the same recurrence, for the
common case: one query a sequence, few heads a group, no window, no cap. A warp alone never waits
for another one, and a few of them keep a multiprocessor's memory busy. A launch may be let in while
the kernel before it ends: until that one is done it only asks for lines of the L2 cache, those of
its first tiles among them (`kernels_paged_hopper_shares`).
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.paged.completion_counters import arrivals
from trapline.gold.attention.paged.hopper.codes import LARGEST, whole
from trapline.gold.attention.paged.hopper.columns import attended_in_columns
from trapline.gold.attention.paged.hopper.merge import merge
from trapline.gold.attention.paged.hopper.ring import ring_for, together
from trapline.gold.attention.paged.hopper.rows import attended_in_rows
from trapline.gold.attention.paged.hopper.work_partition import (
    ask_for_inputs,
    place_of,
    share_by_guess,
    share_when_due,
)
from trapline.gold.attention.paged.triton.append import strides_of
from trapline.gold.attention.paged.triton.codes import FP8, INT4, INT8
from trapline.gold.attention.paged.triton.work_partition import owner_of
from trapline.gold.device import processors

#: Sizes that change from call to call and would otherwise be compiled for again and again.
UNFIXED = ["B", "G", "R", "table_row", "width"]


@gluon.jit
def store_piece(base, a, factor, live, row, STEP: gl.constexpr, FROM: gl.constexpr):
    """Every STEP-th element from FROM on of rows that begin at base + row."""
    layout: gl.constexpr = a.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.arange(0, a.shape[1], layout=gl.SliceLayout(0, layout)) * STEP + FROM
    factor = gl.expand_dims(gl.convert_layout(factor, by_row), 1)
    at = base + gl.expand_dims(gl.convert_layout(row, by_row), 1) + gl.expand_dims(d, 0)
    mask = gl.expand_dims(gl.convert_layout(live, by_row), 1)
    gl.store(at, (a * factor).to(base.dtype.element_ty), mask=mask)


@gluon.jit
def store_rows(
    base, sums, factor, live, row, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """All pieces where their elements belong."""
    a0, a1, a2, a3 = sums
    STEP: gl.constexpr = 1 if KIND == 0 else 2
    SECOND: gl.constexpr = D // 2 if KIND == 0 or KIND == INT4 else 1
    store_piece(base, a0, factor, live, row, STEP, 0)
    if KIND > 0 or HALVES == 2:
        store_piece(base, a1, factor, live, row, STEP, SECOND)
    if KIND == INT4:
        store_piece(base, a2, factor, live, row, STEP, 1)
        store_piece(base, a3, factor, live, row, STEP, 1 + SECOND)


@gluon.jit(do_not_specialize=UNFIXED)
def decode_kernel(
    k_pages, v_pages, keys, values, q, k_scale, v_scale, block_table, seq_lens, out, parts, stats,
    counters, B, G, R, scale, q_row, q_head, table_row, width,
    ks_page, ks_head, ks_place, vs_page, vs_head, vs_place, out_row, out_head,
    P: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr, S: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr,
    NARROW: gl.constexpr, BY_PAIR: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """An equal share of all tiles, in the order sequence, head, keys.

    k_pages and v_pages are the copy engine's, keys and values the same pages as pointers. S:
    positions a tile. STAGES: tiles in the ring. AHEAD: positions that are asked for before the
    kernel before is done. ROWS: at least R. NARROW: products of tiles and programs fit in 32 bits.
    BY_PAIR: there is a counter for every sequence and head; otherwise one for every program. EARLY:
    the next launch is let in at once, not when the last run ends.
    """
    pages = k_pages, v_pages
    ring = ring_for(pages, HALVES * S // k_pages.block_type.shape[2], STAGES)
    pid = gl.program_id(0)
    ask_for_inputs(pid, counters, seq_lens, block_table, q, B, G, table_row, q_row)
    if EARLY:
        gdc_launch_dependents()
    if AHEAD > 0:
        BYTES: gl.constexpr = HALVES * k_pages.block_type.nbytes // k_pages.block_type.shape[2]
        lengths, share, place = share_by_guess(
            pid, pages, keys, values, block_table, seq_lens, B, G, table_row, width,
            P, S, BYTES, AHEAD, BLOCK_B,
        )  # fmt: skip
    else:
        lengths, share, place = share_when_due(pid, seq_lens, B, G, S, BLOCK_B)
    ends, work, programs, at, stop = share
    b, g, tile, n, length = place
    done = 0
    while at < stop:
        run = gl.minimum(stop - at, n - tile)
        row = b.to(gl.int64)
        # Where pages hold no codes there are no scales.
        scales = (
            k_scale + g.to(gl.int64) * ks_head if KIND > 0 else k_scale,
            v_scale + g.to(gl.int64) * vs_head if KIND > 0 else v_scale,
            ks_page, ks_place, vs_page, vs_place,
        )  # fmt: skip
        given = q + row * q_row + g * R * q_head, block_table + row * table_row, pages, ring, scales
        end = gl.minimum((tile + run) * S, length)
        if whole(KIND):
            peak, total, sums, done = attended_in_rows(
                *given, g, R, tile * S, end, done, scale, q_head, P, D, KIND, S
            )
        else:
            peak, total, sums, done = attended_in_columns(
                *given, g, R, tile * S, end, done, scale, q_head, P, D, KIND, HALVES, S
            )
        if not EARLY and at + run >= stop:
            gdc_launch_dependents()
        M: gl.constexpr = peak.shape[0]
        r = gl.arange(0, M, layout=peak.type.layout)
        unit = gl.full_like(peak, 1.0 / LARGEST if whole(KIND) else 1.0)
        if KIND == INT4:
            unit /= 16.0
        answer = row * out_row + g * R * out_head
        if run == n:
            unit /= gl.where(total == 0.0, 1.0, total)
            heads = answer + r.to(gl.int64) * out_head
            store_rows(out, sums, unit, r < R, heads, D, KIND, HALVES)
        else:
            slot = (2 * pid + gl.where(tile == 0, 1, 0)).to(gl.int64) * M + r
            store_rows(parts, sums, unit, r < R, slot * D, D, KIND, HALVES)
            gl.store(stats + slot * 2, peak, mask=r < R)
            gl.store(stats + slot * 2 + 1, total, mask=r < R)
            first = owner_of(at - tile, work, programs, NARROW)
            last = owner_of(at - tile + n - 1, work, programs, NARROW)
            # All that this program stored comes before its arrival, and what others stored
            # before theirs comes before the merge.
            together()
            counter = counters + (b * G + g if BY_PAIR else first)
            arrived = gl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == last - first:
                merge(parts, stats, out, first, last, answer, R, out_head, D, M, ROWS)
                gl.store(counter, 0)
        at += run
        if at < stop:
            b, g, tile, n, length = place_of(lengths, ends, at, S)


class Plan(NamedTuple):
    """How a launch is cut: positions a tile, tiles in the ring, programs a multiprocessor."""

    positions: int
    stages: int
    programs: int
    #: Whether the next launch is let in when this one begins.
    early: bool = False
    #: Positions that the L2 cache is asked for while the kernel before still runs; 0 is none.
    ahead: int = 0


#: (kind of pages, head width) → plan. Measured at D = 128 and, for 16 bits, at 64.
PLANS = {
    (0, 64): Plan(64, 3, 4, early=True, ahead=32),
    (0, 128): Plan(32, 3, 4, early=True, ahead=32),
    (int(INT8), 64): Plan(64, 3, 8),
    (int(INT8), 128): Plan(64, 3, 4),
    (int(FP8), 128): Plan(64, 3, 4),
    (int(INT4), 64): Plan(64, 3, 8),
    (int(INT4), 128): Plan(64, 3, 8),
}
#: For 16 bits and more than four heads a group: the larger parts are, the fewer are merged.
TALL = Plan(32, 6, 2, early=True, ahead=32)
#: The most parts of a row: one warp merges them, and more would take it longer than they save.
MOST_PARTS = 16
#: The most heads of a group: the columns of a tile, or its rows where integers take two for each.
MOST_HEADS = 8
#: The most sequences whose lengths one warp adds up.
MOST_ROWS = 1024
#: Up to how many bytes of 16-bit pages this kernel is the faster one: it starts and ends sooner,
#: and what codes gain from it, 16 bits do not need.
SMALL = 128 << 20


def plan_for(kind: int, D: int, R: int) -> Plan | None:
    """None where this kernel has not what pages of this kind and R heads a group need."""
    if (kind, D) not in PLANS or MOST_HEADS < R:
        return None
    return TALL if kind == 0 and D == 128 and R > 4 else PLANS[kind, D]


def takes(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, kind: int) -> bool:
    """Whether one query a sequence is computed by this kernel."""
    (_, H, D), (_, G, P, _), (B, width) = q.shape, k_pages.shape, block_table.shape
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or plan_for(kind, D, H // G) is None:
        return False
    # Lengths are known on the device only: the table says how long they may be.
    if kind == 0 and (k_pages.dtype != q.dtype or 4 * B * G * width * P * D > SMALL):
        return False
    # Two programs a multiprocessor at least: fewer would not keep the memory busy.
    most = MOST_PARTS * B * G
    if B > MOST_ROWS or most < 2 * processors(q):
        return False
    return P % 16 == 0 and fits(k_pages) and fits(v_pages)


def fits(pages: Tensor) -> bool:
    """What the copy engine asks for: something to copy, steps of whole 16 bytes."""
    steps = [n * pages.element_size() for n in pages.stride()[:-1]]
    return (
        pages.numel() > 0
        and pages.data_ptr() % 16 == 0
        and all(n > 0 and n % 16 == 0 for n in steps)
    )


@cache
def box_layout(columns: int, bits: int) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory: swizzled, as the copy engine and `ldmatrix` agree."""
    return gl.NVMMASharedLayout(columns * bits // 8, bits, 4)


def box_of(kind: int, D: int, P: int, S: int) -> list[int]:
    """Positions and columns that are fetched at once: of one page, up to 128 bytes of a row."""
    columns = {0: 64, int(INT4): D // 2}.get(kind, D)
    return [1, 1, math.gcd(P, S), columns]


def descriptor(pages: Tensor, kind: int, D: int, S: int) -> TensorDescriptor:
    x = pages.view(torch.int8) if kind else pages
    box = box_of(kind, D, x.shape[2], S)
    layout = box_layout(box[3], 8 * x.element_size())
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def constants(kind: int, D: int, P: int, R: int, B: int, plan: Plan) -> dict[str, Any]:
    """What is compiled in."""
    return {
        "P": P,
        "D": D,
        "KIND": kind,
        "HALVES": 2 if kind == 0 and D == 128 else 1,
        "S": plan.positions,
        "STAGES": plan.stages,
        "AHEAD": plan.ahead,
        "BLOCK_B": max(32, triton.next_power_of_2(B)),
        "ROWS": triton.next_power_of_2(R),
        "EARLY": plan.early,
    }


def decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kind: int,
    scale: float,
    out: Tensor,
) -> None:
    """One query a sequence; `takes` has said yes."""
    (B, H, D), (_, G, P, _) = q.shape, k_pages.shape
    plan = plan_for(kind, D, H // G)
    assert plan is not None
    most = min(processors(q) * plan.programs, MOST_PARTS * B * G)
    units = B * G * (cdiv(block_table.shape[1] * P, plan.positions) + 1)
    parts = q.new_empty((2 * most, MOST_HEADS, D), dtype=torch.float32)
    stats = q.new_empty((2 * most, MOST_HEADS, 2), dtype=torch.float32)
    decode_kernel[(most,)](
        *(descriptor(x, kind, D, plan.positions) for x in (k_pages, v_pages)),
        *(x.view(torch.int8) if kind else x for x in (k_pages, v_pages)),
        *(q, k_scale, v_scale, block_table, seq_lens, out, parts, stats),
        arrivals(min(B * G, most), q),
        *(B, G, H // G, scale, *q.stride()[:2], block_table.stride(0), block_table.shape[1]),
        *(*strides_of(k_scale), *strides_of(v_scale), *out.stride()[:2]),
        **constants(kind, D, P, H // G, B, plan),
        NARROW=units * most < 2**31,
        BY_PAIR=most >= B * G,
        num_warps=1,
        launch_pdl=True,
    )
