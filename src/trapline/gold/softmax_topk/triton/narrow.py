# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Candidates of 16-bit logits as words of 32 bits, kept and sorted in shared memory.

A raw word has the logit as it was read above its position in the row, which is shifted to the left
as far as the longest row allows. A key is an unsigned integer in the order of the answer: larger
logit first, NaN first of all, ties to the lower position. No two are equal, so that sorting needs
no second criterion. Lists and cells are as in shared_memory.py.
"""

import triton
import triton.language as tl

from trapline.gold.softmax_topk.triton.keys import larger
from trapline.gold.softmax_topk.triton.packed import halves
from trapline.gold.softmax_topk.triton.shared_memory import (
    accumulated,
    cell,
    clear,
    counted_up,
    set_cell,
    space,
)

#: Pairs of 16-bit numbers in PTX, and infinity above 16 zeros, by the bits they lack of float32.
_FORMAT = {13: "f16x2", 16: "bf16x2"}
_INFINITY = {13: 0x7C000000, 16: 0x7F800000}
#: Candidates of each thread, words that a thread reads at a time, threads of a warp.
EACH, READ, WARP = tl.constexpr(12), tl.constexpr(8), tl.constexpr(32)
#: A thread notes up to so many at once, beyond a list that is full.
SLACK = tl.constexpr(16)


def words_of_sorter(threads: int) -> int:
    """How much of the interpreter's memory `sorter_in` takes."""
    each, slack, warp = int(EACH.value), int(SLACK.value), int(WARP.value)
    return 3 * each * threads + 2 * slack + warp + 2 * each * threads // warp + 2


@triton.jit
def sorter_in(rooms, at, THREADS: tl.constexpr):
    """A list and its counter, buckets, keys and a mark; all empty after the next barrier.

    After the buckets come WARP cells for other words. As keys they lead to words after
    the others, which are never read.
    """
    CAP: tl.constexpr = EACH * THREADS
    UNREAD: tl.constexpr = CAP + SLACK
    # Every warp may count EACH times in each of those cells, twice.
    KEYS: tl.constexpr = UNREAD + 2 * EACH * THREADS // WARP
    found = space(rooms, at, 4 * (CAP + SLACK))
    cells = space(rooms, at + CAP + SLACK, 4 * (CAP + WARP))
    keys = space(rooms, at + 2 * CAP + SLACK + WARP, 4 * KEYS)
    counter = space(rooms, at + 2 * CAP + SLACK + WARP + KEYS, 4)
    mark = space(rooms, at + 2 * CAP + SLACK + WARP + KEYS + 1, 4)
    clear(counter)
    clear(mark)
    clear_cells(cells, THREADS)
    clear_cells(keys, THREADS)
    set_cell(cells, tl.arange(0, WARP) + CAP, UNREAD)
    set_cell(keys, tl.arange(0, SLACK) + CAP, 0)
    return found, counter, cells, keys, mark


@triton.constexpr_function
def _infinity(shift):
    return _INFINITY[shift]


@triton.jit
def key_of_raw(raw, SHIFT: tl.constexpr):
    """The uint32 key of a raw int32; −0 is +0."""
    INFINITY: tl.constexpr = _infinity(SHIFT)
    bits = raw.to(tl.uint32, bitcast=True)
    key = bits ^ ((raw >> 31).to(tl.uint32, bitcast=True) | 0x8000FFFF)
    key = tl.where((bits & 0x7FFF0000) > INFINITY, key | 0xFFFF0000, key)
    return tl.where((bits & 0xFFFF0000) == 0x80000000, key ^ 0xFFFF0000, key)


@triton.jit
def raw_of_key(key):
    """Of NaN any NaN, of zero +0."""
    bits = tl.where(key >= 0x80000000, key ^ 0x8000FFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.int32, bitcast=True)


