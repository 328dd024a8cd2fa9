"""Speculative decoding with draft trees.

The tree is built level by level.  A cutoff, the weight of the `budget`-th best prefix found so far,
rises as prefixes are found; of every parent only the children above it are ever made.
"""

import operator
from typing import NamedTuple

import numpy as np

ROOT = -1
CHUNK = 1 << 16  # so many prefixes are made between two updates of the cutoff


class Level(NamedTuple):
    """Prefixes of one depth, in the order of the tree; parents are ranks in the level above."""

    weights: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray


# ---------------------------------------------------------------------------------------------
# Building a tree
# ---------------------------------------------------------------------------------------------


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = _check_draft(log_q)
    budget = _check_count("budget", budget)
    levels = []
    parent_weights = np.zeros(1)
    best = np.empty(0)
    for row in log_q:
        level, best = _grow(parent_weights, row, best, budget)
        if level.weights.size == 0:
            break
        levels.append(level)
        parent_weights = level.weights
    return _merge_levels(levels, budget)


def _heaviest_tokens(row, count):
    """(tokens, values) of the `count` most likely tokens of a row, ties by token, none impossible."""
    tokens = np.flatnonzero(row > -np.inf)
    if tokens.size > count:
        values = row[tokens]
        bound = np.partition(values, tokens.size - count)[tokens.size - count]
        tokens = tokens[values >= bound]
    order = np.argsort(-row[tokens], kind="stable")[:count]
    tokens = tokens[order]
    return tokens, row[tokens].astype(np.float64)


def _grow(parent_weights, row, best, budget):
    """The next level of the tree, and the weights of the best prefixes including it."""
    nothing = np.empty(0, dtype=np.int64)
    level = Level(np.empty(0), nothing, nothing)
    if budget == 0:
        return level, best
    tokens, values = _heaviest_tokens(row, budget)
    start = 0
    while start < parent_weights.size:
        # Whoever ties with the cutoff comes after those that set it: they are less deep, or have
        # an earlier parent.
        cutoff = best.min() if best.size == budget else -np.inf
        counts = _promising(parent_weights[start:], values, cutoff)
        if not counts.any():
            break
        stop = start + max(1, int(np.searchsorted(np.cumsum(counts), CHUNK, side="right")))
        counts = counts[: stop - start]
        parents = np.repeat(np.arange(start, stop), counts)
        ranks = np.arange(parents.size) - np.repeat(np.cumsum(counts) - counts, counts)
        weights = parent_weights[parents] + values[ranks]
        keep = weights > cutoff
        level = _ordered(
            Level(
                np.concatenate([level.weights, weights[keep]]),
                np.concatenate([level.parents, parents[keep]]),
                np.concatenate([level.tokens, tokens[ranks[keep]]]),
            ),
            budget,
        )
        best = _largest(np.concatenate([best, weights[keep]]), budget)
        start = stop
    return level, best


def _promising(parent_weights, values, cutoff):
    """How many of the sorted values may lift each parent above the cutoff (never too few)."""
    if cutoff == -np.inf:
        return np.full(parent_weights.size, values.size)
    slack = 1e-12 * (1.0 + abs(cutoff) + np.abs(parent_weights))
    needed = cutoff - parent_weights - slack
    return np.searchsorted(-values, -needed, side="right")


def _largest(weights, count):
    """The `count` largest weights, in any order."""
    if weights.size <= count:
        return weights
    return np.partition(weights, weights.size - count)[weights.size - count :]


def _ordered(level, budget):
    """A level in the order of the tree, without what cannot be in it."""
    order = np.lexsort((level.tokens, level.parents, -level.weights))[:budget]
    return Level(*(column[order] for column in level))


def _merge_levels(levels, budget):
    """The heaviest prefixes of all levels as (tokens, parents)."""
    if not levels:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    sizes = [level.weights.size for level in levels]
    starts = np.cumsum([0] + sizes[:-1])
    depths = np.repeat(np.arange(len(levels)), sizes)
    weights = np.concatenate([level.weights for level in levels])
    # Levels are in order already, and a stable sort leaves them so.
    chosen = np.lexsort((depths, -weights))[:budget]

    place = np.full(weights.size, ROOT, dtype=np.int64)
    place[chosen] = np.arange(chosen.size)
    parents = [np.full(sizes[0], ROOT, dtype=np.int64)]
    for start, level in zip(starts, levels[1:]):
        parents.append(place[start + level.parents])
    tokens = np.concatenate([level.tokens for level in levels])
    return tokens[chosen].astype(np.int64), np.concatenate(parents)[chosen]


# ---------------------------------------------------------------------------------------------
# Looking at a tree
# ---------------------------------------------------------------------------------------------


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _check_parents(parents)
    prefix_len = _check_count("prefix_len", prefix_len)
    rows = parents.size + 1
    mask = np.zeros((rows, prefix_len + rows), dtype=bool)
    mask[0, : prefix_len + 1] = True
    for row, parent in enumerate(parents.tolist(), start=1):
        mask[row] = mask[parent + 1]
        mask[row, prefix_len + row] = True
    return mask


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _check_tree(tokens, parents)
    choices = _check_integers("choices", choices)
    _check_length("choices", choices, tokens.size + 1)
    return _follow(tokens, parents, choices)


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _check_tree(tokens, parents)
    probs = _check_floating("probs", probs, 2)
    uniforms = _check_floating("uniforms", uniforms, 1)
    _check_length("probs", probs, tokens.size + 1)
    _check_length("uniforms", uniforms, tokens.size + 1)
    if not (np.all(probs >= 0.0) and np.all(np.isfinite(probs))):
        raise ValueError("probabilities must be finite and not negative")
    if not np.all(np.any(probs > 0.0, axis=1)):
        raise ValueError("a law has no possible token")
    if not (np.all(uniforms >= 0.0) and np.all(uniforms < 1.0)):
        raise ValueError("uniforms must lie in [0, 1)")
    picks = np.array([_sample(law, number) for law, number in zip(probs, uniforms)], dtype=np.int64)
    return _follow(tokens, parents, picks)


