# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Lists ("rooms") and counters ("cells") in shared memory, for the threads of one program.

A room is a counter and a list of pairs that threads append to; cells are counters. In shared memory
a pair is visible after a few clocks, while a round trip through global memory takes as long as all
other work on a short row. Triton cannot scatter into shared memory, so these accesses are PTX. The
interpreter has no shared memory and uses `memory`, which is global there and None on a GPU.

The order of entries in a room is up to the hardware; results must not depend on it.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _declared(size):
    return f"{{ .shared .align 16 .b8 room[{size}]; mov.u32 $0, room; }}"


@triton.constexpr_function
def _added_one_by_one(entries, pack):
    """PTX for `pack` elements at once. Few are added, so that usually only one branch runs.

    Operands: the numbers, their columns, the bound and the room's address, `pack` of each.
    """
    numbers = [f"${1 + i}" for i in range(pack)]
    columns = [f"${1 + pack + i}" for i in range(pack)]
    bound, room = f"${1 + 2 * pack}", f"${1 + 3 * pack}"
    lines = [f".reg .pred any, p<{pack}>;", ".reg .u32 slot, at;", "mov.b32 $0, 0;"]
    lines += [f"setp.geu.f32 p{i}, {numbers[i]}, {bound};" for i in range(pack)]
    lines += ["mov.pred any, p0;"]
    lines += [f"or.pred any, any, p{i};" for i in range(1, pack)]
    lines += ["@!any bra DONE;"]
    for i in range(pack):
        lines += [
            f"setp.ge.and.s32 p{i}, {columns[i]}, 0, p{i};",
            f"@p{i} atom.shared.add.u32 slot, [{room}], 1;",
            f"setp.lt.and.u32 p{i}, slot, {entries}, p{i};",
            f"mad.lo.u32 at, slot, 8, {room};",
            f"@p{i} st.shared.v2.b32 [at + 8], {{{numbers[i]}, {columns[i]}}};",
        ]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


@triton.constexpr_function
def _added_by_warps(entries, pack):
    """The same, where a warp counts its additions and takes all places by one atomic operation."""
    numbers = [f"${1 + i}" for i in range(pack)]
    columns = [f"${1 + pack + i}" for i in range(pack)]
    bound, room = f"${1 + 2 * pack}", f"${1 + 3 * pack}"
    lines = [f".reg .pred none, first, p<{pack}>;", f".reg .u32 m<{pack}>, all, one, at, slot;"]
    lines += [".reg .u32 begin, before;", "mov.b32 $0, 0;", "mov.b32 all, 0;"]
    for i in range(pack):
        lines += [
            f"setp.geu.f32 p{i}, {numbers[i]}, {bound};",
            f"setp.ge.and.s32 p{i}, {columns[i]}, 0, p{i};",
            f"vote.sync.ballot.b32 m{i}, p{i}, 0xffffffff;",
            f"or.b32 all, all, m{i};",
        ]
    lines += ["setp.eq.u32 none, all, 0;", "@none bra DONE;", "mov.b32 all, 0;"]
    for i in range(pack):
        lines += [f"popc.b32 one, m{i};", "add.u32 all, all, one;"]
    lines += ["mov.u32 one, %laneid;", "setp.eq.u32 first, one, 0;", "mov.b32 begin, 0;"]
    lines += [f"@first atom.shared.add.u32 begin, [{room}], all;"]
    lines += ["shfl.sync.idx.b32 begin, begin, 0, 31, 0xffffffff;", "mov.u32 before, %lanemask_lt;"]
    for i in range(pack):
        lines += [
            f"and.b32 one, m{i}, before;",
            "popc.b32 one, one;",
            "add.u32 slot, begin, one;",
            f"setp.lt.and.u32 p{i}, slot, {entries}, p{i};",
            f"mad.lo.u32 at, slot, 8, {room};",
            f"@p{i} st.shared.v2.b32 [at + 8], {{{numbers[i]}, {columns[i]}}};",
            f"popc.b32 one, m{i};",
            "add.u32 begin, begin, one;",
        ]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


