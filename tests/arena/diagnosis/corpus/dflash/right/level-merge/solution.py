"""Speculative decoding with draft trees, built level by level and merged under one cutoff."""

import operator

import numpy as np

ROOT = -1


# ---------------------------------------------------------------- checks


def _count(value, name):
    """A non-negative whole number."""
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _whole_numbers(values, name):
    """A vector of integers as int64; an empty list counts as one."""
    array = np.asarray(values)
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    return array.astype(np.int64)


def _floating(values, rank, name):
    """A floating-point array of this rank as float64."""
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must be floating-point")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes")
    return array.astype(np.float64)


def _parent_vector(parents):
    parents = _whole_numbers(parents, "parents")
    if ((parents < ROOT) | (parents >= np.arange(parents.size))).any():
        raise ValueError("a parent must come before its children")
    return parents


def _tree(tokens, parents):
    tokens, parents = _whole_numbers(tokens, "tokens"), _parent_vector(parents)
    if tokens.size != parents.size:
        raise ValueError("tokens and parents differ in length")
    return tokens, parents


def _draft(log_q):
    log_q = _floating(log_q, 2, "log_q")
    if np.isnan(log_q).any() or (log_q == np.inf).any():
        raise ValueError("log_q must not hold NaN or +inf")
    return log_q


# ---------------------------------------------------------------- the tree


def _heaviest_tokens(row, limit):
    """The tokens of the `limit` largest finite values, largest first, equal ones in token order."""
    if limit < row.size:
        bar = _nth_largest(row, limit)
        above = np.flatnonzero(row > bar)
        level = np.flatnonzero(row == bar)[: limit - above.size]
        found = np.sort(np.concatenate([above, level]))
    else:
        found = np.arange(row.size)
    found = found[row[found] > -np.inf]
    return found[np.argsort(-row[found], kind="stable")]


def _nth_largest(values, n):
    """The n-th largest of at least n values."""
    return np.partition(values, values.size - n)[values.size - n]


