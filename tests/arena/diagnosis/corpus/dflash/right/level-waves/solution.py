"""Speculative decoding with draft trees, grown in waves: one sorted wave of prefixes for every depth.

A wave is already in the order that the finished tree wants among nodes of one depth. So a child only has
to remember the rank of its parent in the wave above, and one stable sort over all waves makes the tree.
"""

from operator import index
from typing import NamedTuple

import numpy as np

ROOT = -1
NO_LIMIT = 2**62


class Wave(NamedTuple):
    """The prefixes of one depth, best first."""

    weights: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray  # ranks in the wave above


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = _draft(log_q)
    budget = min(_count(budget, "budget"), NO_LIMIT)
    wave = Wave(np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
    waves = []
    floor = -np.inf
    for row in log_q if budget else ():
        wave = _next_wave(wave, row, budget, floor)
        if not wave.weights.size:
            break
        waves.append(wave)
        floor = _smallest_kept(np.concatenate([w.weights for w in waves]), budget)
    return _merge(waves, budget)


def _next_wave(above, row, budget, floor):
    """The best children of a wave that weigh at least `floor`, at most `budget` of them."""
    vocabulary = _best_tokens(row, budget)
    logs = row[vocabulary].astype(np.float64)
    # The child of rank (i, j) is preceded by all (i' <= i, j' <= j), of which there are (i + 1)(j + 1).
    widths = np.minimum(len(logs), budget // np.arange(1, len(above.weights) + 1))
    parents = np.repeat(np.arange(len(widths)), widths)
    ranks = np.arange(len(parents)) - np.repeat(np.cumsum(widths) - widths, widths)
    weights = above.weights[parents] + logs[ranks]
    kept = np.flatnonzero(weights >= max(floor, _smallest_kept(weights, budget)))
    weights, tokens, parents = weights[kept], vocabulary[ranks[kept]], parents[kept]
    order = np.lexsort((tokens, parents, -weights))[:budget]
    return Wave(weights[order], tokens[order], parents[order])


def _best_tokens(row, budget):
    """The most likely possible tokens of a law, best first, the lower one on a tie."""
    tokens = np.flatnonzero((row >= _smallest_kept(row, budget)) & (row > -np.inf))
    return tokens[np.argsort(-row[tokens], kind="stable")[:budget]]


def _smallest_kept(values, budget):
    """The smallest of the `budget` largest values; -inf if that is all of them."""
    if len(values) <= budget:
        return -np.inf
    return np.partition(values, -budget)[-budget]


def _merge(waves, budget):
    """The best `budget` nodes of all waves, with their parents' places in the tree."""
    if not waves:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    sizes = [len(wave.weights) for wave in waves]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    # Waves lie one after the other, so a stable sort breaks ties by depth, then by rank.
    order = np.argsort(-np.concatenate([wave.weights for wave in waves]), kind="stable")[:budget]
    place = np.full(starts[-1], ROOT)
    place[order] = np.arange(len(order))
    places = [np.full(sizes[0], ROOT)]
    places += [place[start + wave.parents] for start, wave in zip(starts, waves[1:])]
    tokens = np.concatenate([wave.tokens for wave in waves])
    return tokens[order].astype(np.int64), np.concatenate(places)[order].astype(np.int64)


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _parents(parents)
    root = _count(prefix_len, "prefix_len")
    mask = np.zeros((len(parents) + 1, root + len(parents) + 1), dtype=bool)
    mask[0, : root + 1] = True
    for row, parent in enumerate(parents.tolist(), start=1):
        mask[row] = mask[parent + 1]
        mask[row, root + row] = True
    return mask


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _tree(tokens, parents)
    choices = _integers(choices, "choices")
    if len(choices) != len(tokens) + 1:
        raise ValueError("choices must have one entry for the root and one for each node")
    agreeing = np.flatnonzero(tokens == choices[parents + 1])
    path, tip = [], ROOT
    for node in agreeing.tolist():  # parents come first, siblings differ: one sweep finds the branch
        if parents[node] == tip:
            path.append(node)
            tip = node
    return path, int(choices[tip + 1])


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _tree(tokens, parents)
    probs = _floats(probs, 2, "probs")
    uniforms = _floats(uniforms, 1, "uniforms")
    if not len(probs) == len(uniforms) == len(tokens) + 1:
        raise ValueError("probs and uniforms must have one row for the root and one for each node")
    if not (probs >= 0).all():
        raise ValueError("probabilities must not be negative or NaN")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    possible = probs > 0
    if not possible.any(axis=1).all():
        raise ValueError("a law has no possible token")
    last_possible = probs.shape[1] - 1 - possible[:, ::-1].argmax(axis=1)
    cumulative = np.cumsum(probs, axis=1, dtype=np.float64)
    picks = (cumulative <= uniforms[:, None]).sum(axis=1)
    return verify_tree(tokens, parents, np.minimum(picks, last_possible))


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    root = _count(prefix_len, "prefix_len")
    path = _integers([] if np.shape(path) == (0,) else path, "path")
    if kv.ndim < 2:
        raise ValueError("kv needs an axis of rows and an axis of features")
    nodes = kv.shape[-2] - root - 1
    if nodes < 0:
        raise ValueError("kv is shorter than the prefix and the root")
    if ((path < 0) | (path >= nodes)).any():
        raise ValueError("the path leaves the cache")
    return np.take(kv, np.concatenate([np.arange(root + 1), root + 1 + path]), axis=-2)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    committed = [index(token) for token in prompt]
    if not committed:
        raise ValueError("the prompt is empty")
    start = len(committed)
    end = start + _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")
    stats = {"target_passes": 0, "accepted": 0}
    ended = False
    while len(committed) < end and not ended:
        drafted, bonus = _round(target, drafter, committed, budget)
        stats["target_passes"] += 1
        news = [*drafted, bonus][: end - len(committed)]
        if eos_id in news:
            news = news[: news.index(eos_id) + 1]
            ended = True
        stats["accepted"] += min(len(news), len(drafted))
        committed += news
    return committed[start:], stats


def _round(target, drafter, committed, budget):
    """The accepted drafted tokens and the bonus of one pass of the target."""
    log_q = _draft(drafter.block(list(committed)))
    tokens, parents = build_tree(log_q, budget)
    answer = target.tree_log_probs(list(committed), tokens.copy(), parents.copy())
    answer = _floats(answer, 2, "the target's answer")
    if answer.shape != (len(tokens) + 1, log_q.shape[1]):
        raise ValueError("the target's answer must be (N+1, V)")
    if np.isnan(answer).any():
        raise ValueError("NaN in the target's answer")
    path, bonus = verify_tree(tokens, parents, answer.argmax(axis=1))
    return [int(tokens[node]) for node in path], bonus


def _count(number, name):
    """A whole number that is not negative."""
    number = index(number)
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _floats(values, rank, name):
    """A floating-point array of this rank."""
    values = np.asarray(values)
    if not np.issubdtype(values.dtype, np.floating):
        raise TypeError(f"{name} must be floating-point")
    if values.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes")
    return values


def _draft(log_q):
    """A draft (L, V): log-probabilities, of which -inf is the only one that is not finite."""
    log_q = _floats(log_q, 2, "log_q")
    if log_q.size and not log_q.max() < np.inf:  # the maximum of anything with NaN is NaN
        raise ValueError("NaN or +inf in log_q")
    return log_q


def _integers(values, name):
    """A flat int64 array; an empty list has no dtype and is one too."""
    if isinstance(values, (list, tuple)) and not values:
        return np.zeros(0, np.int64)
    values = np.asarray(values)
    if not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"{name} must be integers")
    if values.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit into int64")
    return values.astype(np.int64)


def _parents(parents):
    """The parents of a tree, each of them before its children."""
    parents = _integers(parents, "parents")
    if ((parents < ROOT) | (parents >= np.arange(len(parents)))).any():
        raise ValueError("a parent must come before its children")
    return parents


def _tree(tokens, parents):
    """The tokens and parents of a tree, of one length."""
    tokens, parents = _integers(tokens, "tokens"), _parents(parents)
    if len(tokens) != len(parents):
        raise ValueError("tokens and parents must have the same length")
    return tokens, parents