def _sample(law, number):
    """The first token whose cumulative probability exceeds the number."""
    cumulative = np.cumsum(law, dtype=np.float64)
    pick = np.searchsorted(cumulative, float(number), side="right")
    last_possible = np.flatnonzero(law)[-1]
    return min(int(pick), int(last_possible))


def _follow(tokens, parents, picks):
    """The branch on which every token is what was picked where it hangs, and the pick at its end."""
    picks = picks.tolist()
    nodes = {}
    for node, place in enumerate(zip(parents.tolist(), tokens.tolist())):
        nodes.setdefault(place, node)
    path = []
    here = ROOT
    while (here, picks[here + 1]) in nodes:
        here = nodes[here, picks[here + 1]]
        path.append(here)
    return path, picks[here + 1]


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    if kv.ndim < 2:
        raise ValueError("kv must have at least two axes")
    prefix_len = _check_count("prefix_len", prefix_len)
    path = _check_integers("path", path)
    first_node = prefix_len + 1
    nodes = kv.shape[-2] - first_node
    if nodes < 0:
        raise ValueError("the cache is shorter than its prefix and root")
    if np.any(path < 0) or np.any(path >= nodes):
        raise ValueError("the path leaves the cache")
    rows = np.concatenate([np.arange(first_node), first_node + path.astype(np.int64)])
    return np.take(kv, rows, axis=-2)


# ---------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    prompt = _check_prompt(prompt)
    max_new_tokens = _check_count("max_new_tokens", max_new_tokens)
    budget = _check_count("budget", budget)
    generated = []
    stats = {"target_passes": 0, "accepted": 0}
    while len(generated) < max_new_tokens:
        prefix = prompt + generated
        draft = _check_draft(drafter.block(list(prefix)))
        tokens, parents = build_tree(draft, budget)
        answer = target.tree_log_probs(prefix, tokens.copy(), parents.copy())
        stats["target_passes"] += 1
        picks = _picks(answer, (tokens.size + 1, draft.shape[1]))
        path, bonus = verify_tree(tokens, parents, picks)

        found = tokens[path].tolist() + [bonus]
        found = found[: max_new_tokens - len(generated)]
        if eos_id in found:
            found = found[: found.index(eos_id) + 1]
        stats["accepted"] += min(len(path), len(found))
        generated += found
        if generated[-1] == eos_id:
            break
    return generated, stats


def _picks(answer, shape):
    """The most likely token of every row of the target's answer, the lower one on a tie."""
    answer = _check_floating("the target's answer", answer, 2)
    if answer.shape != shape:
        raise ValueError(f"the target's answer has shape {answer.shape}, expected {shape}")
    if np.any(np.isnan(answer)):
        raise ValueError("NaN in the target's answer")
    if not np.all(np.any(answer > -np.inf, axis=1)):
        raise ValueError("a law of the target has no possible token")
    return np.argmax(answer, axis=1)


# ---------------------------------------------------------------------------------------------
# Refusal of bad input
# ---------------------------------------------------------------------------------------------


def _check_count(name, value):
    """A whole number that is not negative."""
    try:
        value = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer") from error
    if value < 0:
        raise ValueError(f"{name} must not be negative")
    return value


def _check_integers(name, values):
    """A one-dimensional integer array; an empty list counts as one."""
    array = np.asarray(values)
    if not isinstance(values, np.ndarray) and array.shape == (0,):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    return array


def _check_floating(name, values, ndim):
    array = np.asarray(values)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must hold floating-point numbers")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes")
    return array


def _check_length(name, array, length):
    if array.shape[0] != length:
        raise ValueError(f"{name} has {array.shape[0]} rows, expected {length}")


def _check_draft(log_q):
    log_q = _check_floating("log_q", log_q, 2)
    if np.any(np.isnan(log_q)) or np.any(log_q == np.inf):
        raise ValueError("log_q must not hold NaN or +inf")
    return log_q


def _check_parents(parents):
    parents = _check_integers("parents", parents)
    if np.any(parents < ROOT) or np.any(parents >= np.arange(parents.size)):
        raise ValueError("a parent must come before its children")
    return parents


def _check_tree(tokens, parents):
    tokens = _check_integers("tokens", tokens)
    parents = _check_parents(parents)
    _check_length("tokens", tokens, parents.size)
    return tokens, parents


def _check_prompt(prompt):
    if not isinstance(prompt, (list, tuple, np.ndarray)):
        raise TypeError("prompt must be a list of ints")
    try:
        prompt = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise TypeError("prompt must be a list of ints") from error
    if not prompt:
        raise ValueError("prompt must not be empty")
    return prompt