def _children(weights, row, budget, cutoff):
    """Candidates heavier than the cutoff: (weight, parent's rank, token), best first.

    The pair of parent rank i and token rank j has (i + 1)(j + 1) - 1 pairs ahead of it, so only
    pairs with (i + 1)(j + 1) <= budget can be among the heaviest.
    """
    choice = _heaviest_tokens(row, budget)
    fanout = np.minimum(budget // np.arange(1, weights.size + 1), choice.size)
    above = np.repeat(np.arange(weights.size), fanout)
    first = np.cumsum(fanout) - fanout
    ranks = np.arange(above.size) - first[above]
    token = choice[ranks]
    weight = weights[above] + row[token]
    keep = np.flatnonzero(weight > cutoff)
    if keep.size > budget:
        keep = keep[weight[keep] >= _nth_largest(weight[keep], budget)]
    weight, above, token = weight[keep], above[keep], token[keep]
    order = np.lexsort((token, above, -weight))[:budget]
    return weight[order], above[order], token[order]


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q, budget = _draft(log_q), _count(budget, "budget")
    pool_weight = np.zeros(0)
    pool_token = np.zeros(0, np.int64)
    pool_parent = np.zeros(0, np.int64)
    level_weight, level_id = np.zeros(1), np.array([ROOT])
    for row in log_q if budget else ():
        cutoff = _nth_largest(pool_weight, budget) if pool_weight.size >= budget else -np.inf
        weight, above, token = _children(level_weight, row, budget, cutoff)
        if weight.size == 0:
            break
        parent = level_id[above]
        level_id = pool_weight.size + np.arange(weight.size)
        level_weight = weight
        pool_weight = np.concatenate([pool_weight, weight])
        pool_token = np.concatenate([pool_token, token])
        pool_parent = np.concatenate([pool_parent, parent])
    order = np.argsort(-pool_weight, kind="stable")
    place = np.empty(order.size + 1, np.int64)
    place[order] = np.arange(order.size)
    place[ROOT] = ROOT
    order = order[:budget]
    return pool_token[order], place[pool_parent[order]]


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents, prefix_len = _parent_vector(parents), _count(prefix_len, "prefix_len")
    nodes = parents.size
    mask = np.zeros((nodes + 1, prefix_len + nodes + 1), bool)
    mask[:, : prefix_len + 1] = True
    rows = np.arange(nodes)
    seen = np.arange(nodes)
    while rows.size:
        mask[rows + 1, prefix_len + 1 + seen] = True
        seen = parents[seen]
        alive = seen != ROOT
        rows, seen = rows[alive], seen[alive]
    return mask


# ---------------------------------------------------------------- verification


def _follow(tokens, parents, pick):
    """Walk down while a child carries the pick; one sweep does, as parents come first."""
    path, here, wanted = [], ROOT, pick(0)
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        if parent == here and token == wanted:
            path.append(node)
            here, wanted = node, pick(node + 1)
    return path, wanted


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _tree(tokens, parents)
    choices = _whole_numbers(choices, "choices")
    if choices.size != tokens.size + 1:
        raise ValueError("choices must have one entry for the root and one for each node")
    return _follow(tokens, parents, lambda row: int(choices[row]))


def _sample(law, number):
    """The first token whose cumulative probability exceeds the number, else the last possible."""
    possible = np.flatnonzero(law)
    place = np.searchsorted(np.cumsum(law[possible]), number, side="right")
    return int(possible[min(place, possible.size - 1)])


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _tree(tokens, parents)
    probs, uniforms = _floating(probs, 2, "probs"), _floating(uniforms, 1, "uniforms")
    if not len(probs) == len(uniforms) == tokens.size + 1:
        raise ValueError("probs and uniforms must have a row for the root and one for each node")
    if not (probs >= 0).all():
        raise ValueError("probabilities must not be negative or NaN")
    if not (probs > 0).any(axis=1).all():
        raise ValueError("a law without any possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    return _follow(tokens, parents, lambda row: _sample(probs[row], uniforms[row]))


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv, prefix_len = np.asarray(kv), _count(prefix_len, "prefix_len")
    path = _whole_numbers(path, "path")
    if kv.ndim < 2:
        raise ValueError("kv needs at least two axes")
    nodes = kv.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError("kv is shorter than the prefix and the root")
    if ((path < 0) | (path >= nodes)).any():
        raise ValueError("the path leaves the cache")
    kept = np.concatenate([np.arange(prefix_len + 1), prefix_len + 1 + path])
    return np.take(kv, kept, axis=-2)


# ---------------------------------------------------------------- generation


def _picks(answer, shape):
    answer = _floating(answer, 2, "the target's answer")
    if answer.shape != shape:
        raise ValueError("the target's answer must be (N+1, V)")
    if np.isnan(answer).any():
        raise ValueError("the target's answer must not hold NaN")
    return answer.argmax(axis=1)


def _round(target, drafter, committed, budget):
    """One round: the tokens to commit; all but the last of them were drafted."""
    log_q = _draft(drafter.block(list(committed)))
    tokens, parents = build_tree(log_q, budget)
    answer = target.tree_log_probs(list(committed), tokens.copy(), parents.copy())
    path, bonus = verify_tree(tokens, parents, _picks(answer, (tokens.size + 1, log_q.shape[1])))
    return [*tokens[path].tolist(), bonus]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    limit, budget = _count(max_new_tokens, "max_new_tokens"), _count(budget, "budget")
    committed = [operator.index(token) for token in prompt]
    if not committed:
        raise ValueError("the prompt is empty")
    start = len(committed)
    stats = {"target_passes": 0, "accepted": 0}
    open_ended = True
    while open_ended and len(committed) - start < limit:
        fresh = _round(target, drafter, committed, budget)
        stats["target_passes"] += 1
        drafted = len(fresh) - 1
        fresh = fresh[: limit - (len(committed) - start)]
        if eos_id in fresh:
            fresh = fresh[: fresh.index(eos_id) + 1]
            open_ended = False
        stats["accepted"] += min(drafted, len(fresh))
        committed.extend(fresh)
    return committed[start:], stats