@triton.constexpr_function
def _operands(pack):
    return ",".join(["=r", *["f"] * pack, *["r"] * pack, *["f"] * pack, *["r"] * pack])


@triton.jit
def space(memory, at, BYTES: tl.constexpr):
    """An address in shared memory, or a pointer into `memory`."""
    if memory is None:
        DECLARED: tl.constexpr = _declared(BYTES)
        begin = tl.inline_asm_elementwise(
            DECLARED, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        begin = memory + at
    return begin


@triton.jit
def room_for(memory, at, ENTRIES: tl.constexpr):
    """A room that is empty after the next barrier."""
    room = space(memory, at, 8 * ENTRIES + 8)
    clear(room)
    return room


@triton.jit
def clear(room):
    if room.dtype.is_ptr():
        tl.store(room, 0)
    else:
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], 0; mov.b32 $0, 0;", "=r,r", [room],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def emptied(room):
    """Empties a room between two barriers: after all reads, before the next additions."""
    tl.debug_barrier()
    clear(room)
    tl.debug_barrier()


@triton.jit
def count_in(room):
    """Number of additions, including those that did not fit. Call it after a barrier."""
    if room.dtype.is_ptr():
        count = tl.load(room)
    else:
        count = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [room], dtype=tl.int32, is_pure=False, pack=1
        )
    return count


@triton.jit
def add(
    room, number, column, bound,
    ENTRIES: tl.constexpr, THREADS: tl.constexpr, BY_WARPS: tl.constexpr = True,
):  # fmt: skip
    """Adds each number that is not below the bound (NaN is not) and whose column is not below 0.

    There must be at least THREADS of them, so that none is held twice. Without BY_WARPS each added
    number takes its place by itself: fewer instructions where hardly any is added.
    """
    if room.dtype.is_ptr():
        chosen = ((number < bound) == 0) & (column >= 0)
        slot = tl.atomic_add(room + column * 0, 1, mask=chosen)
        put(room, slot, number.to(tl.int32, bitcast=True), column, chosen & (slot < ENTRIES))
    else:
        PACK: tl.constexpr = 4 if number.numel >= 4 * THREADS else 1
        ADDED: tl.constexpr = (
            _added_by_warps(ENTRIES, PACK) if BY_WARPS else _added_one_by_one(ENTRIES, PACK)
        )
        OPERANDS: tl.constexpr = _operands(PACK)
        tl.inline_asm_elementwise(
            ADDED, OPERANDS, [number, column, bound, room],
            dtype=tl.int8 if PACK == 4 else tl.int32, is_pure=False, pack=PACK,
        )  # fmt: skip


