"""Divides top-k of a shape between programs: which kernel runs, and with which sizes.

Numbers only; `topk` launches. All constants were measured on an H200.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import triton

from trapline.gold.arithmetic import cdiv

#: One program holds a row of at most this many logits in registers.
SHORT = 16384
#: With more rows than processors, longer rows than this are read again from the cache.
IN_REGISTERS = 2048
#: The most programs that share a row.
SPLITS = 128
#: The most group maxima that one program holds.
HELD = 16384
#: Up to this k counting gives the threshold; for larger k bisection does.
RANKED = 64


def stays_in_cache(rows: int, vocabulary: int, k: int, processors: int) -> bool:
    """Whether `many_rows` is faster than one row in the registers of each processor."""
    return rows > processors and k > 1 and IN_REGISTERS < vocabulary <= SHORT


class Short(NamedTuple):
    """Sizes for a row in registers (`short_rows`)."""

    block: int  # logits, a power of two
    even: bool  # the row has exactly that many
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
    """Sizes for a row that is read several times from the cache (`many_rows`)."""

    tile: int  # logits at a time
    warps: int
    registers: int  # per thread
    cap: int  # logits that may remain
    deviations: float  # of normally distributed logits: enough are larger, and they fit well
    even: bool  # every row begins and ends with a multiple of 16 bytes
    sorts: bool  # what remains is sorted rather than ranked all at once
    buckets: int  # for either


MANY_TILE = 2048
#: Warps and registers by logits in 16 bytes, for k up to HUNDREDS; for larger k of float32.
MANY_HUNDREDS, MANY_MORE = {4: (4, 64), 8: (4, 48)}, (8, 40)
#: The most candidates of such a row, and the most buckets that they are sorted by.
MANY_ROOM, BUCKETS = 1536, 1024


def many_plan(vocabulary: int, k: int, stride: int, width: int) -> Many:
    """Space for twice as many candidates as winners, up to MANY_ROOM."""
    twice = 2 * max(2, triton.next_power_of_2(k))
    warps, registers = MANY_HUNDREDS[width] if k <= HUNDREDS else MANY_MORE
    cap = max(32 * warps, min(twice, MANY_ROOM))
    return Many(
        tile=MANY_TILE,
        warps=warps,
        registers=registers,
        cap=cap,
        deviations=deviations(vocabulary, k),
        even=vocabulary % width == 0 and stride % width == 0,
        sorts=k > HUNDREDS,
        buckets=min(cap, BUCKETS),
    )


def deviations(vocabulary: int, k: int) -> float:
    """How far above their mean a few more than k of normal logits are.

    The fewer the faster, and eight deviations of their number are enough.
    """
    twice = 2 * max(2, triton.next_power_of_2(k))
    wanted = min(math.sqrt(k * twice), k + 8 * math.sqrt(k)) / vocabulary
    return NormalDist().inv_cdf(1.0 - wanted) if wanted < 1.0 else -1e30


class Narrow(NamedTuple):
    """Sizes for k from NARROW on of such a row of 16-bit logits (`many_rows_narrow`)."""

    warps: int
    registers: int
    deviations: float
    spare: int  # bits that no position in a row needs, of 16
    even: bool  # every row begins and ends with a multiple of 16 bytes
    pairs: bool  # k is even


NARROW, NARROW_WARPS, NARROW_REGISTERS = 256, 4, 56


def is_narrow(k: int, width: int) -> bool:
    return k >= NARROW and width == 8


def narrow_plan(vocabulary: int, k: int, stride: int) -> Narrow:
    """The last position of a row is at most vocabulary + 6, where it begins within 16 bytes."""
    return Narrow(
        warps=NARROW_WARPS,
        registers=NARROW_REGISTERS,
        deviations=deviations(vocabulary, k),
        spare=16 - (vocabulary + 6).bit_length(),
        even=vocabulary % 8 == 0 and stride % 8 == 0,
        pairs=k % 2 == 0,
    )


class SmallK(NamedTuple):
    """Sizes for k up to RANKED of such a row (`many_rows_small_k`)."""

    words: int  # of 4 bytes, at a time
    warps: int
    registers: int
    numbers: int  # chunks of 16 bytes of each thread
    listed: int  # chunks that may be read again
    cap: int  # logits that may remain
    even: bool  # every row begins and ends with a chunk


#: Two chunks of bf16 a thread are as many logits as four of float32.
SMALL_WORDS, SMALL_WARPS, SMALL_REGISTERS = {4: 2048, 8: 1024}, 4, {4: 56, 8: 40}
#: Groups and logits that may remain where k is up to RANKED.
SMALL_ROOM = 256


def small_k_plan(vocabulary: int, stride: int, width: int) -> SmallK:
    words, even = SMALL_WORDS[width], vocabulary % width == 0 and stride % width == 0
    slack = 0 if even else width - 1
    tiles = cdiv(vocabulary + slack, words * width // 4)
    return SmallK(
        words=words,
        warps=SMALL_WARPS,
        registers=SMALL_REGISTERS[width],
        numbers=tiles * words // (4 * 32 * SMALL_WARPS),
        listed=SMALL_ROOM,
        cap=SMALL_ROOM,
        even=even,
    )


class Select(NamedTuple):
    """Sizes of the second kernel of `long_rows`."""

    warps: int
    group: int  # neighbours whose maximum is kept
    tile: int  # groups read again at a time


#: For few rows, where the latency of one program counts; for many rows; for so many rows of up to
#: MIDDLE logits that instructions count; and for k beyond RANKED.
SELECT = {
    "few": Select(16, 32, 128),
    "many": Select(8, 32, 128),
    "thousands": Select(4, 16, 128),
    "hundreds": Select(8, 32, 128),
    "more": Select(8, 32, 128),
    "more of few": Select(16, 16, 256),
}
HUNDREDS, MIDDLE = 256, 32768
#: Groups that are read again, for larger k.
SPARE_GROUPS = 1.125
#: Up to this k one warp finds the threshold of a long row.
SEARCHED = 256
#: Of so many rows ("thousands", at least LAGS times as many as are between reading and selection)
#: one kernel reads and selects: logits in flight and warps, by logits in 16 bytes.
BOTH, LAGS = {4: (8192, 8), 8: (4096, 4)}, 3
#: Their registers, and the groups that are read again at a time.
BOTH_REGISTERS, SMALL_TILE = {4: 56, 8: 56}, {4: 128, 8: 64}
#: Registers per thread of the second kernel, so that four programs of 8 warps fit on a processor,
#: and the maxima or logits that they can hold.
REGISTERS, HELD_EACH = 64, 16
#: Logits in flight and warps of a program of the first kernel: for little data, where all programs
#: start at once; and for much data, with enough programs to finish at about the same time.
LITTLE, LITTLE_STREAM = 1 << 21, (1024, 4)
STREAM, PROGRAMS = {4: (8192, 8), 8: (4096, 8)}, 2048


class Long(NamedTuple):
    """Sizes for a long row (`long_rows`)."""

    group: int  # neighbours whose maximum is kept
    block: int  # logits that a program has in flight
    warps: int
    blocks: int  # of a split
    splits: int
    groups: int  # maxima per row, including the empty end of the last block
    groups_block: int
    select_warps: int
    supers: int  # groups of groups that the threshold is taken from
    listed: int  # groups that may be read again
    tile: int  # of them at a time
    cap: int  # logits that may remain
    ranked: bool
    searched: bool  # one warp finds the threshold
    sorts: bool  # what remains is sorted rather than ranked all at once
    buckets: int  # for either
    narrow: bool  # columns have 16 bits at most
    lag: int  # rows between reading and selection by one kernel; 0: two kernels
    even: bool  # every row begins and ends with a multiple of 16 bytes


def lag_of(rows: int, warps: int, processors: int) -> int:
    """An eighth more rows than programs run at once, if there are enough rows to gain by it."""
    running = processors * 65536 // (REGISTERS * 32 * warps)
    lag = running + running // 8
    return lag if rows >= LAGS * lag else 0


def long_plan(rows: int, vocabulary: int, k: int, stride: int, width: int, processors: int) -> Long:
    """Few rows are split until every processor has work.

    Rows that do not start at a multiple of `width` logits (16 bytes) start at the previous one.
    """
    slack = 0 if stride % width == 0 else width - 1
    few, waiting = rows <= processors // 2, rows > 4 * processors
    thousands = waiting and vocabulary <= MIDDLE
    select = select_plan(k, few=few, thousands=thousands)
    ranked = k <= RANKED
    # A look at a group again is a whole line of the cache.
    group = group_size(vocabulary, k, select.group * width // 4 if ranked else select.group)
    little = rows * vocabulary < LITTLE
    block, warps = LITTLE_STREAM if little else STREAM[width]
    lag = lag_of(rows, BOTH[width][1], processors) if ranked and thousands else 0
    if lag:
        block, warps = BOTH[width]
        select = select._replace(warps=warps)
    block = max(block, group)
    tiles = cdiv(vocabulary + slack, block)
    splits = cdiv(processors, rows) if little else max(1, PROGRAMS // rows)
    blocks = cdiv(tiles, min(tiles, splits, SPLITS))
    groups = tiles * block // group
    groups_block = triton.next_power_of_2(groups)
    select_warps = min(32, max(select.warps, groups_block // (32 * HELD_EACH)))
    threads = 32 * select_warps
    k_block = max(2, triton.next_power_of_2(k))
    # Two tiles of four maxima a thread at least, so that no maximum is of an empty end alone.
    searched = k <= SEARCHED and groups_block >= 8 * threads and 2 * k_block <= 4 * threads
    searched = searched and not (few and ranked)
    tile = min(select.tile, HELD_EACH * threads * width // 4 // group)
    listed = 2 * k_block if ranked or searched else int(k_block * SPARE_GROUPS)
    cap = max(2 * k_block, threads)
    if lag:
        tile, listed, cap = SMALL_TILE[width], SMALL_ROOM, SMALL_ROOM
    sorts = k > HUNDREDS and not few
    return Long(
        group=group,
        block=block,
        warps=warps,
        blocks=blocks,
        splits=cdiv(tiles, blocks),
        groups=groups,
        groups_block=max(groups_block, 4 * threads if lag else threads),
        select_warps=select_warps,
        supers=cap if searched else min(threads, max(64, 2 * k_block)),
        listed=cdiv(listed, tile) * tile,
        tile=tile,
        cap=cap,
        ranked=ranked,
        searched=searched,
        sorts=sorts,
        buckets=min(cap, BUCKETS) if sorts else cap,
        narrow=vocabulary <= 1 << 16,
        lag=lag,
        even=slack == 0 and vocabulary % width == 0,
    )


def select_plan(k: int, *, few: bool, thousands: bool) -> Select:
    if k <= RANKED and thousands:
        return SELECT["thousands"]
    if k <= RANKED:
        return SELECT["few" if few else "many"]
    if k <= HUNDREDS:
        return SELECT["hundreds"]
    return SELECT["more of few" if few else "more"]


def group_size(vocabulary: int, k: int, near: int) -> int:
    """Small enough for 2k groups, and large enough for one program to hold all maxima."""
    most = max(16, 1 << int(math.log2(max(1, vocabulary // (2 * k)))))
    least = triton.next_power_of_2(cdiv(vocabulary + 8 + STREAM[4][0], HELD))
    return max(min(near, most), int(least))
