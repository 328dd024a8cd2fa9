"""Speculative decoding with draft trees.

A tree grows level by level. A running pool of the heaviest weights seen so far gives the weight that a deeper
prefix must exceed; the levels are merged into one order at the end.
"""

import operator
import sys
from typing import NamedTuple

import numpy as np


class Level(NamedTuple):
    """The surviving prefixes of one depth, best first; `parents` are places in the level above."""

    weights: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    rows = _check_draft(log_q)
    budget = min(_check_count(budget, "budget"), sys.maxsize)
    levels = []
    above = np.zeros(1)
    pool = np.empty(0)
    cutoff = -np.inf
    for row in rows if budget else ():
        level = _grow(above, row, budget, cutoff)
        if level.weights.size == 0:
            break
        levels.append(level)
        above = level.weights
        pool = np.sort(np.concatenate([pool, level.weights]))[-budget:]
        if pool.size == budget:
            cutoff = pool[0]
    return _merge(levels, budget)


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _check_parents(parents)
    prefix_len = _check_count(prefix_len, "prefix_len")
    count = parents.size
    mask = np.zeros((count + 1, prefix_len + count + 1), dtype=bool)
    mask[0, : prefix_len + 1] = True
    for node, parent in enumerate(parents):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, prefix_len + 1 + node] = True
    return mask


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _check_tree(tokens, parents)
    choices = _check_integers(choices, "choices")
    if choices.size != tokens.size + 1:
        raise ValueError("choices must have one entry for the root and one for each node")
    return _follow(tokens, parents, choices)


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _check_tree(tokens, parents)
    probs = _check_floats(probs, "probs", 2)
    uniforms = _check_floats(uniforms, "uniforms", 1)
    if not len(probs) == len(uniforms) == tokens.size + 1:
        raise ValueError("probs and uniforms must have one row for the root and one for each node")
    _check_laws(probs)
    if not np.all((uniforms >= 0) & (uniforms < 1)):
        raise ValueError("uniforms must lie in [0, 1)")
    return _follow(tokens, parents, _sample(probs, uniforms))


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    if kv.ndim < 2:
        raise ValueError("kv must have at least two axes")
    root = _check_count(prefix_len, "prefix_len")
    nodes = kv.shape[-2] - root - 1
    if nodes < 0:
        raise ValueError("the cache is too short for its prefix and root")
    path = _check_integers(path, "path")
    if np.any((path < 0) | (path >= nodes)):
        raise ValueError("the path leaves the cache")
    committed = kv[..., : root + 1, :]
    drafted = kv[..., root + 1 :, :]
    return np.concatenate([committed, drafted[..., path, :]], axis=-2)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    committed = _check_prompt(prompt)
    limit = _check_count(max_new_tokens, "max_new_tokens")
    budget = _check_count(budget, "budget")
    generated = []
    stats = {"target_passes": 0, "accepted": 0}
    finished = False
    while not finished and len(generated) < limit:
        draft = _check_draft(drafter.block(list(committed)))
        tokens, parents = build_tree(draft, budget)
        answer = target.tree_log_probs(list(committed), tokens.copy(), parents.copy())
        stats["target_passes"] += 1
        picks = _greedy_picks(answer, (tokens.size + 1, draft.shape[1]))
        path, bonus = _follow(tokens, parents, picks)
        new = [*tokens[path].tolist(), bonus][: limit - len(generated)]
        if eos_id in new:
            new = new[: new.index(eos_id) + 1]
            finished = True
        stats["accepted"] += min(len(path), len(new))
        generated.extend(new)
        committed.extend(new)
    return generated, stats


