"""Speculative decoding with draft trees.

The rows of a draft are independent, so below every node of one depth hangs the same tree. The tree is
therefore folded from the last row to the first: the heaviest suffixes that start at row d are a token of
row d followed by nothing or by one of the heaviest suffixes that start at row d + 1.
"""
from collections import namedtuple
from functools import reduce
from operator import index

import numpy as np

# Suffixes in their order. `parent` is an index into the same forest, -1 for the start. Column j of
# `words` and `sums` holds the token and the weight after j + 1 steps (padded behind the suffix's end).
Forest = namedtuple("Forest", "weight depth parent words sums")


# ------------------------------------------------------------------------------------- checks
def _count(value, name):
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer")
    number = index(value)
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _floats(array, rank, name):
    array = np.asarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must be floating-point")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes")
    return array


def _ints(array, name):
    if not isinstance(array, np.ndarray) and np.shape(array) == (0,):
        array = np.zeros(0, np.int64)
    array = np.asarray(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    return array.tolist()


def _parents(parents):
    parents = _ints(parents, "parents")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError("a parent must come before its children")
    return parents


def _tree(tokens, parents):
    tokens, parents = _ints(tokens, "tokens"), _parents(parents)
    if len(tokens) != len(parents):
        raise ValueError("tokens and parents differ in length")
    return tokens, parents


# --------------------------------------------------------------------------------- build_tree
def _best_words(row, budget):
    """The heaviest possible tokens of a row, heaviest first, the lower first among equals."""
    if budget < row.size:
        edge = np.partition(row, row.size - budget)[row.size - budget]
        above = np.flatnonzero(row > edge)
        level = np.flatnonzero(row == edge)
        chosen = np.concatenate([above, level[: budget - above.size]])
    else:
        chosen = np.arange(row.size)
    chosen = chosen[row[chosen] > -np.inf]
    return chosen[np.lexsort((chosen, -row[chosen]))]


def _pairs(words, tails, budget):
    """Index pairs that no `budget` others precede: (i + 1) * (j + 1) <= budget."""
    words = min(words, budget)
    reach = np.minimum(budget // np.arange(1, words + 1), tails)
    first = np.repeat(np.arange(words), reach)
    start = np.cumsum(reach) - reach
    return first, np.arange(first.size) - np.repeat(start, reach)


def _prepend(forest, row, budget):
    row = np.asarray(row, np.float64)
    words = _best_words(row, budget)
    tails = forest.weight.size + 1
    first, tail = _pairs(words.size, tails, budget)
    weight = row[words][first] + np.concatenate([[0.0], forest.weight])[tail]
    if first.size > budget:
        edge = np.partition(weight, first.size - budget)[first.size - budget]
        hopeful = weight >= edge
        first, tail, weight = first[hopeful], tail[hopeful], weight[hopeful]

    head = row[words][first]
    depth = np.concatenate([[0], forest.depth])[tail] + 1
    pad = np.zeros((1, forest.words.shape[1]))
    spoken = np.concatenate([pad.astype(np.int64), forest.words])[tail]
    sums = np.concatenate([pad, forest.sums])[tail] + head[:, None]
    sums[np.arange(sums.shape[1]) >= depth[:, None] - 1] = 0.0
    spoken = np.column_stack([words[first], spoken])
    sums = np.column_stack([head, sums])

    # The lower parent index is the heavier parent, then the heavier parent of that one, and so on;
    # where all of those agree, the first different token decides.
    keys = [*spoken.T[::-1], *(-sums.T), depth, -weight]
    order = np.lexsort(keys)[:budget]

    name = first * tails + tail
    above = np.concatenate([[-1], forest.parent + 1])[tail]  # of the tail: -1 where there is none
    kept, inner = name[order], tail[order] > 0
    parent = np.full(order.size, -1)
    sorter = np.argsort(kept)
    wanted = (first * tails + above)[order][inner]
    parent[inner] = sorter[np.searchsorted(kept, wanted, sorter=sorter)]
    return Forest(weight[order], depth[order], parent, spoken[order], sums[order])


def build_tree(log_q, budget):
    log_q = _floats(log_q, 2, "log_q")
    budget = _count(budget, "budget")
    if np.isnan(log_q).any() or np.isposinf(log_q).any():
        raise ValueError("log_q must not hold NaN or +inf")
    nothing = np.zeros(0, np.int64)
    if budget == 0 or log_q.size == 0:
        return nothing, nothing.copy()
    budget = min(budget, sum(log_q.shape[1] ** d for d in range(1, log_q.shape[0] + 1)))
    seed = Forest(np.zeros(0), nothing, nothing, np.zeros((0, 0), np.int64), np.zeros((0, 0)))
    forest = reduce(lambda below, row: _prepend(below, row, budget), log_q[::-1], seed)
    tokens = forest.words[np.arange(forest.depth.size), forest.depth - 1]
    return tokens.astype(np.int64), forest.parent.astype(np.int64)


# ------------------------------------------------------------------------- mask, verification
def tree_mask(parents, prefix_len):
    parents = _parents(parents)
    prefix_len = _count(prefix_len, "prefix_len")
    rows = len(parents) + 1
    mask = np.zeros((rows, prefix_len + rows), bool)
    mask[0, : prefix_len + 1] = True
    for row, parent in enumerate(parents, start=1):
        mask[row] = mask[parent + 1]
        mask[row, prefix_len + row] = True
    return mask


def _walk(tokens, parents, pick):
    """Follow the picks from the root as long as they were drafted."""
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens))}
    path, here = [], -1
    while (here, pick[here + 1]) in child:
        here = child[here, pick[here + 1]]
        path.append(here)
    return path, pick[here + 1]


