# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Dense attention for Hopper GPUs, in Gluon: what the forward and the backward kernels share.

A warpgroup computes tiles of 64 rows. The tensor cores leave a row of scores in four neighbouring
lanes and take the weights back in the same places: between two products, only each row's peak moves
between threads.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trapline.gold.attention.dense import Problem
from trapline.gold.attention.dense.triton.tiles import can_describe, description

#: Queries, or keys, of one warpgroup: the height of a tensor-core instruction.
ROWS = gl.constexpr(64)
#: Head widths that the kernels are tuned for.
WIDTHS = (64, 128)
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def supports(problem: Problem) -> str | None:
    """None, or the reason why these kernels cannot compute the problem."""
    q = problem.q
    if problem.packed:
        return "packed sequences"
    if problem.window or problem.softcap:
        return "a sliding window" if problem.window else "a softcap"
    if q.dtype not in TYPES:
        return f"{q.dtype} (float16 and bfloat16 are supported)"
    if q.shape[-1] not in WIDTHS:
        return f"heads {q.shape[-1]} wide (64 and 128 are supported)"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        return "this GPU (compute capability 9.0 is required)"
    if not can_describe(q, problem.k, problem.v):
        return "empty tensors, or strides and addresses that are not multiples of 16 bytes"
    return None


@cache
def tile_layout(rows: int, D: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory, swizzled for the copy engine and the tensor cores."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, D], dtype)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x (B,H,N,D) in tiles of `rows` rows."""
    layout = tile_layout(rows, x.shape[-1], TYPES[x.dtype])
    return TensorDescriptor(x, *description(x, rows), layout)


# --- forward: which program computes which tile of queries --------------------------------------


@gluon.jit
def my_tiles(tiles):
    """Number of tiles that this program computes; `place` numbers them."""
    programs = gl.num_programs(0)
    whole = tiles // programs
    pid = gl.program_id(0)
    last = gl.where(whole % 2 == 1, programs - 1 - pid, pid)
    return whole + gl.where(whole * programs + last < tiles, 1, 0)


@gluon.jit
def place(turn, sizes, HEIGHT: gl.constexpr, BLOCK_S: gl.constexpr, CAUSAL: gl.constexpr):
    """This program's tile number `turn`: batch, head, first query, key tiles, masked key tiles.

    The tiles of a head are consecutive, so that its keys stay in the L2 cache. With a causal mask
    that would give one program all the long tiles. So all tiles of as many heads as the cache holds
    are consecutive, from the longest to the shortest, those of the next heads in reverse, and so
    on, ending with short ones. Odd rounds are assigned in reverse order, which evens out the work.
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
    # Queries that see nothing still read one tile of keys, fully masked.
    count = gl.maximum(gl.cdiv(gl.maximum(end, 0), BLOCK_S), 1)
    return head // H, head % H, top, count, gl.maximum(count - whole, 1)


@cache
def head_groups(heads: int, rows: int, programs: int) -> tuple[int, int]:
    """The number of groups of heads, and the number of heads in a group.

    The tiles of a group are assigned together. A group is the smallest that fills about two rounds:
    a smaller one would mix the long tiles of one group with the short ones of the next. On 132
    multiprocessors that is 16 MB of keys and values for heads 128 wide: a third of the L2 cache.
    """
    most = max(1, min(heads, heads * rows * 33 // (64 * programs)))
    groups = max(number for number in range(1, most + 1) if heads % number == 0)
    return groups, heads // groups


# --- forward: softmax in the registers of a warpgroup -------------------------------------------


@gluon.jit
def masked(scores, row, start, T, S, CAUSAL: gl.constexpr):
    """−inf where a query (from `row` on) does not see a key (from `start` on)."""
    BLOCK_S: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = scores.type.layout
    t = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    end = gl.minimum(t + (S - T + 1), S) if CAUSAL else t * 0 + S
    s = gl.arange(0, BLOCK_S, layout=gl.SliceLayout(0, layout))
    seen = gl.expand_dims(s, 0) < gl.expand_dims(end - start, 1)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def weigh(scores, peak, total, scale, MASKED: gl.constexpr, FIRST: gl.constexpr):
    """One step of the online softmax: weights, peak, total, and the factor of earlier sums.

    A row's scores lie in four lanes. All of them need the peak at once; the total is kept in eight
    parts per row, two per lane, and added up at the end. Reducing over the middle of a reshaped
    tile gives the arithmetic units independent chains instead of one long one.
    """
    BLOCK_S: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = scores.type.layout
    highest = gl.max(gl.max(gl.max(scores.reshape([ROWS, 2, BLOCK_S // 16, 8]), 2), 1), 1)
    highest = gl.convert_layout(highest, gl.SliceLayout(1, layout), assert_trivial=True)
    if not FIRST:
        highest = gl.maximum(peak, highest)
    origin = highest * scale
    if MASKED:
        # A row that has seen no key stays at −inf, and −inf − (−inf) is NaN.
        origin = gl.where(highest == float("-inf"), 0.0, origin)
    weights = gl.exp2(scores * scale - gl.expand_dims(origin, 1))
    parts = gl.sum(weights.reshape([ROWS, BLOCK_S // 8, 8]), 1)
    shrink = origin
    if not FIRST:
        shrink = gl.exp2(peak * scale - origin)
        across: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        parts += total * gl.expand_dims(gl.convert_layout(shrink, across, assert_trivial=True), 1)
    return weights, highest, parts, shrink


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Two 16-bit weights in each 32-bit register, as the tensor cores read them.

    With 16-bit values the compiler would split and rejoin every pair in each iteration.
    """
    low, high = gl.split(weights.reshape([ROWS, weights.shape[1] // 2, 2]))
    kind: gl.constexpr = "f16" if dtype == gl.float16 else "bf16"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{kind}x2.f32 $0, $2, $1;",
        "=r,r,r",
        [low, high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """The same registers as a left operand of a product with accumulators of this layout."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [pairs],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    weights = gl.join(low, high).reshape([ROWS, pairs.shape[1] * 2]).to(dtype, bitcast=True)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


# --- backward -----------------------------------------------------------------------------------


@gluon.jit
def assigned(tiles, groups, bunch):
    """This program's group and tile: tile 0 of each group of a bunch, then tile 1, and so on.

    Tiles are numbered from the most work to the least, so the last ones are short. The groups of a
    bunch share the L2 cache.
    """
    pid = gl.program_id(0)
    start = pid // (bunch * tiles) * bunch
    inside = pid % (bunch * tiles)
    wide = gl.minimum(bunch, groups - start)
    return start + inside % wide, inside // wide


@gluon.jit
def exp2(x):
    """2^x by one hardware instruction; results below 2^-126 become 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
