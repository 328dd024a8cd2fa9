"""Speculative decoding with draft trees: build, mask, verify, compact, generate.

The tree grows level by level: `itertools.accumulate` carries one `Level` to the next over the
rows of the draft, and a single stable sort merges all levels into the final order.
"""

from itertools import accumulate
from operator import index
from typing import NamedTuple

import numpy as np


class Level(NamedTuple):
    """The heaviest prefixes of one depth, heaviest first; `parents` are ranks in the level above."""

    weights: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray


# --- input checks -------------------------------------------------------------------------------


def _count(value, name):
    """A non-negative int."""
    value = index(value)
    if value < 0:
        raise ValueError(f"{name} must not be negative")
    return value


def _floats(values, rank, name):
    """A floating-point array of the given rank."""
    values = np.asarray(values)
    if values.dtype.kind != "f":
        raise TypeError(f"{name} must be floating-point")
    if values.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes")
    return values


def _ints(values, name):
    """A vector of integers; an empty sequence has no type of its own and counts as one."""
    if not isinstance(values, np.ndarray) and len(values) == 0:
        return np.zeros(0, np.int64)
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers")
    if values.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    return values


def _parents(parents):
    """Parents as int64, each of them -1 or an earlier node."""
    parents = _ints(parents, "parents")
    if (parents < -1).any() or (parents >= np.arange(len(parents))).any():
        raise ValueError("a parent must come before its children")
    return parents.astype(np.int64)


def _tree(tokens, parents):
    """A checked tree."""
    tokens, parents = _ints(tokens, "tokens"), _parents(parents)
    if len(tokens) != len(parents):
        raise ValueError("tokens and parents differ in length")
    return tokens, parents


# --- building -----------------------------------------------------------------------------------


def _heaviest(weights, count):
    """Positions of the `count` largest weights, largest first, the earlier one on a tie."""
    if count == 0:
        return np.zeros(0, np.int64)
    positions = np.arange(len(weights))
    if count < len(weights):
        cut = len(weights) - count
        positions = np.flatnonzero(weights >= np.partition(weights, cut)[cut])
    order = np.argsort(-weights[positions], kind="stable")
    return positions[order[:count]]


