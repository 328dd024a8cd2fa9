# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Selection for k up to 64, in as few instructions as possible.

With thousands of rows these kernels are limited by the instructions that a processor can start, so
steps are PTX: one warp finds the threshold, and each warp takes all places for what it keeps of
several logits a thread by one atomic operation. The interpreter runs the same steps
as tensor operations on `memory` (see shared_memory.py).
"""

import triton
import triton.language as tl

from trapline.gold.softmax_topk.triton.keys import (
    column_of,
    key_of,
    logit_of,
    order_of,
    value_of,
)
from trapline.gold.softmax_topk.triton.packed import halves
from trapline.gold.softmax_topk.triton.shared_memory import (
    add,
    cell,
    pair,
    room_for,
    set_cell,
    space,
)

#: Keys that a thread compares with its own per iteration.
COMPARED = tl.constexpr(16)
#: The search for a threshold stops at up to K / SPARE maxima more than K.
SPARE = tl.constexpr(8)


@triton.constexpr_function
def _search(each):
    """PTX of `least_and_largest` for warp 0, where a lane holds `each` of the orders.

    Operands: the orders' address, K, the number at which to stop, the results' address.
    """
    held = [f"a{i}" for i in range(each)]
    lines = [".reg .pred p, q;", ".reg .u32 lane, at, low, high, middle, n, t;"]
    lines += [f".reg .u32 a<{each}>;", "mov.u32 $0, 0;", "mov.u32 lane, %tid.x;"]
    lines += ["setp.gt.u32 p, lane, 31;", "@p bra DONE;", f"mad.lo.u32 at, lane, {4 * each}, $1;"]
    for i in range(0, each, 4):
        lines.append(f"ld.shared.v4.u32 {{{', '.join(held[i : i + 4])}}}, [at + {4 * i}];")
    lines += ["mov.u32 low, a0;", "mov.u32 high, a0;"]
    for order in held[1:]:
        lines += [f"min.u32 low, low, {order};", f"max.u32 high, high, {order};"]
    lines += ["redux.sync.min.u32 low, low, 0xffffffff;"]
    lines += ["redux.sync.max.u32 high, high, 0xffffffff;"]
    lines += ["setp.eq.u32 q, lane, 0;", "@q st.shared.u32 [$4 + 4], high;"]
    # At least K orders are not below `low`, fewer than K are above `high`.
    lines += ["LOOP:", "setp.ge.u32 p, low, high;", "@p bra END;", "sub.u32 t, high, low;"]
    lines += ["shr.u32 t, t, 1;", "add.u32 t, t, low;", "add.u32 middle, t, 1;", "mov.u32 n, 0;"]
    for order in held:
        lines += [f"setp.ge.u32 p, {order}, middle;", "@p add.u32 n, n, 1;"]
    lines += ["redux.sync.add.u32 n, n, 0xffffffff;", "setp.ge.u32 q, n, $2;"]
    lines += ["selp.b32 low, middle, low, q;", "selp.b32 high, high, t, q;"]
    lines += ["setp.le.and.u32 p, n, $3, q;", "@!p bra LOOP;"]
    lines += ["END:", "setp.eq.u32 q, lane, 0;", "@q st.shared.u32 [$4], low;", "DONE:"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _places(entries, pack):
    """PTX that takes as many places in a room as p0, p1, … are true; `at` is the first place.

    One atomic operation takes those of a warp, all of whose threads come here. Jumps to DONE if
    none is true or not all fit. The count tells readers that some did not.
    """
    lines = [f"@p{i} add.u32 number, number, 1;" for i in range(pack)]
    lines += ["setp.ne.u32 some, number, 0;", "vote.sync.any.pred some, some, 0xffffffff;"]
    lines += ["@!some bra DONE;", "mov.u32 slot, number;"]
    for distance in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 at|some, slot, {distance}, 0, 0xffffffff;"]
        lines += ["@some add.u32 slot, slot, at;"]
    lines += ["mov.u32 at, %laneid;", "setp.eq.u32 some, at, 31;", "mov.u32 at, 0;"]
    lines += ["@some atom.shared.add.u32 at, [room], slot;"]
    lines += ["shfl.sync.idx.b32 at, at, 31, 31, 0xffffffff;", "add.u32 slot, slot, at;"]
    lines += [f"setp.gt.u32 some, slot, {entries};", "@some bra DONE;"]
    return [*lines, "sub.u32 at, slot, number;", "mad.lo.u32 at, at, 8, room;"]


#: What `_places` uses.
_PLACES = [".reg .u32 number, slot, at, room;", ".reg .pred some;", "mov.u32 number, 0;"]


@triton.constexpr_function
def _listed(numbers, threads, entries):
    """PTX that lists this thread's maxima: number i is `threads` after number i − 1.

    Operands: the maxima's address, the bound, the room's address.
    """
    lines = [*_PLACES, f".reg .pred p<{numbers}>;", ".reg .f32 high;", ".reg .u32 each;"]
    lines += ["mov.u32 $0, 0;", "mov.u32 room, $3;", "mov.u32 each, %tid.x;"]
    lines += ["mad.lo.u32 at, each, 4, $1;"]
    for i in range(numbers):
        lines += [f"ld.shared.f32 high, [at + {4 * threads * i}];", f"setp.geu.f32 p{i}, high, $2;"]
    lines += _places(entries, numbers)
    for i in range(numbers):
        lines += [f"@p{i} st.shared.v2.u32 [at + 8], {{each, each}};"]
        lines += [f"@p{i} add.u32 at, at, 8;", f"add.u32 each, each, {threads};"]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


@triton.constexpr_function
def _added(entries, pack):
    """PTX that adds numbers with their columns if they reach the bound.

    Operands, `pack` of each: numbers, columns, the bound, the room's address.
    """
    outputs = pack // 4
    number = [f"${outputs + i}" for i in range(pack)]
    column = [f"${outputs + pack + i}" for i in range(pack)]
    bound, room = f"${outputs + 2 * pack}", f"${outputs + 3 * pack}"
    lines = [*_PLACES, f".reg .pred p<{pack}>;", f"mov.u32 room, {room};"]
    lines += [f"mov.u32 ${i}, 0;" for i in range(outputs)]
    lines += [f"setp.geu.f32 p{i}, {number[i]}, {bound};" for i in range(pack)]
    lines += _places(entries, pack)
    for i in range(pack):
        lines += [f"@p{i} st.shared.v2.b32 [at + 8], {{{number[i]}, {column[i]}}};"]
        lines += [f"@p{i} add.u32 at, at, 8;"]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


@triton.constexpr_function
def _added_operands(pack):
    outputs = ["=r"] * (pack // 4)
    return ",".join([*outputs, *["f"] * pack, *["r"] * pack, *["f"] * pack, *["r"] * pack])


@triton.constexpr_function
def _kept(entries, halves, even):
    """PTX that adds the logits of four words if they reach the bound.

    Operands, four of each: lower and (with 16 bits) higher logits, columns of the lower ones, the
    bound, the room's address, the row's length. If rows are `even` a word is inside or outside as
    a whole, and outside ones have a column below 0.
    """
    logits = [f"${1 + 4 * half + word}" for word in range(4) for half in range(halves)]
    column = [f"${1 + 4 * halves + word}" for word in range(4)]
    bound, room, length = (f"${1 + 4 * halves + 4 * i}" for i in (1, 2, 3))
    lines = [*_PLACES, f".reg .pred inside, p<{4 * halves}>;", ".reg .u32 next;"]
    lines += ["mov.u32 $0, 0;", f"mov.u32 room, {room};"]
    for i, logit in enumerate(logits):
        word, high = divmod(i, halves)
        if even and not high:
            lines += [f"setp.ge.s32 inside, {column[word]}, 0;"]
        if not even:
            lines += [f"add.u32 next, {column[word]}, {high};"]
            lines += [f"setp.lt.u32 inside, next, {length};"]
        lines += [f"setp.geu.and.f32 p{i}, {logit}, {bound}, inside;"]
    lines += _places(entries, 4 * halves)
    for i, logit in enumerate(logits):
        word, high = divmod(i, halves)
        lines += [f"add.u32 next, {column[word]}, {high};"]
        lines += [f"@p{i} st.shared.v2.b32 [at + 8], {{{logit}, next}};"]
        lines += [f"@p{i} add.u32 at, at, 8;"]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


@triton.constexpr_function
def _kept_operands(halves):
    return ",".join(["=r", *["f"] * (4 * halves), *["r"] * 4, *["f"] * 4, *["r"] * 8])


@triton.constexpr_function
def _ranked(run, wide):
    """PTX that counts keys larger than this thread's own, which is not 0.

    Operands: the keys' address, the own key, how many there are.
    """
    type_, held = ("u64", 2) if wide else ("u32", 4)
    lines = [".reg .pred p;", ".reg .u32 at, end;", f".reg .{type_} a<{run}>;", "mov.u32 $0, 0;"]
    lines += [f"setp.eq.{type_} p, $2, 0;", "@p bra DONE;", "mov.u32 at, $1;"]
    lines += [f"mad.lo.u32 end, $3, {16 // held}, $1;", "LOOP:"]
    for i in range(0, run, held):
        some = ", ".join(f"a{i + j}" for j in range(held))
        lines.append(f"ld.shared.v{held}.{type_} {{{some}}}, [at + {16 // held * i}];")
    for i in range(run):
        lines += [f"setp.gt.{type_} p, a{i}, $2;", "@p add.u32 $0, $0, 1;"]
    lines += [f"add.u32 at, at, {16 // held * run};", "setp.lt.u32 p, at, end;", "@p bra LOOP;"]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


@triton.constexpr_function
def _key_words(shift):
    """Words of a key: 16 bits of bf16 and 16 of the column, or 32 of each."""
    return 1 if shift == 16 else 2


@triton.jit
def lists_for(
    rooms, at, LISTED: tl.constexpr, CAP: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """A room for groups, one for candidates, cells for their keys and a few more.

    The rooms are empty after the next barrier. See `words_of_lists` for the memory.
    """
    KEYS: tl.constexpr = _key_words(SHIFT) * CAP
    CELLS: tl.constexpr = KEYS if KEYS > THREADS else THREADS
    listed, room = room_for(rooms, at, LISTED), room_for(rooms, at + 2 * LISTED + 2, CAP)
    begin = at + 2 * LISTED + 2 * CAP + 4
    few = space(rooms, begin, 4 * (2 + THREADS // 32))
    return listed, room, space(rooms, begin + 2 + THREADS // 32, 4 * CELLS), few


def words_of_lists(listed: int, cap: int, threads: int, shift: int) -> int:
    """How much of the interpreter's memory `lists_for` takes."""
    cells = max(cap * (1 if shift == 16 else 2), threads)
    return 2 * listed + 2 * cap + 6 + threads // 32 + cells