def verify_tree(tokens, parents, choices):
    tokens, parents = _tree(tokens, parents)
    choices = _ints(choices, "choices")
    if len(choices) != len(tokens) + 1:
        raise ValueError("choices must have one entry for the root and one for each node")
    return _walk(tokens, parents, choices)


def verify_sampled(tokens, parents, probs, uniforms):
    tokens, parents = _tree(tokens, parents)
    probs = _floats(probs, 2, "probs").astype(np.float64)
    uniforms = _floats(uniforms, 1, "uniforms").astype(np.float64)
    rows = len(tokens) + 1
    if probs.shape[0] != rows or uniforms.size != rows:
        raise ValueError("probs and uniforms must have a row for the root and one for each node")
    if not (np.isfinite(probs).all() and (probs >= 0).all()):
        raise ValueError("probabilities must be finite and not negative")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    possible = probs > 0
    if not possible.any(axis=1).all():
        raise ValueError("a law without any possible token")
    beyond = np.cumsum(probs, axis=1) > uniforms[:, None]
    last = probs.shape[1] - 1 - possible[:, ::-1].argmax(axis=1)
    picks = np.where(beyond.any(axis=1), beyond.argmax(axis=1), last)
    return _walk(tokens, parents, picks.tolist())


def compact(kv, prefix_len, path):
    kv = np.asarray(kv)
    prefix_len = _count(prefix_len, "prefix_len")
    if kv.ndim < 2:
        raise ValueError("kv must have at least two axes")
    nodes = kv.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError("kv is shorter than the prefix and the root")
    path = _ints(path, "path")
    if any(not 0 <= node < nodes for node in path):
        raise ValueError("the path leaves the cache")
    rows = [*range(prefix_len + 1), *(prefix_len + 1 + node for node in path)]
    return np.take(kv, rows, axis=-2)


# ----------------------------------------------------------------------------------- generate
def _round(target, drafter, committed, budget):
    """One pass: the accepted tokens and the bonus."""
    draft = _floats(drafter.block(list(committed)), 2, "log_q")
    tokens, parents = build_tree(draft, budget)
    answer = target.tree_log_probs(list(committed), tokens.copy(), parents.copy())
    answer = _floats(answer, 2, "the target's answer")
    vocabulary = draft.shape[1] or answer.shape[1]  # a drafter without rows need not know it
    if vocabulary == 0 or answer.shape != (tokens.size + 1, vocabulary):
        raise ValueError("the target's answer must be (N+1, V)")
    if np.isnan(answer).any():
        raise ValueError("NaN in the target's answer")
    path, bonus = verify_tree(tokens, parents, answer.argmax(axis=1))
    return tokens[path].tolist(), bonus


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    limit = _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")
    committed = [index(token) for token in prompt]
    if not committed:
        raise ValueError("the prompt is empty")
    start, passes, accepted = len(committed), 0, 0
    done = False
    while not done and len(committed) - start < limit:
        drafted, bonus = _round(target, drafter, committed, budget)
        passes += 1
        fresh = (drafted + [bonus])[: limit - (len(committed) - start)]
        if eos_id in fresh:
            fresh = fresh[: fresh.index(eos_id) + 1]
            done = True
        accepted += min(len(fresh), len(drafted))
        committed.extend(fresh)
    return committed[start:], {"target_passes": passes, "accepted": accepted}