@triton.jit
def twice(x):
    """A word that holds this 16-bit number two times."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (bits << 16) | bits


@triton.jit
def larger_bf16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_fp16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def largest_of_thread(word, found, SHIFT: tl.constexpr):
    """The largest logit of each thread's words, of (parts, threads, 4), in float32."""
    if found.dtype.is_ptr():
        low, high = halves(word, SHIFT)
        largest = tl.reduce(tl.reduce(larger(low, high), 2, larger), 0, larger)
    else:
        if SHIFT == 16:
            pair = tl.reduce(tl.reduce(word, 2, larger_bf16), 0, larger_bf16)
        else:
            pair = tl.reduce(tl.reduce(word, 2, larger_fp16), 0, larger_fp16)
        low, high = halves(pair, SHIFT)
        largest = larger(low, high)
    return largest


@triton.constexpr_function
def _noted(entries, pack, shift):
    """PTX that notes the logits of `pack` words that are not below a bound.

    One atomic operation takes the places of a warp, all of whose threads come here. What does not
    fit is written behind the list.
    Operands, `pack` of each: words, shifted positions of the lower logits, how much further the
    higher are, the bound twice in a word, the list's address, the counter's.
    """
    outputs, kind = pack // 4, _FORMAT[shift]
    words, places, further, bounds, lists, counters = (
        [f"${outputs + pack * j + i}" for i in range(pack)] for j in range(6)
    )
    bound = bounds[0]
    lines = [".reg .u32 hits, mask, number, slot, at, raw;", ".reg .pred p, q;"]
    lines += [f"mov.u32 ${i}, 0;" for i in range(outputs)]
    lines += ["mov.u32 hits, 0;"]
    for i, word in enumerate(words):
        lines += [f"set.geu.u32.{kind} mask, {word}, {bound};"]
        lines += [f"and.b32 mask, mask, {0x10001 << i};", "or.b32 hits, hits, mask;"]
    lines += ["popc.b32 number, hits;", "mov.u32 slot, number;"]
    for distance in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 at|p, slot, {distance}, 0, 0xffffffff;"]
        lines += ["@p add.u32 slot, slot, at;"]
    lines += ["mov.u32 at, %laneid;", "setp.eq.u32 p, at, 31;", "mov.u32 at, 0;"]
    lines += [f"@p atom.shared.add.u32 at, [{counters[0]}], slot;"]
    lines += ["shfl.sync.idx.b32 at, at, 31, 31, 0xffffffff;", "add.u32 at, at, slot;"]
    lines += ["sub.u32 at, at, number;", f"min.u32 at, at, {entries};"]
    lines += [f"mad.lo.u32 at, at, 4, {lists[0]};"]
    for word, place in zip(words, places, strict=True):
        lines += [f"setp.geu.{kind} p|q, {word}, {bound};"]
        lines += [f"prmt.b32 raw, {word}, {place}, 0x1054;"]
        lines += ["@p st.shared.u32 [at], raw;", "@p add.u32 at, at, 4;"]
        lines += [f"add.u32 raw, {place}, {further[0]};", f"prmt.b32 raw, {word}, raw, 0x3254;"]
        lines += ["@q st.shared.u32 [at], raw;", "@q add.u32 at, at, 4;"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _noted_operands(pack):
    return ",".join(["=r"] * (pack // 4) + ["r"] * (6 * pack))


@triton.jit
def note(found, counter, raw, chosen, ENTRIES: tl.constexpr):
    """Adds the raw words that are chosen to a list, each by itself."""
    slot = counted_up(counter, raw * 0, chosen)
    set_cell(found, slot, raw, chosen & (slot < ENTRIES))


@triton.jit
def note_words(
    found, counter, word, place, bound,
    ENTRIES: tl.constexpr, SHIFT: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Adds the logits of words, READ a thread, that are not below the bound (NaN is not).

    `place` is the position of the lower logits, `bound` as from `twice`.
    """
    if found.dtype.is_ptr():
        least = halves(bound, SHIFT)[0]
        low, high = halves(word, SHIFT)
        note(found, counter, (word << 16) | (place << SPARE), (low < least) == 0, ENTRIES)
        raw = (word & -65536) | ((place + 1) << SPARE)
        note(found, counter, raw, (high < least) == 0, ENTRIES)
    else:
        NOTED: tl.constexpr = _noted(ENTRIES, READ, SHIFT)
        OPERANDS: tl.constexpr = _noted_operands(READ)
        tl.inline_asm_elementwise(
            NOTED, OPERANDS, [word, place << SPARE, 1 << SPARE, bound, found, counter],
            dtype=tl.int8, is_pure=False, pack=READ,
        )  # fmt: skip


@triton.constexpr_function
def _cleared(each):
    lines = [".reg .u32 at, none;", "mov.u32 $0, 0;", "mov.u32 none, 0;"]
    lines += [f"mad.lo.u32 at, $2, {4 * each}, $1;"]
    for i in range(0, each, 4):
        lines += [f"st.shared.v4.u32 [at + {4 * i}], {{none, none, none, none}};"]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def clear_cells(cells, THREADS: tl.constexpr):
    """Clears EACH cells a thread."""
    thread = tl.arange(0, THREADS)
    if cells.dtype.is_ptr():
        for i in tl.static_range(EACH):
            tl.store(cells + i * THREADS + thread, 0)
    else:
        CLEARED: tl.constexpr = _cleared(EACH)
        tl.inline_asm_elementwise(
            CLEARED, "=r,r,r", [cells, thread], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def counted(
    found, cells, first, kept, top, steps,
    CAP: tl.constexpr, STEP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Turns STEP raw words into keys, counts them in their buckets, and returns these."""
    slot = first + tl.arange(0, STEP)
    key = key_of_raw(cell(found, slot), SHIFT)
    set_cell(found, slot, key.to(tl.int32, bitcast=True))
    bucket = tl.umulhi(top - key, steps).to(tl.int32, bitcast=True)
    bucket = tl.where(slot < kept, bucket, slot % WARP + CAP)
    counted_up(cells, bucket)
    return bucket


@triton.jit
def moved(found, cells, keys, first, bucket, STEP: tl.constexpr):
    """Moves STEP keys to the next places of their buckets."""
    key = cell(found, first + tl.arange(0, STEP))
    set_cell(keys, counted_up(cells, bucket), key)


@triton.jit
def sort_candidates(
    sorter, kept, peak, least, THREADS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Leaves the keys of the `kept` raw words in their order; call it after a barrier.

    As many buckets as keys have room share the numbers from the largest logit to the least in
    equal steps. Within a bucket keys come in any order, and are sorted as neighbours.
    """
    found, _, cells, keys, mark = sorter
    CAP: tl.constexpr = EACH * THREADS
    STEP: tl.constexpr = CAP // 3
    top = key_of_raw(twice(peak), SHIFT) | 0xFFFF
    bottom = key_of_raw(twice(least), SHIFT) & 0xFFFF0000
    # A little less than CAP · 2^32, for the last bucket to be CAP − 1.
    SPREAD: tl.constexpr = CAP * (2.0**32 - 2.0**12)
    steps = (1.0 / ((top - bottom).to(tl.float32) + 1.0) * SPREAD).to(tl.uint32)
    first = counted(found, cells, 0, kept, top, steps, CAP, STEP, SHIFT)
    second = counted(found, cells, STEP, kept, top, steps, CAP, STEP, SHIFT)
    third = counted(found, cells, 2 * STEP, kept, top, steps, CAP, STEP, SHIFT)
    tl.debug_barrier()
    accumulated(cells, CAP, THREADS)
    tl.debug_barrier()
    moved(found, cells, keys, 0, first, STEP)
    moved(found, cells, keys, STEP, second, STEP)
    moved(found, cells, keys, 2 * STEP, third, STEP)
    tl.debug_barrier()
    sort_neighbours(keys, mark, kept, THREADS)


@triton.constexpr_function
def exchanges(number):
    """Pairs of places whose larger key goes first: in turn they sort. Batcher's merge exchange."""
    pairs, largest = [], 1
    while 2 * largest < number:
        largest *= 2
    p = largest
    while p:
        q, r, d = largest, 0, p
        while True:
            pairs += [(i, i + d) for i in range(number - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return pairs


@triton.constexpr_function
def _sorted_run(each, first):
    """PTX that sorts `each` neighbouring keys of a thread, largest first.

    A thread's begin `first` after `each` times its number. Operands: the keys, the thread.
    """
    wide = 4 if first % 4 == 0 else 2
    held = [f"a{i}" for i in range(each)]
    parts = [f"{{{', '.join(held[i : i + wide])}}}" for i in range(0, each, wide)]
    at = [f"[at + {4 * (first + i)}]" for i in range(0, each, wide)]
    lines = [".reg .u32 at, larger;", f".reg .u32 a<{each}>;", "mov.u32 $0, 0;"]
    lines += [f"mad.lo.u32 at, $2, {4 * each}, $1;"]
    lines += [f"ld.shared.v{wide}.u32 {parts[i]}, {at[i]};" for i in range(len(at))]
    for i, j in exchanges(each):
        lines += [f"max.u32 larger, a{i}, a{j};", f"min.u32 a{j}, a{i}, a{j};"]
        lines += [f"mov.u32 a{i}, larger;"]
    lines += [f"st.shared.v{wide}.u32 {at[i]}, {parts[i]};" for i in range(len(at))]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _seam(each):
    """PTX that stores $3 in the cell $4 if a thread's keys are out of order half way through."""
    lines = [".reg .u32 at, left, right;", ".reg .pred p;", "mov.u32 $0, 0;"]
    lines += [f"mad.lo.u32 at, $2, {4 * each}, $1;"]
    lines += [f"ld.shared.u32 left, [at + {2 * each - 4}];"]
    lines += [f"ld.shared.u32 right, [at + {2 * each}];"]
    lines += ["setp.lt.u32 p, left, right;", "@p st.shared.u32 [$4], $3;"]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def sort_neighbours(keys, mark, kept, THREADS: tl.constexpr):
    """Sorts EACH · THREADS keys that are nearly in order; those from `kept` on are 0.

    Every thread sorts EACH neighbours, then EACH from half way on, until all are in order. Once is
    enough if no key is further than EACH / 2 from its place: of any zeros and ones, sorting the
    runs leaves at most EACH / 2 of either on the wrong side of a run's end, and next come the runs
    around the ends.
    """
    thread = tl.arange(0, THREADS)
    if keys.dtype.is_ptr():
        SLOTS: tl.constexpr = triton.next_power_of_2(EACH * THREADS)
        slot = tl.arange(0, SLOTS)
        key = tl.load(keys + slot, mask=slot < kept, other=0).to(tl.uint32, bitcast=True)
        key = tl.sort(key, descending=True)
        tl.store(keys + slot, key.to(tl.int32, bitcast=True), mask=slot < kept)
    else:
        RUN: tl.constexpr = _sorted_run(EACH, 0)
        SHIFTED: tl.constexpr = _sorted_run(EACH, EACH // 2)
        SEAM: tl.constexpr = _seam(EACH)
        turn = tl.program_id(0) * 0
        marked = turn
        while marked == turn:
            turn += 1
            tl.inline_asm_elementwise(
                RUN, "=r,r,r", [keys, thread], dtype=tl.int32, is_pure=False, pack=1
            )
            tl.debug_barrier()
            tl.inline_asm_elementwise(
                SHIFTED, "=r,r,r", [keys, thread], dtype=tl.int32, is_pure=False, pack=1
            )
            tl.debug_barrier()
            tl.inline_asm_elementwise(
                SEAM, "=r,r,r,r,r", [keys, thread, turn, mark],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            tl.debug_barrier()
            marked = cell(mark, 0)
