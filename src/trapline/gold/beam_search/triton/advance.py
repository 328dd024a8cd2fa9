# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""One step of all searches in one launch, one program for each prompt.

Nothing is sorted: the rank of a candidate is the number of candidates before it, and one program
compares all pairs of a few hundred at once. Ties are broken by position, so ranks are distinct.
Works on the tensors of `batched_search.BatchedSearch` and gives the same numbers, bit for bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.beam_search.batched_search import BatchedSearch
from trapline.gold.device import launched

#: Candidates per prompt that one program compares with each other.
MOST = 256
#: Finished hypotheses, ends and live beams that compete for the pool.
MOST_ENTRIES = 128
FINISH = {"every": 0, "ranked": 1, "near": 2}
STOP = {"bound": 0, "current-length": 1, "full": 2, "max-length": 3}


@triton.jit
def ranks(values, keys, others, other_keys):
    """For each value, the number of others that are larger, or equal with a lower key."""
    larger = others[None, :] > values[:, None]
    earlier = (others[None, :] == values[:, None]) & (other_keys[None, :] < keys[:, None])
    return tl.sum((larger | earlier).to(tl.int32), 1)


@triton.jit
def is_among(tokens, ends, E: tl.constexpr):
    """Whether each token is an end."""
    found = tokens < 0
    for e in tl.static_range(E):
        found = found | (tokens == tl.load(ends + e))
    return found