@triton.jit
def put(room, slot, first, second, chosen):
    """Writes pairs into slots of a room, of int32 both."""
    if room.dtype.is_ptr():
        tl.store(room + 2 * slot + 2, first, mask=chosen)
        tl.store(room + 2 * slot + 3, second, mask=chosen)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 at; mov.b32 $0, 0; setp.ne.s32 p, $5, 0; "
            "mad.lo.u32 at, $2, 8, $1; @p st.shared.v2.b32 [at + 8], {$3, $4}; }",
            "=r,r,r,r,r,r", [room, slot, first, second, chosen.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def pair(room, slot):
    """The pairs in these slots of a room, both int32. Call it after a barrier."""
    if room.dtype.is_ptr():
        first, second = tl.load(room + 2 * slot + 2), tl.load(room + 2 * slot + 3)
    else:
        first, second = tl.inline_asm_elementwise(
            "{ .reg .u32 at; mad.lo.u32 at, $3, 8, $2; ld.shared.v2.b32 {$0, $1}, [at + 8]; }",
            "=r,=r,r,r", [room, slot],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return first, second


@triton.jit
def pair_if(room, slot, chosen):
    """`pair` where chosen, zeros elsewhere: other threads do not access the memory."""
    if room.dtype.is_ptr():
        first = tl.load(room + 2 * slot + 2, mask=chosen, other=0)
        second = tl.load(room + 2 * slot + 3, mask=chosen, other=0)
    else:
        first, second = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 at; mov.b32 $0, 0; mov.b32 $1, 0; setp.ne.s32 p, $4, 0; "
            "mad.lo.u32 at, $3, 8, $2; @p ld.shared.v2.b32 {$0, $1}, [at + 8]; }",
            "=&r,=&r,r,r,r", [room, slot, chosen.to(tl.int32)],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return first, second


@triton.constexpr_function
def _larger_in_slice(pack, narrow):
    """PTX that compares each of `pack` keys with the keys from a slot on: pairs or narrow ones.

    A warp goes on to the longest of its slices. Operands, `pack` of each: the room's address, first
    slots, numbers of slots, keys.
    """
    rooms, begins, helds, keys = ([f"${pack * j + i}" for i in range(pack)] for j in range(1, 5))
    kind, size, skipped = ("u32", 4, 0) if narrow else ("u64", 8, 8)
    lines = [".reg .pred p, q;", ".reg .u32 i, most;", f".reg .{kind} other;"]
    lines += [f".reg .u32 at<{pack}>;", "mov.u32 i, 0;", f"mov.u32 most, {helds[0]};"]
    lines += [f"max.u32 most, most, {held};" for held in helds[1:]]
    lines += ["redux.sync.max.u32 most, most, 0xffffffff;"]
    for i in range(pack):
        lines += [f"mov.u32 ${i}, 0;", f"mad.lo.u32 at{i}, {begins[i]}, {size}, {rooms[0]};"]
    lines += ["LOOP:", "setp.ge.u32 p, i, most;", "@p bra DONE;"]
    for i in range(pack):
        lines += [f"setp.lt.u32 q, i, {helds[i]};"]
        lines += [f"@q ld.shared.{kind} other, [at{i} + {skipped}];"]
        lines += [f"setp.gt.and.{kind} p, other, {keys[i]}, q;", f"@p add.u32 ${i}, ${i}, 1;"]
        lines += [f"add.u32 at{i}, at{i}, {size};"]
    return "{ " + " ".join([*lines, "add.u32 i, i, 1;", "bra LOOP;", "DONE:"]) + " }"


@triton.constexpr_function
def _slice_operands(pack, narrow):
    return ",".join([*["=&r"] * pack, *["r"] * (3 * pack), *["r" if narrow else "l"] * pack])


@triton.jit
def larger_in_slice(
    room, begin, held, key, PACK: tl.constexpr, NARROW: tl.constexpr = False
):  # fmt: skip
    """How many of the 64-bit pairs in slots `begin` to `begin + held` are larger than each key.

    The second number of a pair is the upper half. NARROW: of keys of 32 bits in cells, all of them
    unsigned in an int32. Call it after a barrier.
    """
    if room.dtype.is_ptr():
        beaten = begin * 0
        for other in range(tl.max(held, 0)):
            if NARROW:
                found = tl.load(room + begin + other, mask=other < held, other=0)
                above = found.to(tl.uint32, bitcast=True) > key.to(tl.uint32, bitcast=True)
            else:
                lower, upper = pair_if(room, begin + other, other < held)
                upper, lower = upper.to(tl.uint32, bitcast=True), lower.to(tl.uint32, bitcast=True)
                above = ((upper.to(tl.uint64) << 32) | lower.to(tl.uint64)) > key
            beaten += above.to(tl.int32)
    else:
        COUNTED: tl.constexpr = _larger_in_slice(PACK, NARROW)
        OPERANDS: tl.constexpr = _slice_operands(PACK, NARROW)
        beaten = tl.inline_asm_elementwise(
            COUNTED, OPERANDS, [room, begin, held, key], dtype=tl.int32, is_pure=False, pack=PACK
        )
    return beaten


@triton.constexpr_function
def _own_cells(each, stored):
    """PTX for the `each` cells of a thread, four at a time: their sum, or sums from $3 on stored.

    Operands: the cells' address, the thread's number.
    """
    wide = min(each, 4)
    held = [f"a{i}" for i in range(each)]
    vector = f".v{wide}" if wide > 1 else ""
    parts = [", ".join(held[i : i + wide]) for i in range(0, each, wide)]
    parts = [f"{{{part}}}" if wide > 1 else part for part in parts]
    at = [f"[at + {4 * i}]" for i in range(0, each, wide)]
    lines = [".reg .u32 at, sum, next;", f".reg .u32 a<{each}>;"]
    lines += [f"mad.lo.u32 at, $2, {4 * each}, $1;"]
    lines += [f"ld.shared{vector}.u32 {part}, {at[i]};" for i, part in enumerate(parts)]
    if stored:
        lines += ["mov.u32 sum, $3;"]
        for one in held:
            lines += [f"add.u32 next, sum, {one};", f"mov.u32 {one}, sum;", "mov.u32 sum, next;"]
        lines += [f"st.shared{vector}.u32 {at[i]}, {part};" for i, part in enumerate(parts)]
        lines += ["mov.u32 $0, 0;"]
    else:
        lines += ["mov.u32 sum, a0;", *[f"add.u32 sum, sum, {one};" for one in held[1:]]]
        lines += ["mov.u32 $0, sum;"]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def accumulated(cells, NUMBER: tl.constexpr, THREADS: tl.constexpr):
    """Replaces every cell by the sum of those before it, between barriers.

    A thread adds up NUMBER / THREADS neighbours.
    """
    if cells.dtype.is_ptr():
        ALL: tl.constexpr = triton.next_power_of_2(NUMBER)
        number = tl.arange(0, ALL)
        held = tl.load(cells + number, mask=number < NUMBER, other=0)
        tl.store(cells + number, tl.cumsum(held, 0) - held, mask=number < NUMBER)
    else:
        SUM: tl.constexpr = _own_cells(NUMBER // THREADS, False)
        STORED: tl.constexpr = _own_cells(NUMBER // THREADS, True)
        thread = tl.arange(0, THREADS)
        held = tl.inline_asm_elementwise(
            SUM, "=r,r,r", [cells, thread], dtype=tl.int32, is_pure=False, pack=1
        )
        before = tl.cumsum(held, 0) - held
        tl.inline_asm_elementwise(
            STORED, "=r,r,r,r", [cells, thread, before], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def cells_for(memory, at, NUMBER: tl.constexpr):
    """Cells that are 0 after the next barrier."""
    cells = space(memory, at, 4 * NUMBER)
    set_cell(cells, tl.arange(0, NUMBER), 0)
    return cells


@triton.jit
def set_cell(cells, number, value, chosen=None):
    """Of all cells, or of those chosen."""
    if cells.dtype.is_ptr():
        tl.store(cells + number, value, mask=chosen)
    elif chosen is not None:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 at; mov.b32 $0, 0; setp.ne.s32 p, $4, 0; "
            "mad.lo.u32 at, $2, 4, $1; @p st.shared.b32 [at], $3; }",
            "=r,r,r,r,r", [cells, number, value, chosen.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .u32 at; mov.b32 $0, 0; mad.lo.u32 at, $2, 4, $1; st.shared.b32 [at], $3; }",
            "=r,r,r,r", [cells, number, value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def cell(cells, number):
    if cells.dtype.is_ptr():
        value = tl.load(cells + number)
    else:
        value = tl.inline_asm_elementwise(
            "{ .reg .u32 at; mad.lo.u32 at, $2, 4, $1; ld.shared.b32 $0, [at]; }",
            "=r,r,r", [cells, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return value


@triton.jit
def counted_up(cells, number, chosen=None):
    """Adds one to the cell of each element, or of those chosen, and returns the previous counts."""
    if cells.dtype.is_ptr():
        before = tl.atomic_add(cells + number, 1, mask=chosen)
    elif chosen is None:
        before = tl.inline_asm_elementwise(
            "{ .reg .u32 at; mad.lo.u32 at, $2, 4, $1; atom.shared.add.u32 $0, [at], 1; }",
            "=r,r,r", [cells, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        before = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 at; mov.b32 $0, 0; setp.ne.s32 p, $3, 0; "
            "mad.lo.u32 at, $2, 4, $1; @p atom.shared.add.u32 $0, [at], 1; }",
            "=r,r,r,r", [cells, number, chosen.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return before
