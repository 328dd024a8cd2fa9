# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which keys a tile of queries sees, in the paged kernels.

All queries see all that came before the first of them, so most tiles need no mask. In the last ones
a query sees what came before it, or the new positions that a tree names. Of a tree, each row of
queries carries the 64 positions of a tile as the bits of a word.
"""

import triton
import triton.language as tl


@triton.jit
def eight_of(tree, word, asked):
    """Eight bytes of a row, each 0 or 1, as eight bits."""
    found = tl.load(tree + word, mask=asked, other=0)
    return (((found & 0x0101010101010101) * 0x0102040810204080) >> 56 & 255).to(tl.uint64)


@triton.jit
def named_by(tree, at_row, live, fresh, count):
    """Bit j of a row's word: whether its query sees the new position fresh + j, of `count`.

    A word is a number a row: bytes would be spread over the lanes as they were loaded, and then
    the scores with them. Words of what is beyond the count may say anything.
    """
    begin = tl.maximum(fresh, 0) // 8
    more = eight_of(tree, at_row + begin + 8, live & (8 * begin + 64 < count))
    word = eight_of(tree, at_row + begin, live & (8 * begin < count))
    for i in tl.static_range(1, 8):
        asked = live & (8 * (begin + i) < count)
        word |= eight_of(tree, at_row + begin + i, asked) << 8 * i
    down = (tl.maximum(fresh, 0) % 8).to(tl.uint64)
    # Twice, as a shift by 64 means nothing.
    word = (word >> down) | (more << 1 << (63 - down))
    return word << tl.minimum(tl.maximum(-fresh, 0), 63).to(tl.uint64)


@triton.jit
def words_of(tree, row, tree_row, live, fresh, count, BLOCK_S: tl.constexpr):
    """The two words of each row for a tile whose first position is the new position `fresh`."""
    word, later = row, row
    if tree is not None:
        word = named_by(tree, row * tree_row, live, fresh, count)
        later = word
        if BLOCK_S > 64:
            later = named_by(tree, row * tree_row, live, fresh + 64, count)
    return word, later


@triton.jit
def first_hidden(
    begin, end, first, tree, ALONE: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Where the tiles begin of which some query may not see all; `first` is where queries begin."""
    middle = end
    if WINDOWED:
        middle = begin
    elif tree is not None or not ALONE:
        middle = tl.minimum(begin + tl.maximum(first - begin, 0) // BLOCK_S * BLOCK_S, end)
    return middle


@triton.jit
def seen_by(
    position, s, first, word, later, window, tree, BLOCK_S: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Which positions s each query sees: what came before it, or what the tree's words name.

    Beyond the end of the sequence the answer may say anything.
    """
    if tree is not None:
        j = tl.arange(0, BLOCK_S)
        named = word[:, None]
        if BLOCK_S > 64:
            named = tl.where((j < 64)[None, :], named, later[:, None])
        named = named >> (j % 64).to(tl.uint64)[None, :]
        seen = (s < first)[None, :] | (named & 1 != 0)
    else:
        seen = s[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (position[:, None] - s[None, :] < window)
    return seen