def _grow(above, row, budget, cutoff):
    """The children, by one row of the draft, that could be among the `budget` heaviest prefixes.

    Child number c of parent number p stands behind (p + 1) * (c + 1) - 1 others of its level, so only the first
    budget // (p + 1) children of a parent count. A child as light as the cutoff loses to the shallower prefixes.
    """
    best = _heaviest_tokens(row, budget)
    places = np.arange(above.size)
    fan_out = np.minimum(budget // (places + 1), best.size)
    parents = np.repeat(places, fan_out)
    first = np.cumsum(fan_out) - fan_out
    tokens = best[np.arange(parents.size) - np.repeat(first, fan_out)]
    weights = above[parents] + row[tokens]
    alive = np.flatnonzero(weights > cutoff)
    order = alive[np.lexsort((tokens[alive], parents[alive], -weights[alive]))[:budget]]
    return Level(weights[order], parents[order], tokens[order])


def _heaviest_tokens(row, count):
    """The `count` best tokens of a row, best first, the lower token first among equals."""
    candidates = np.arange(row.size)
    if count < row.size:
        threshold = np.partition(row, row.size - count)[row.size - count]
        candidates = np.flatnonzero(row >= threshold)
    order = np.argsort(-row[candidates], kind="stable")
    return candidates[order][:count]


def _merge(levels, budget):
    """One tree of the best `budget` prefixes of all levels, heaviest first."""
    if not levels:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    sizes = [level.weights.size for level in levels]
    starts = np.cumsum([0, *sizes[:-1]])
    weights = np.concatenate([level.weights for level in levels])
    tokens = np.concatenate([level.tokens for level in levels])
    above = [np.full(sizes[0], -1)]
    above += [start + level.parents for start, level in zip(starts, levels[1:])]
    above = np.concatenate(above)
    # The prefixes lie level by level, each level in its order: a stable sort keeps that order between equals.
    order = np.argsort(-weights, kind="stable")[:budget]
    index = np.full(weights.size + 1, -1, dtype=np.int64)
    index[order] = np.arange(order.size)
    return tokens[order].astype(np.int64), index[above[order]]


def _follow(tokens, parents, picks):
    """The branch that agrees with the picks (N+1,), and the pick at its end."""
    agrees = tokens == picks[parents + 1]
    path = []
    tip = -1
    for node in np.flatnonzero(agrees).tolist():
        if parents[node] == tip:
            path.append(node)
            tip = node
    return path, int(picks[tip + 1])


def _sample(probs, uniforms):
    """Per row the first token whose cumulative probability exceeds the number, else the last possible one."""
    exceeds = np.cumsum(probs, axis=1) > uniforms[:, None]
    last_possible = probs.shape[1] - 1 - np.argmax(probs[:, ::-1] > 0, axis=1)
    return np.where(exceeds.any(axis=1), exceeds.argmax(axis=1), last_possible)


def _greedy_picks(answer, shape):
    """The most likely token of each row of the target's answer, the lower one on a tie."""
    answer = _check_floats(answer, "the target's answer", 2)
    if answer.shape != shape:
        raise ValueError(f"the target's answer must have shape {shape}, not {answer.shape}")
    if np.isnan(answer).any():
        raise ValueError("the target's answer holds NaN")
    return answer.argmax(axis=1)


def _check_count(value, name):
    count = operator.index(value)
    if count < 0:
        raise ValueError(f"{name} must not be negative")
    return count


def _check_floats(values, name, ndim):
    values = np.asarray(values)
    if values.dtype.kind != "f":
        raise TypeError(f"{name} must be floating-point")
    if values.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes")
    return values.astype(np.float64)


def _check_integers(values, name):
    array = np.asarray(values)
    if array.size == 0 and isinstance(values, (list, tuple)):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    return array.astype(np.int64)


def _check_draft(log_q):
    rows = _check_floats(log_q, "log_q", 2)
    if np.isnan(rows).any() or np.isposinf(rows).any():
        raise ValueError("log_q must not hold NaN or +inf")
    return rows


def _check_parents(parents):
    parents = _check_integers(parents, "parents")
    if np.any((parents < -1) | (parents >= np.arange(parents.size))):
        raise ValueError("a parent must come before its children")
    return parents


def _check_tree(tokens, parents):
    tokens = _check_integers(tokens, "tokens")
    parents = _check_parents(parents)
    if tokens.size != parents.size:
        raise ValueError("tokens and parents must have the same length")
    return tokens, parents


def _check_laws(probs):
    if not np.all((probs >= 0) & (probs < np.inf)):
        raise ValueError("probabilities must be finite and not negative")
    if not np.all((probs > 0).any(axis=1)):
        raise ValueError("a law has no possible token")


def _check_prompt(prompt):
    tokens = [operator.index(token) for token in prompt]
    if not tokens:
        raise ValueError("the prompt is empty")
    return tokens
