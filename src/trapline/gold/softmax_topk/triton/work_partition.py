"""How top-k of a shape is laid out on a GPU: which rows are held, cut or looked at again, by whom.

Numbers only; `kernels` launches what they say. All constants are as measured on an H200.
"""

import math
from typing import NamedTuple

import triton

from trapline.gold.arithmetic import cdiv

#: A row of at most this many logits is held by one program.
SHORT = 16384
#: Of more than this many, where processors are fewer than rows, it stays in the cache.
IN_REGISTERS = 2048
#: The most programs that share a row.
SPLITS = 128
#: The most group maxima that one program holds.
HELD = 16384
#: Up to this k the threshold comes from counting; the keys of more are bisected and sorted.
RANKED = 64


def stays_in_cache(rows: int, vocabulary: int, k: int, processors: int) -> bool:
    """Whether one row in a processor's registers would leave it waiting."""
    return rows > processors and k > 1 and IN_REGISTERS < vocabulary <= SHORT


class Short(NamedTuple):
    """How a row is held in registers."""

    block: int  # logits, a power of two
    even: bool  # as many as the row has
    warps: int
    groups: int  # maxima that the threshold is taken from
    cap: int  # logits that may remain
    ranked: bool


def short_plan(vocabulary: int, k: int) -> Short:
    """Threads hold 16 logits, 32 of the longest rows; twice as many groups as winners, or more."""
    block = max(1024, triton.next_power_of_2(vocabulary))
    even = block == vocabulary
    warps = min(16, max(4, block // 512))
    k_block = max(2, triton.next_power_of_2(k))
    if k <= RANKED:
        room = max(32, 2 * k_block)
        return Short(block, even, warps, max(room, min(64, 4 * k_block)), room, ranked=True)
    return Short(block, even, warps, 32 * warps, max(k_block, 32 * warps), ranked=False)


class Many(NamedTuple):
    """How a row is looked at again and again in the cache."""

    tile: int  # logits at a time
    warps: int
    registers: int  # of a thread: so that four or six programs share a processor
    groups: int  # maxima that the threshold is taken from
    cap: int  # logits that may remain
    answers: int
    ranked: bool


MANY_TILE, MANY_WARPS, MANY_REGISTERS = 2048, 8, {True: 40, False: 64}


def many_plan(k: int) -> Many:
    """Four times as many groups as winners, or twice; the same space for what is left by them."""
    k_block = max(2, triton.next_power_of_2(k))
    ranked, threads = k <= RANKED, 32 * MANY_WARPS
    return Many(
        tile=MANY_TILE,
        warps=MANY_WARPS,
        registers=MANY_REGISTERS[ranked],
        groups=min(threads, max(64, 2 * k_block)),
        cap=max(threads, 2 * k_block),
        answers=max(threads, k_block),
        ranked=ranked,
    )


class Select(NamedTuple):
    """How the second kernel is laid out."""

    warps: int
    group: int  # neighbours whose maximum is kept
    tile: int  # groups that are looked at again at a time


#: All as measured. For few rows, where one program's way counts; for many; and beyond RANKED.
SELECT = {
    "few": Select(16, 32, 128),
    "many": Select(8, 32, 128),
    "hundreds": Select(8, 32, 128),
    "more": Select(16, 16, 256),
}
HUNDREDS = 256
#: Of a thread of the second kernel: so that four programs of 8 warps share a processor; and the
#: maxima, or logits, that it then has space for.
REGISTERS, HELD_EACH = 64, 16
#: What a program of the first kernel has in flight, and its warps, where little is to be read:
#: then everybody starts at once; and where much is, with so many programs that they end together.
LITTLE, LITTLE_STREAM = 1 << 21, (1024, 4)
STREAM, PROGRAMS = (8192, 8), 2048


class Long(NamedTuple):
    """How a long row is cut."""

    group: int  # neighbours whose maximum is kept
    block: int  # logits that a program has in flight
    warps: int
    blocks: int  # of a split
    splits: int
    groups: int  # maxima in a row, those of the last block's empty end too
    groups_block: int
    select_warps: int
    supers: int  # groups of groups that the threshold is taken from
    listed: int  # groups that may be looked at again
    tile: int  # of them at a time
    cap: int  # logits that may remain
    ranked: bool


def long_plan(rows: int, vocabulary: int, k: int, stride: int, width: int, processors: int) -> Long:
    """Few rows are split until every processor has work.

    Rows that do not begin at multiples of `width` logits, 16 bytes, are read from one on.
    """
    slack = 0 if stride % width == 0 else width - 1
    select = select_plan(k, few=rows <= processors // 2)
    ranked = k <= RANKED
    # A look at a group again is a whole line of the cache.
    group = group_size(vocabulary, k, select.group * width // 4 if ranked else select.group)
    little = rows * vocabulary < LITTLE
    block, warps = LITTLE_STREAM if little else STREAM
    block = max(block, group)
    tiles = cdiv(vocabulary + slack, block)
    splits = cdiv(processors, rows) if little else max(1, PROGRAMS // rows)
    blocks = cdiv(tiles, min(tiles, splits, SPLITS))
    groups = tiles * block // group
    groups_block = triton.next_power_of_2(groups)
    select_warps = min(32, max(select.warps, groups_block // (32 * HELD_EACH)))
    threads = 32 * select_warps
    k_block = max(2, triton.next_power_of_2(k))
    tile = min(select.tile, HELD_EACH * threads // group)
    listed = 2 * k_block if ranked else k_block * 5 // 4
    return Long(
        group=group,
        block=block,
        warps=warps,
        blocks=blocks,
        splits=cdiv(tiles, blocks),
        groups=groups,
        groups_block=max(groups_block, threads),
        select_warps=select_warps,
        supers=min(threads, max(64, 2 * k_block)),
        listed=cdiv(listed, tile) * tile,
        tile=tile,
        cap=max(2 * k_block, threads),
        ranked=ranked,
    )


def select_plan(k: int, few: bool) -> Select:
    if k <= RANKED:
        return SELECT["few" if few else "many"]
    return SELECT["hundreds" if k <= HUNDREDS else "more"]


def group_size(vocabulary: int, k: int, near: int) -> int:
    """So small that k groups exist twice over, and so large that one program holds all maxima."""
    most = max(16, 1 << int(math.log2(max(1, vocabulary // (2 * k)))))
    least = triton.next_power_of_2(cdiv(vocabulary + 8 + STREAM[0], HELD))
    return max(min(near, most), int(least))