def _next_level(above, row, budget):
    """The `budget` heaviest children of a level under one row of the draft.

    The child of parent rank p with token rank t has (p + 1)(t + 1) - 1 children of the same level
    before it, so parent p needs to offer its best budget // (p + 1) tokens only.
    """
    tokens = _heaviest(row, min(budget, len(row)))
    gains = row[tokens].astype(np.float64)
    tokens, gains = tokens[gains > -np.inf], gains[gains > -np.inf]

    ranks = np.arange(len(above.weights))
    offers = np.minimum(budget // (ranks + 1), len(tokens))
    parents = np.repeat(ranks, offers)
    choices = np.arange(len(parents)) - np.repeat(np.cumsum(offers) - offers, offers)

    weights = above.weights[parents] + gains[choices]
    best = _heaviest(weights, min(budget, len(weights)))
    return Level(weights[best], parents[best], tokens[choices[best]])


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = _floats(log_q, 2, "log_q")
    budget = _count(budget, "budget")
    if not (log_q < np.inf).all():
        raise ValueError("log_q holds NaN or +inf")

    budget = min(budget, np.iinfo(np.int64).max)
    root = Level(np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
    levels = list(accumulate(log_q, lambda above, row: _next_level(above, row, budget), initial=root))

    # One list of all candidates with the root in place 0, each pointing at its parent's place.
    sizes = [len(level.weights) for level in levels]
    starts = np.cumsum([0, *sizes])
    weights = np.concatenate([level.weights for level in levels])
    tokens = np.concatenate([level.tokens for level in levels])
    above = np.concatenate([root.parents] + [lv.parents + s for lv, s in zip(levels[1:], starts)])

    kept = 1 + _heaviest(weights[1:], min(budget, len(weights) - 1))
    place = np.full(len(weights), -1, np.int64)
    place[kept] = np.arange(len(kept))
    return tokens[kept].astype(np.int64), place[above[kept]]


# --- the target's side --------------------------------------------------------------------------


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _parents(parents)
    prefix_len = _count(prefix_len, "prefix_len")
    rows = len(parents) + 1
    mask = np.zeros((rows, prefix_len + rows), bool)
    mask[0, : prefix_len + 1] = True
    for row, parent in enumerate(parents, start=1):
        mask[row] = mask[parent + 1]
        mask[row, prefix_len + row] = True
    return mask


def _walk(tokens, parents, picks):
    """Follow the picks from the root as long as the tree holds them."""
    node_of = {edge: node for node, edge in enumerate(zip(parents.tolist(), tokens.tolist()))}
    path = []
    node = -1
    while (node, picks[node + 1]) in node_of:
        node = node_of[node, picks[node + 1]]
        path.append(node)
    return path, picks[node + 1]


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _tree(tokens, parents)
    choices = _ints(choices, "choices")
    if len(choices) != len(tokens) + 1:
        raise ValueError("choices must have one entry for the root and one a node")
    return _walk(tokens, parents, choices.tolist())


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _tree(tokens, parents)
    probs = _floats(probs, 2, "probs")
    uniforms = _floats(uniforms, 1, "uniforms")
    if not len(probs) == len(uniforms) == len(tokens) + 1:
        raise ValueError("probs and uniforms must have one row for the root and one a node")
    if not ((probs >= 0) & (probs < np.inf)).all():
        raise ValueError("probabilities must be finite and not negative")
    possible = probs > 0
    if not possible.any(axis=1).all():
        raise ValueError("a law has no possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")

    totals = np.cumsum(probs, axis=1, dtype=np.float64)
    beyond = totals > uniforms[:, None].astype(np.float64)
    last = probs.shape[1] - 1 - np.argmax(possible[:, ::-1], axis=1)
    picks = np.where(beyond.any(axis=1), np.argmax(beyond, axis=1), last)
    return _walk(tokens, parents, picks.tolist())


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    prefix_len = _count(prefix_len, "prefix_len")
    path = _ints(path, "path")
    if kv.ndim < 2:
        raise ValueError("kv needs an axis of rows and one of features")
    nodes = kv.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError("kv is shorter than the prefix and the root")
    if (path < 0).any() or (path >= nodes).any():
        raise ValueError("path leaves the cache")
    rows = np.concatenate([np.arange(prefix_len + 1), path.astype(np.int64) + prefix_len + 1])
    return np.take(kv, rows, axis=-2)


# --- the loop -----------------------------------------------------------------------------------


def _round(target, drafter, prefix, budget):
    """One draft and one pass of the target: (committed tokens, how many of them were drafted)."""
    log_q = np.asarray(drafter.block(list(prefix)))
    tokens, parents = build_tree(log_q, budget)
    answer = _floats(target.tree_log_probs(list(prefix), tokens, parents), 2, "the target's answer")
    if answer.shape != (len(tokens) + 1, log_q.shape[1]):
        raise ValueError("the target's answer does not fit the tree and the vocabulary")
    if np.isnan(answer).any():
        raise ValueError("the target's answer holds NaN")
    path, bonus = verify_tree(tokens, parents, np.argmax(answer, axis=1))
    return [*tokens[path].tolist(), bonus], len(path)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    prompt = [index(token) for token in prompt]
    if not prompt:
        raise ValueError("the prompt is empty")
    room = _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")

    generated = []
    stats = {"target_passes": 0, "accepted": 0}
    ended = False
    while len(generated) < room and not ended:
        fresh, drafted = _round(target, drafter, prompt + generated, budget)
        fresh = fresh[: room - len(generated)]
        if eos_id in fresh:
            fresh = fresh[: fresh.index(eos_id) + 1]
            ended = True
        generated += fresh
        stats["target_passes"] += 1
        stats["accepted"] += min(drafted, len(fresh))
    return generated, stats
