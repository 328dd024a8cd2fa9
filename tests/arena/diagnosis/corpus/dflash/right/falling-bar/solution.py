"""Speculative decoding with draft trees.

The tree is grown level by level. All weights found so far share one pool of at most `budget` numbers, and the
lightest number of a full pool is the *bar* that a prefix of a deeper level has to reach.
"""

from operator import index
from typing import NamedTuple

import numpy as np

ROOT = -1


class Level(NamedTuple):
    """The prefixes of one depth in tree order: heaviest first, then by parent, then by token."""

    weights: np.ndarray  # float64, logarithms
    parents: np.ndarray  # ranks within the level above
    tokens: np.ndarray


# ---------------------------------------------------------------------------------------------- checks


def _count(value, name):
    number = index(value)
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _floats(values, rank, name):
    array = np.asarray(values)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must be floating-point, not {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, not {array.ndim}")
    return array


def _integers(values, name):
    """The numbers of a one-dimensional integer array, as Python ints of any size."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, not {array.ndim}")
    untyped = array.size == 0 and not isinstance(values, np.ndarray)
    if array.dtype.kind not in "iu" and not untyped:
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    return array.tolist()


def _parent_list(parents):
    links = _integers(parents, "parents")
    for node, parent in enumerate(links):
        if not ROOT <= parent < node:
            raise ValueError(f"node {node} cannot hang below node {parent}")
    return links


def _tree_lists(tokens, parents):
    words, links = _integers(tokens, "tokens"), _parent_list(parents)
    if len(words) != len(links):
        raise ValueError("tokens and parents differ in length")
    return words, links


def _draft(log_q):
    laws = _floats(log_q, 2, "log_q")
    if np.isnan(laws).any() or np.isposinf(laws).any():
        raise ValueError("log_q must hold neither NaN nor +inf")
    return laws


def _target_answer(answer, shape):
    scores = _floats(answer, 2, "the target's answer")
    if scores.shape != shape:
        raise ValueError(f"the target answered {scores.shape} instead of {shape}")
    if np.isnan(scores).any():
        raise ValueError("the target's answer holds NaN")
    return scores


def _sampling_laws(probs, rows):
    laws = _floats(probs, 2, "probs").astype(np.float64)
    if laws.shape[0] != rows:
        raise ValueError(f"probs must have {rows} rows")
    if not (np.isfinite(laws) & (laws >= 0)).all():
        raise ValueError("probabilities must be finite and not negative")
    if not (laws > 0).any(axis=1).all():
        raise ValueError("a law has no possible token")
    return laws


def _unit_numbers(uniforms, rows):
    numbers = _floats(uniforms, 1, "uniforms").astype(np.float64)
    if numbers.shape[0] != rows:
        raise ValueError(f"uniforms must have {rows} numbers")
    if not ((numbers >= 0) & (numbers < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    return numbers


# ------------------------------------------------------------------------------------------ growing a tree


def _likeliest(law, count):
    """At most `count` possible tokens of a law, likeliest first, lower first on a tie; and their log-probabilities."""
    if law.size > count:
        last = np.partition(law, law.size - count)[law.size - count]
        above = np.flatnonzero(law > last)
        level = np.flatnonzero(law == last)[: count - above.size]
        tokens = np.concatenate([above, level])
    else:
        tokens = np.arange(law.size)
    gains = law[tokens].astype(np.float64)
    order = np.lexsort((tokens, -gains))
    order = order[gains[order] > -np.inf]
    return tokens[order], gains[order]


def _next_level(weights, law, budget, bar):
    """The children of prefixes with these weights (in tree order) that may still belong to the tree.

    The child by the j-th token of the i-th parent comes after all those with neither i nor j larger: (i+1)(j+1) - 1 of
    them. So only the pairs below a hyperbola count.
    """
    tokens, gains = _likeliest(law, budget)
    reach = np.minimum(budget // np.arange(1, weights.size + 1), tokens.size)
    parents = np.repeat(np.arange(weights.size), reach)
    choice = np.arange(parents.size) - np.repeat(np.cumsum(reach) - reach, reach)
    sums = weights[parents] + gains[choice]
    alive = np.flatnonzero((sums >= bar) & (sums > -np.inf))
    level = Level(sums[alive], parents[alive], tokens[choice[alive]])
    order = np.lexsort((level.tokens, level.parents, -level.weights))[:budget]
    return Level(*(column[order] for column in level))


def _merge(levels, budget):
    """The first `budget` prefixes of all levels, in tree order."""
    sizes = [level.weights.size for level in levels]
    depths = np.repeat(np.arange(len(levels)), sizes)
    weights, ranks, tokens = (np.concatenate(column) for column in zip(*levels, strict=True))
    order = np.lexsort((tokens, ranks, depths, -weights))[:budget]
    place = np.empty(weights.size, dtype=np.int64)
    place[order] = np.arange(order.size)
    starts = np.cumsum([0, *sizes])
    above = starts[depths[order] - 1] + ranks[order]
    parents = np.where(depths[order] == 0, ROOT, place[np.where(depths[order] == 0, 0, above)])
    return tokens[order].astype(np.int64), parents.astype(np.int64)


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    laws, budget = _draft(log_q), _count(budget, "budget")
    levels = []
    pool, bar = np.empty(0), -np.inf
    weights = np.zeros(1)
    for law in laws if budget else ():
        level = _next_level(weights, law, budget, bar)
        weights = level.weights
        if weights.size == 0:
            break
        levels.append(level)
        pool = np.concatenate([pool, weights])
        if pool.size >= budget:
            pool = np.partition(pool, pool.size - budget)[pool.size - budget :]
            bar = pool[0]
    if not levels:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return _merge(levels, budget)


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    links, prefix_len = _parent_list(parents), _count(prefix_len, "prefix_len")
    rows = len(links) + 1
    mask = np.zeros((rows, prefix_len + rows), dtype=bool)
    mask[0, : prefix_len + 1] = True
    for row, parent in enumerate(links, start=1):
        mask[row] = mask[parent + 1]
        mask[row, prefix_len + row] = True
    return mask


# ---------------------------------------------------------------------------------------------- verifying


def _follow(words, links, pick):
    """Walk down from the root as long as the pick after the current node was drafted; pick(row) gives it."""
    child = {family: node for node, family in enumerate(zip(links, words, strict=True))}
    path, here = [], ROOT
    while True:
        picked = pick(here + 1)
        here = child.get((here, picked))
        if here is None:
            return path, picked
        path.append(here)


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    words, links = _tree_lists(tokens, parents)
    picks = _integers(choices, "choices")
    if len(picks) != len(words) + 1:
        raise ValueError("there must be one choice more than nodes")
    return _follow(words, links, picks.__getitem__)


def _sample(law, number):
    """The first token whose cumulative probability exceeds the number."""
    token = int(np.searchsorted(np.cumsum(law), number, side="right"))
    return min(token, int(np.flatnonzero(law)[-1]))


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    words, links = _tree_lists(tokens, parents)
    laws = _sampling_laws(probs, len(words) + 1)
    numbers = _unit_numbers(uniforms, len(words) + 1)
    return _follow(words, links, lambda row: _sample(laws[row], numbers[row]))


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    cache, prefix_len = np.asarray(kv), _count(prefix_len, "prefix_len")
    if cache.ndim < 2:
        raise ValueError("kv must have at least two axes")
    nodes = cache.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError("kv has no room for the prefix and the root")
    branch = _integers(path, "path")
    if not all(0 <= node < nodes for node in branch):
        raise ValueError("the path leaves the cache")
    head = prefix_len + 1
    rows = [*range(head), *(head + node for node in branch)]
    return np.take(cache, np.array(rows, dtype=np.int64), axis=-2)


# ---------------------------------------------------------------------------------------------- generating


def _round(target, drafter, committed, budget):
    """One draft and one pass of the target: the drafted tokens that it accepts, and the bonus."""
    laws = _draft(drafter.block(list(committed)))
    tokens, parents = build_tree(laws, budget)
    answer = target.tree_log_probs(list(committed), tokens.copy(), parents.copy())
    scores = _target_answer(answer, (tokens.size + 1, laws.shape[1]))
    path, bonus = verify_tree(tokens, parents, scores.argmax(axis=1))
    return tokens[path].tolist(), bonus


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    opening = [index(token) for token in prompt]
    if not opening:
        raise ValueError("the prompt is empty")
    limit, budget = _count(max_new_tokens, "max_new_tokens"), _count(budget, "budget")
    generated, passes, accepted = [], 0, 0
    while len(generated) < limit and eos_id not in generated[-1:]:
        drafted, bonus = _round(target, drafter, opening + generated, budget)
        passes += 1
        fresh = [*drafted, bonus][: limit - len(generated)]
        if eos_id in fresh:
            fresh = fresh[: fresh.index(eos_id) + 1]
        accepted += min(len(drafted), len(fresh))
        generated += fresh
    return generated, {"target_passes": passes, "accepted": accepted}
