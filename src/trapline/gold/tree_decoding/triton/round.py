# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Kernels between the passes of a round: from logits to a tree, from choices to a commit.

Each step is one small launch; in torch operations they are more than a hundred, which would take
most of a round of a small model. Row 0 of a row's `nodes` is its root, row i + 1 is node i.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.device import launched
from trapline.gold.tree_decoding.triton.tree import lay_out

#: Multipliers of splitmix64's finaliser, the same as in `decoder.sampling`.
ODD = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def best_of(best, place, line, tiles, lines, BLOCK: tl.constexpr):
    """The most likely token of a line (ties: the lower one), from the best of each tile.

    −1 if the softmax is undefined: a tile that contains NaN reports +inf, torch's maximum NaN.
    """
    tile = tl.arange(0, BLOCK)
    at = tile.to(tl.int64) * lines + line
    highs = tl.load(best + at, mask=tile < tiles, other=float("-inf"))
    high, where = tl.max(highs, 0, return_indices=True)
    found = tl.load(place + where.to(tl.int64) * lines + line).to(tl.int64)
    return tl.where(tl.abs(high) < float("inf"), found, -1)


@launched
@triton.jit
def choose_kernel(best, place, choices, tiles, lines, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """choices (lines,): the most likely token of every line."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0)
    tl.store(choices + line, best_of(best, place, line, tiles, lines, BLOCK))


@launched
@triton.jit
def chain_kernel(
    best, place, roots, tokens, ids, tiles, lines, nodes, block,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The most likely tokens of a row's `block` slots as a chain of `nodes`; slot 0 is the root."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0)
    slot = line % block
    row = line // block
    found = best_of(best, place, line, tiles, lines, BLOCK)
    root = tl.load(roots + row)
    kept = slot < nodes
    tl.store(ids + row * nodes + slot, tl.where(slot == 0, root, tl.maximum(found, 0)), mask=kept)
    tl.store(tokens + row * (nodes - 1) + slot - 1, found, mask=kept & (slot > 0))


@triton.jit
def mixed(x):
    """The finaliser of splitmix64."""
    x = x + ODD
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def weights_of(x, peak, heat):
    """Unnormalised probabilities in float64; a greedy row (heat 0) has them on its maxima only."""
    soft = tl.exp2((x - peak) * heat).to(tl.float64)
    return tl.where(heat > 0.0, soft, (x >= peak).to(tl.float64))


@launched
@triton.jit
def draw_kernel(
    logits, seeds, made, depths, choices, V, nodes, heat,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sample of every line, with the random number that belongs to the token's position.

    The sample is the first token whose cumulative weight exceeds u · total, summed in float64, and
    never one of weight 0. `heat` (rows,) is log2(e) / temperature; a row of heat 0 is greedy, with
    ties to the lower token. −1 if the softmax is undefined.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0)
    row = line // nodes
    number = tl.load(made + row) + tl.load(depths + line)
    warmth = tl.load(heat + row)
    bits = mixed(mixed(tl.load(seeds + row)) + number * ODD)
    u = ((bits >> 11) & ((1 << 53) - 1)).to(tl.float64) * (2.0**-53)
    v = tl.arange(0, BLOCK)
    here = logits + line.to(tl.int64) * V
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        high = tl.maximum(high, tl.load(here + start + v, mask=start + v < V, other=float("-inf")))
    peak = tl.max(high, 0)
    mass = tl.zeros([BLOCK], tl.float64)
    broken = v < 0
    for start in range(0, V, BLOCK):
        x = tl.load(here + start + v, mask=start + v < V, other=float("-inf"))
        mass += weights_of(x, peak, warmth)
        broken = broken | (x != x) | (x == float("inf"))
    total = tl.sum(mass, 0)
    goal = tl.where(warmth > 0.0, u * total, 0.0)
    before = total * 0.0
    pick = V
    last = -1
    for start in range(0, V, BLOCK):
        x = tl.load(here + start + v, mask=start + v < V, other=float("-inf"))
        weight = weights_of(x, peak, warmth)
        reached = before + tl.cumsum(weight, 0)
        passed = (reached > goal) & (weight > 0.0)
        pick = tl.minimum(pick, tl.min(tl.where(passed, start + v, V), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, start + v, -1), 0))
        before += tl.sum(weight, 0)
    undefined = (tl.max(broken.to(tl.int32), 0) > 0) | (peak == float("-inf"))
    tl.store(choices + line, tl.where(undefined, -1, tl.minimum(pick, last)).to(tl.int64))


@launched
@triton.jit
def prepare_kernel(
    tokens, parents, roots, ids, depths, seen, nodes,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`lay_out` for trees that are given by their tokens and parents."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = (i > 0) & (i < nodes)
    at = row * (nodes - 1) + i - 1
    token = tl.load(tokens + at, mask=real, other=0)
    above = tl.load(parents + at, mask=real, other=-1) + 1
    lay_out(token, above, tl.load(roots + row), ids, depths, seen, row, nodes, BLOCK, ROUNDS)


@launched
@triton.jit
def verdict_kernel(
    tokens, parents, seen, depths, choices,
    path,  # (rows, deepest + 1): 0 for the root, then accepted nodes as rows of the pass
    roots, lengths, known, made, limits,  # (rows,)
    text,  # (rows, room) tokens by position
    log, rounds, kept,  # tokens of each round (rows, room), rounds so far, tokens of this round
    anchors, block,  # the drafter's blocks; each begins with the root
    nodes, deepest, room,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept the branch on which every token is the target's choice, and commit it.

    A node is accepted when no node of its branch is wrong. Rows that have reached their limit stay
    as they are.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = (i > 0) & (i < nodes)
    at = row * (nodes - 1) + i - 1
    token = tl.load(tokens + at, mask=real, other=-1)
    above = tl.load(parents + at, mask=real, other=-1) + 1
    wanted = tl.load(choices + row * nodes + above, mask=real, other=-2)
    # A choice of −1 (undefined softmax) must not match the −1 of padding nodes.
    wrong = real & ((token != wanted) | (token < 0))
    places = seen + (row * nodes + i)[:, None] * nodes + i[None, :]
    inside = (i < nodes)[:, None] & (i < nodes)[None, :]
    continues = tl.load(places, mask=inside, other=0) != 0
    errors = tl.sum((continues & wrong[None, :]).to(tl.int32), 1)
    accepted = (errors == 0) & (i < nodes)
    depth = tl.load(depths + row * nodes + i, mask=i < nodes, other=0)
    last = tl.max(tl.where(accepted, i, 0), 0)
    bonus = tl.load(choices + row * nodes + last)
    count = tl.sum(accepted.to(tl.int64), 0)  # the root counts for the bonus
    said = tl.load(made + row)
    going = said < tl.load(limits + row)
    count = tl.where(going, count, 0)
    length = tl.load(lengths + row)
    tl.store(path + row * (deepest + 1) + depth, i.to(tl.int64), mask=accepted)
    here = text + row * room
    # Not `& going`: the interpreter of Triton 3.9 rejects masks made from scalars.
    there = accepted & real & (length + depth < tl.where(going, room, 0))
    tl.store(here + length + depth, token, mask=there)
    if going & (length + count < room):
        tl.store(here + length + count, bonus)
    tl.store(known + row, length)
    tl.store(lengths + row, length + count)
    tl.store(made + row, said + count)
    tl.store(kept + row, count)
    done = tl.load(rounds + row)
    tl.store(log + row * room + done % room, count)
    tl.store(rounds + row, done + going.to(tl.int64))
    if going:
        # The text keeps a −1 for the host to find; the embedding has no row for it.
        root = tl.maximum(bonus, 0)
        tl.store(roots + row, root)
        if anchors is not None:
            tl.store(anchors + row * block, root)


@launched
@triton.jit
def move_kernel(
    keys, values,  # (layers, rows · room, G · D)
    features, fresh,  # (rows · nodes, F) and (rows · (deepest + 1), F)
    path, known, kept, nodes, deepest, room, rows, layers, parts, wide, F,
    BLOCK_L: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Move the accepted rows of every layer's cache, and their features, behind the root.

    For each row, `parts` programs move a layer's cache; the remaining programs move the features.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    layer = (tl.program_id(1) // parts).to(tl.int64)
    part = tl.program_id(1) % parts
    if layer >= layers:
        part = tl.program_id(1) - layers * parts
    j = tl.arange(0, BLOCK_L)
    c = part * BLOCK + tl.arange(0, BLOCK)
    taken = j < tl.load(kept + row)
    node = tl.load(path + row * (deepest + 1) + j, mask=taken, other=0)
    if layer < layers:
        first = layer * rows * room + row * room + tl.load(known + row)
        source = (first + node)[:, None] * wide + c[None, :]
        goal = (first + j)[:, None] * wide + c[None, :]
        there = taken[:, None] & (c < wide)[None, :]
        k = tl.load(keys + source, mask=there, other=0.0)
        v = tl.load(values + source, mask=there, other=0.0)
        # Destination rows of one thread may be source rows of another.
        tl.debug_barrier()
        tl.store(keys + goal, k, mask=there)
        tl.store(values + goal, v, mask=there)
    elif features is not None:
        inside = taken[:, None] & (c < F)[None, :]
        left = features + (row * nodes + node)[:, None] * F + c[None, :]
        kept_here = fresh + (row * (deepest + 1) + j)[:, None] * F + c[None, :]
        tl.store(kept_here, tl.load(left, mask=inside, other=0.0), mask=inside)


@launched
@triton.jit
def lookup_kernel(
    text, lengths, tokens, room, drafted, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tokens after the latest earlier occurrence of the longest ending, at most WIDTH long."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    here = text + row * room
    end = tl.load(lengths + row)
    s = tl.arange(0, BLOCK)
    alike = s < end
    best = tl.full([BLOCK], -1, tl.int64)
    for width in tl.static_range(WIDTH):
        wanted = tl.load(here + tl.maximum(end - width, 0))
        found = tl.load(here + s - width, mask=alike & (s >= width), other=-1)
        alike = alike & (found == wanted) & (s >= width)
        best = tl.where(alike, (width * room + s).to(tl.int64), best)
    top = tl.max(best, 0)
    j = tl.arange(0, BLOCK_L)
    start = top % room + 1 + j
    known = (start <= tl.where(top >= 0, end, -1)) & (j < drafted)
    said = tl.load(here + start, mask=known, other=-1)
    tl.store(tokens + row * drafted + j, said, mask=j < drafted)
