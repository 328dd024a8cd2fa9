"""How attention and the small products of a short step are cut; docs/components/decoder.md."""

from typing import NamedTuple

#: Products with fewer weights ask for all of them before they may begin. More would only push out
#: of the cache, or delay, what the kernel before is still reading.
AHEAD = 1 << 22
#: Bytes of weights that attention asks for on behalf of the product behind it, which has more of
#: them than it asks for itself: so many stay in the cache until they are read.
AFTER = 1 << 26
#: Outputs and inputs of a program that holds its weights.
HELD_N, HELD_K = 64, 256
#: Of a row of planes that one program adds up.
SETTLED = 256
#: Positions of a beam's tail that are one tile.
SHORT_TAIL = 64
#: Parts of an answer of attention that the last of their programs merges; more take a kernel.
MERGED = 4


class AttendCut(NamedTuple):
    """How attention is cut."""

    tile: int  # positions at a time
    warps: int
    registers: int | None  # of a thread; None is as many as the compiler likes


def attend_cut(block_d: int, size: int, beams: int, ratio: int, tail: int) -> AttendCut:
    """Up to 32 KB of keys in registers, for tails of up to `tail` positions.

    Less where products are slow, where heads are wide, and where beams have short tails. Long ones
    would be waited for a second time; then threads take so few registers that all programs still
    run at once, which is enough where the queries of a group are one tile of 16.
    """
    small = size == 2 and block_d <= 64 and beams * ratio <= 16
    if beams > 1 and tail > SHORT_TAIL and small:
        return AttendCut(2 * SHORT_TAIL, 4, 96)
    most = SHORT_TAIL if beams > 1 or block_d > 64 else 256
    tile = max(16, min(most, (16384 if size == 2 else 2048) // block_d))
    return AttendCut(tile, 8 if tile * block_d > 16384 else 4, None)


def splits_of(positions: int, programs: int, processors: int, each: int = 256) -> int:
    """As many as give every processor two programs, of `each` positions or more."""
    return max(1, min(-(-positions // each), 2 * processors // max(programs, 1), 64))


def is_held(rows: int, outputs: int, inputs: int, size: int) -> bool:
    """Whether all processors together hold a product's weights: small ones of many rows.

    With few rows streaming is as fast, unless K is so long that there are too few programs.
    """
    if size != 2 or inputs * outputs >= AHEAD:
        return False
    return rows > 16 or inputs > 2 * outputs


def planes_of(inputs: int) -> int:
    """Into how many partial sums such a product is cut."""
    return -(-inputs // HELD_K)


def rows_of(rows: int) -> int:
    """Rows of a program."""
    return min(64, max(8, 1 << (rows - 1).bit_length()))