@triton.jit
def least_and_largest(
    lists, maxima, K, THREADS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """A logit that at least K of the THREADS maxima are not below, and the largest maximum.

    Nearly the K-th largest: up to K / SPARE more than K may be not below, or more of equal ones.
    NaN is the largest, as in keys.
    """
    cells, few = lists[2], lists[3]
    order = order_of(maxima, SHIFT)
    if cells.dtype.is_ptr():
        beaten = tl.sum((order[None, :] > order[:, None]).to(tl.int32), 1)
        least = tl.min(tl.where(beaten < K, order, 0xFFFFFFFF), 0)
        largest = tl.max(order, 0)
    else:
        set_cell(cells, tl.arange(0, THREADS), order.to(tl.int32, bitcast=True))
        tl.debug_barrier()
        SEARCH: tl.constexpr = _search(THREADS // 32)
        tl.inline_asm_elementwise(
            SEARCH, "=r,r,r,r,r", [cells, K, K + K // SPARE, few],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()
        least = cell(few, 0).to(tl.uint32, bitcast=True)
        largest = cell(few, 1).to(tl.uint32, bitcast=True)
    return logit_of(least.to(tl.uint64) << 32, SHIFT), logit_of(largest.to(tl.uint64) << 32, SHIFT)


@triton.jit
def list_stored(
    listed, maxima, least, NUMBERS: tl.constexpr, THREADS: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """Lists the numbers of those of NUMBERS · THREADS cells of maxima that reach `least`."""
    if listed.dtype.is_ptr():
        for i in tl.static_range(NUMBERS):
            number = i * THREADS + tl.arange(0, THREADS)
            high = cell(maxima, number).to(tl.float32, bitcast=True)
            add(listed, high, number, least, LISTED, THREADS)
    else:
        LISTING: tl.constexpr = _listed(NUMBERS, THREADS, LISTED)
        tl.inline_asm_elementwise(
            LISTING, "=r,r,f,r", [maxima, least, listed],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def add_several(
    room, number, column, least, ENTRIES: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """`add` of numbers whose columns are all real."""
    if room.dtype.is_ptr() or number.numel < 4 * THREADS:
        add(room, number, column, least, ENTRIES, THREADS)
    else:
        PACK: tl.constexpr = 8 if number.numel >= 8 * THREADS else 4
        ADDED: tl.constexpr = _added(ENTRIES, PACK)
        OPERANDS: tl.constexpr = _added_operands(PACK)
        tl.inline_asm_elementwise(
            ADDED, OPERANDS, [number, column, least, room],
            dtype=tl.int8, is_pure=False, pack=PACK,
        )  # fmt: skip


@triton.jit
def keep_words(
    room, base, at, live, least, skip, V,
    CAP: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Keeps the logits of the words number `at`, where `live`, that are not below `least`."""
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    live = live & (at < tl.cdiv(V + skip, 4 * PER) * 4)
    low, high = halves(tl.load(base + at, mask=live, other=0), SHIFT)
    column = tl.where(live, PER * at - skip, -PER)
    if room.dtype.is_ptr() or at.numel < 4 * THREADS:
        kept = tl.where(column < V, column, -1)
        add(room, low, kept, least, CAP, THREADS)
        if SHIFT > 0:
            above = tl.where(column + 1 < V, column + 1, -1)
            add(room, high, tl.where(live, above, -1), least, CAP, THREADS)
    else:
        KEPT: tl.constexpr = _kept(CAP, PER, EVEN)
        OPERANDS: tl.constexpr = _kept_operands(PER)
        if SHIFT == 0:
            tl.inline_asm_elementwise(
                KEPT, OPERANDS, [low, column, least, room, V],
                dtype=tl.int8, is_pure=False, pack=4,
            )  # fmt: skip
        else:
            tl.inline_asm_elementwise(
                KEPT, OPERANDS, [low, high, column, least, room, V],
                dtype=tl.int8, is_pure=False, pack=4,
            )  # fmt: skip


@triton.jit
def put_sums_of_warps(lists, value, THREADS: tl.constexpr):
    """Leaves each warp's sum for `sum_of_warps`, which needs a barrier in between."""
    few = lists[3]
    WARPS: tl.constexpr = THREADS // 32
    sums = tl.sum(tl.reshape(value, [WARPS, 32]), 1)
    set_cell(few, 2 + tl.arange(0, WARPS), sums.to(tl.int32, bitcast=True))


@triton.jit
def sum_of_warps(lists, THREADS: tl.constexpr):
    few = lists[3]
    total = cell(few, 2).to(tl.float32, bitcast=True)
    for warp in tl.static_range(1, THREADS // 32):
        total += cell(few, 2 + warp).to(tl.float32, bitcast=True)
    return total


@triton.jit
def emit_ranked(
    lists, kept, peak, total, temperature, row, values, indices, K, log,
    CAP: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Writes the K best of the `kept` candidates, each where as many others are larger.

    Nearly always a block of THREADS holds all of them.
    """
    room, cells = lists[1], lists[2]
    WIDE: tl.constexpr = SHIFT != 16
    for first in range(0, kept, THREADS):
        slot = first + tl.arange(0, THREADS)
        x, column = pair(room, slot)
        key = key_of(x.to(tl.float32, bitcast=True), column, SHIFT)
        set_key(cells, slot, tl.where(slot < kept, key, 0), WIDE)
    tl.debug_barrier()
    for first in range(0, kept, THREADS):
        slot = first + tl.arange(0, THREADS)
        x, column = pair(room, slot)
        x = x.to(tl.float32, bitcast=True)
        key = tl.where(slot < kept, key_of(x, column, SHIFT), 0)
        place = rank_by_counting(cells, key, kept, CAP, WIDE)
        here = (slot < kept) & (place < K)
        value = value_of(x, peak, total, temperature, log)
        tl.store(values + row * K + place, value, mask=here)
        tl.store(indices + row * K + place, column_of(key), mask=here)


@triton.jit
def narrow(key):
    """A key of a bf16 logit and a column below 2^16 in 32 bits."""
    return ((key >> 32).to(tl.uint32) | (key.to(tl.uint32) & 0xFFFF)).to(tl.int32, bitcast=True)


@triton.jit
def set_key(cells, slot, key, WIDE: tl.constexpr):
    if WIDE:
        set_cell(cells, 2 * slot, key.to(tl.uint32).to(tl.int32, bitcast=True))
        set_cell(cells, 2 * slot + 1, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True))
    else:
        set_cell(cells, slot, narrow(key))


@triton.jit
def rank_by_counting(cells, key, kept, CAP: tl.constexpr, WIDE: tl.constexpr):
    """How many of the first `kept` keys in cells are larger; any number for key 0."""
    if cells.dtype.is_ptr():
        number = tl.arange(0, CAP)
        STEP: tl.constexpr = 2 if WIDE else 1
        other = (
            tl.load(cells + STEP * number, mask=number < kept, other=0)
            .to(tl.uint32, bitcast=True)
            .to(tl.uint64)
        )
        if WIDE:
            upper = tl.load(cells + 2 * number + 1, mask=number < kept, other=0)
            other |= upper.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
            place = tl.sum((other[None, :] > key[:, None]).to(tl.int32), 1)
        else:
            own = narrow(key).to(tl.uint32, bitcast=True).to(tl.uint64)
            place = tl.sum((other[None, :] > own[:, None]).to(tl.int32), 1)
    else:
        RANKED: tl.constexpr = _ranked(COMPARED, WIDE)
        if WIDE:
            place = tl.inline_asm_elementwise(
                RANKED, "=&r,r,l,r", [cells, key, kept], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            place = tl.inline_asm_elementwise(
                RANKED, "=&r,r,r,r", [cells, narrow(key), kept],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    return place