@triton.jit
def ends_that_finish(
    finished, beam, end, is_end, value, token, i,
    W: tl.constexpr, C: tl.constexpr, E: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Totals of the ends that may enter the pool by the policy's finish rule; −inf elsewhere."""
    shift: tl.constexpr = 4294967296
    here, mine = (i // C).to(tl.int64) * shift + token, beam.to(tl.int64) * shift + end
    if FINISH == 1:
        first = ranks(finished, mine, value, here) + ranks(finished, mine, finished, mine)
    else:
        # Only continuations of the end's own beam count.
        own_beam = (i // C)[None, :] == beam[:, None]
        larger = value[None, :] > finished[:, None]
        equal = (value[None, :] == finished[:, None]) & (here[None, :] < mine[:, None])
        first = tl.sum((own_beam & (larger | equal)).to(tl.int32), 1)
        same = (beam[None, :] == beam[:, None]) & is_end[None, :]
        larger = finished[None, :] > finished[:, None]
        equal = (finished[None, :] == finished[:, None]) & (mine[None, :] < mine[:, None])
        first += tl.sum((same & (larger | equal)).to(tl.int32), 1)
    return tl.where(first < (W if FINISH == 1 else (1 + E) * W), finished, float("-inf"))


@triton.jit
def is_settled(worst, best, now, steps, powers, STOP: tl.constexpr):
    """Whether a stop rule other than "max-length" ends the search."""
    settled = worst > float("-inf")  # the pool is full
    if STOP == 0:
        after = best / tl.load(powers + now + 1)
        bound = tl.maximum(after, best / tl.load(powers + steps))
        settled = settled & (bound <= worst)
    if STOP == 1:
        settled = settled & (best / tl.load(powers + now) <= worst)
    return settled


@triton.jit
def move_rows(
    b, now, steps, prompts, parents, positions, tails, own,
    W: tl.constexpr, BEAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Advance the positions of live beams and copy each parent's table of pages."""
    w = tl.arange(0, BEAMS)
    tl.store(positions + b * W + w, tl.load(positions + b * W + w, mask=w < W) + 1, mask=w < W)
    parent = tl.load(parents + ((now - 1) * prompts + b) * W + w, mask=w < W, other=0)
    for start in range(0, steps, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (w < W)[:, None] & (column < steps)[None, :]
        target = (b * W + w)[:, None] * steps + column[None, :]
        past = (b * W + parent)[:, None] * steps + column[None, :]
        fresh = (column >= now - 1)[None, :]
        moved = tl.load(tails + past, mask=inside & ~fresh, other=0)
        moved = tl.where(fresh, tl.load(own + target, mask=inside & fresh, other=0), moved)
        tl.debug_barrier()
        tl.store(tails + target, moved, mask=inside)
        tl.debug_barrier()


@launched
@triton.jit
def advance_kernel(
    logits, lse, top, indices, ends, powers, offset,
    length, sums, parents, tokens, scores, totals, nodes, broken,
    ids, positions, tails, own,
    logits_row, steps, prompts,
    W: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr, BEAMS: tl.constexpr, COLUMNS: tl.constexpr,
    FINISH: tl.constexpr, STOP: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One prompt. Entries compete for the pool: finished hypotheses, ends, and live beams."""
    b = tl.program_id(0).to(tl.int64)
    now = tl.load(length + b) + 1
    none = float("-inf")

    i = tl.arange(0, BLOCK)
    there = i < W * C
    row = b * W + i // C
    token = tl.load(indices + row * C + i % C, mask=there, other=-1)
    value = tl.load(top + row * C + i % C, mask=there, other=none).to(tl.float64)
    value += tl.load(sums + row, mask=there, other=none)
    value = tl.where(is_among(token, ends, E), none, value)
    rank = ranks(value, i, value, i)

    t = tl.arange(0, ENTRIES)
    is_end = (t >= W) & (t < W + W * E)
    beam = tl.where(is_end, (t - W) // E, 0)
    end = tl.load(ends + tl.where(is_end, (t - W) % E, 0))
    at_end = tl.load(logits + (b * W + beam) * logits_row + end, mask=is_end, other=none)
    norm = tl.load(lse + b * W + beam, mask=is_end, other=0.0)
    before = tl.load(sums + b * W + beam, mask=is_end, other=none)
    finished = tl.where(is_end, before + (at_end - norm).to(tl.float64), none)
    alive = before > none
    bad = is_end & alive & ((norm != norm) | (tl.abs(norm) == float("inf")))
    tl.store(broken + t * 0, t * 0 + 1, mask=bad)
    if FINISH > 0:
        finished = ends_that_finish(finished, beam, end, is_end, value, token, i, W, C, E, FINISH)

    place = t - W - W * E
    is_live = (place >= 0) & (place < W)
    chosen = (rank[None, :] == place[:, None]) & there[None, :]
    total = tl.max(tl.where(chosen, value[None, :], none), 1)
    total = tl.where(is_live, total, none)
    source = tl.sum(tl.where(chosen, i[None, :], 0), 1)
    next_token = tl.sum(tl.where(chosen, token[None, :], 0), 1)

    length_counted = now + tl.load(offset + b)
    old = t < W
    score = tl.load(scores + b * W + t, mask=old, other=none)
    sum_old = tl.load(totals + b * W + t, mask=old, other=none)
    score = tl.where(is_end, finished / tl.load(powers + length_counted - COUNTED), score)
    at_last = now == steps
    cut = tl.where(at_last, total / tl.load(powers + length_counted), none)
    score = tl.where(is_live, cut, score)
    entry = tl.where(is_end, finished, tl.where(is_live, total, sum_old))
    node = (b * W + t) * 3
    step = tl.load(nodes + node, mask=old, other=0)
    of_beam = tl.load(nodes + node + 1, mask=old, other=0)
    with_end = tl.load(nodes + node + 2, mask=old, other=-1)
    step = tl.where(is_end, now - 2, tl.where(is_live, now - 1, step))
    of_beam = tl.where(is_end, beam.to(tl.int64), tl.where(is_live, place.to(tl.int64), of_beam))
    with_end = tl.where(is_end, end, tl.where(is_live, -1, with_end))
    competes = t < 2 * W + W * E
    score = tl.where(competes, score, none)
    order = ranks(score, t, score, t)
    tl.debug_barrier()  # all threads have read what is overwritten below
    stays = competes & (order < W)
    to = b * W + order
    tl.store(scores + to, score, mask=stays)
    tl.store(totals + to, entry, mask=stays)
    tl.store(nodes + to * 3, step, mask=stays)
    tl.store(nodes + to * 3 + 1, of_beam, mask=stays)
    tl.store(nodes + to * 3 + 2, with_end, mask=stays)

    worst = tl.max(tl.where(stays & (order == W - 1), score, none), 0)
    best = tl.max(tl.where(is_live & (place == 0), total, none), 0)
    over = at_last
    if STOP < 3:
        over = over | is_settled(worst, best, now, steps, powers, STOP)
    tl.store(sums + b * W + place, tl.where(over, none, total), mask=is_live)
    here_now = ((now - 1) * prompts + b) * W + place
    tl.store(parents + here_now, (source // C).to(tl.int64), mask=is_live)
    tl.store(tokens + here_now, next_token, mask=is_live)
    tl.store(ids + b * W + place, next_token, mask=is_live)
    tl.store(length + b, now)
    tl.debug_barrier()
    move_rows(b, now, steps, prompts, parents, positions, tails, own, W, BEAMS, COLUMNS)


def fits(search: BatchedSearch, candidates: int) -> bool:
    """Whether one program can compare all candidates of a prompt."""
    width, ends = search.rules.beam_width, len(search.rules.eos_ids)
    return width * candidates <= MOST and width * (2 + ends) <= MOST_ENTRIES


def advance(
    search: BatchedSearch,
    logits: Tensor,
    lse: Tensor,
    top: Tensor,
    indices: Tensor,
    broken: Tensor,
    ids: Tensor,
    positions: Tensor,
    tails: Tensor,
    own: Tensor,
) -> None:
    """One step of all searches and of their rows in the decoder; see `DeviceSearch`.

    `broken` (1,) int32 becomes 1 if the softmax of a live beam is undefined.
    """
    rules = search.rules
    count, width = search.sums.shape
    candidates, ends = top.shape[1], len(rules.eos_ids)
    advance_kernel[(count,)](
        *(logits, lse, top, indices, search.ends, search.powers, search.offset),
        *(search.length, search.sums, search.parents, search.tokens),
        *(search.scores, search.totals, search.nodes, broken, ids, positions, tails, own),
        *(logits.stride(0), rules.max_new_tokens, count),
        W=width,
        C=candidates,
        E=ends,
        BLOCK=triton.next_power_of_2(width * candidates),
        ENTRIES=triton.next_power_of_2(width * (2 + ends)),
        BEAMS=triton.next_power_of_2(width),
        COLUMNS=128,
        FINISH=FINISH[rules.policy.finish],
        STOP=STOP[rules.policy.stop],
        COUNTED=int(rules.policy.length == "with-prompt"),
        num_warps=16,  # limited by instruction fetches, which more threads hide
    )
