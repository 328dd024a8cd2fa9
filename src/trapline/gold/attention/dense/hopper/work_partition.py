# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which program computes which tile of queries, and when: equal work, and keys that stay cached."""

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def my_tiles(tiles):
    """How many tiles this program computes: those of `place` below the number of tiles."""
    programs = gl.num_programs(0)
    whole = tiles // programs
    pid = gl.program_id(0)
    last = gl.where(whole % 2 == 1, programs - 1 - pid, pid)
    return whole + gl.where(whole * programs + last < tiles, 1, 0)


@gluon.jit
def place(turn, sizes, HEIGHT: gl.constexpr, BLOCK_S: gl.constexpr, CAUSAL: gl.constexpr):
    """This program's tile number `turn`: batch, head, first query, key tiles, masked key tiles.

    All tiles of a head come together, so that its keys stay in the L2 cache. Under a causal mask
    that would give one program all the long ones: then all tiles of as many heads as the cache
    holds come together, from the longest to the shortest, the next heads' the other way round, and
    so on, ending short. Odd rounds are dealt in reverse: what a program gets too much of in one
    round it gets too little of in the next.
    """
    T, S, H, _R, groups, group, _tiles = sizes
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    index = turn * programs + gl.where(turn % 2 == 1, programs - 1 - pid, pid)
    rows = gl.cdiv(T, HEIGHT)
    end = S
    whole = S // BLOCK_S
    if CAUSAL:
        before = index // (group * rows)
        within = index % (group * rows)
        head = before * group + within % group
        row = within // group
        row = gl.where((groups - before) % 2 == 1, rows - 1 - row, row)
        top = row * HEIGHT
        end = gl.minimum(S, top + HEIGHT + S - T)
        whole = gl.minimum(whole, gl.maximum(top + S - T + 1, 0) // BLOCK_S)
    else:
        head = index // rows
        top = index % rows * HEIGHT
    # Queries that see nothing still get one tile of keys, all of it masked.
    count = gl.maximum(gl.cdiv(gl.maximum(end, 0), BLOCK_S), 1)
    return head // H, head % H, top, count, gl.maximum(count - whole, 1)


@cache
def together(heads: int, rows: int, programs: int) -> tuple[int, int]:
    """Into how many groups heads are divided, and how many heads have their tiles dealt together.

    A group is the smallest that fills about two rounds: with less, a round would mix the long
    tiles of one group with the short ones of the next. On 132 processors that is 16 MB of keys and
    values, for heads 128 wide and any length: a third of the L2 cache.
    """
    most = max(1, min(heads, heads * rows * 33 // (64 * programs)))
    groups = max(number for number in range(1, most + 1) if heads % number == 0)
    return groups, heads // groups
