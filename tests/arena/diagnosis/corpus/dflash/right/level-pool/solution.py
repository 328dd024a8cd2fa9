"""Speculative decoding with draft trees, grown one whole level at a time.

The tree is not grown node by node with a heap. A pool holds the heaviest prefixes found so far; each depth contributes
all its candidates at once, and only those that enter the pool may have children.
"""

import operator
import sys

import numpy as np


# ---------------------------------------------------------------- checks

def _count(value, name):
    """A non-negative Python int, or an exception."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer") from None
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _array(values, rank, kind, name):
    """An array of the rank and the kind (np.integer or np.floating) asked for."""
    array = np.asarray(values)
    if array.size == 0 and not isinstance(values, np.ndarray) and kind is np.integer:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, kind):
        raise TypeError(f"{name} has dtype {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} has {array.ndim} axes instead of {rank}")
    return array


def _checked_parents(parents):
    parents = _array(parents, 1, np.integer, "parents")
    listed = parents.tolist()
    if any(not -1 <= parent < node for node, parent in enumerate(listed)):
        raise ValueError("a parent must come before its children")
    return listed


def _checked_tree(tokens, parents):
    tokens = _array(tokens, 1, np.integer, "tokens").tolist()
    parents = _checked_parents(parents)
    if len(tokens) != len(parents):
        raise ValueError("tokens and parents differ in length")
    return tokens, parents


# ---------------------------------------------------------------- the tree

def _heaviest_tokens(row, count):
    """The `count` heaviest tokens of a row and their values (float64), heaviest first, lower tokens first on ties."""
    row = np.ascontiguousarray(row)
    if count < row.size:
        cut = np.partition(row, row.size - count)[row.size - count]
        above = np.flatnonzero(row > cut)
        level = np.flatnonzero(row == cut)[:count - above.size]
        chosen = np.sort(np.concatenate([above, level]))
    else:
        chosen = np.arange(row.size)
    values = row[chosen].astype(np.float64)
    order = np.argsort(-values, kind="stable")
    return chosen[order], values[order]


def _children(weights, row, budget, floor):
    """One level: (parent rank, token, weight) of the at most `budget` heaviest children heavier than `floor`.

    Parents and tokens are both ranked heaviest first, so child (i, j) comes after the (i + 1)(j + 1) - 1 children that
    are no worse in both: outside that hyperbola nothing can be among the `budget` heaviest.
    """
    tokens, values = _heaviest_tokens(row, min(budget, row.size))
    fan = np.minimum(budget // np.arange(1, weights.size + 1), tokens.size)
    parent = np.repeat(np.arange(weights.size), fan)
    rank = np.arange(parent.size) - np.repeat(np.cumsum(fan) - fan, fan)
    with np.errstate(over="ignore"):
        weight = weights[parent] + values[rank]
    keep = np.flatnonzero(weight > floor)
    if keep.size > budget:
        cut = np.partition(weight[keep], keep.size - budget)[keep.size - budget]
        keep = keep[weight[keep] >= cut]
    keep = keep[np.argsort(-weight[keep], kind="stable")[:budget]]
    return parent[keep], tokens[rank[keep]], weight[keep]


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = _array(log_q, 2, np.floating, "log_q")
    budget = min(_count(budget, "budget"), sys.maxsize)
    if log_q.size:
        with np.errstate(invalid="ignore"):
            top = log_q.max()
        if not top < np.inf:
            raise ValueError("log_q holds NaN or +inf")

    # The pool, heaviest first. An id is the order of discovery; -1 is the root.
    weight = np.zeros(0)
    token, parent, ident = (np.zeros(0, np.int64) for _ in range(3))
    beam_weight, beam_ident = np.zeros(1), np.array([-1])
    born = 0
    for row in log_q:
        if budget == 0 or beam_weight.size == 0:
            break
        floor = weight[-1] if weight.size == budget else -np.inf
        above, new_token, new_weight = _children(beam_weight, row, budget, floor)
        new_ident = np.arange(born, born + new_token.size)
        born += new_token.size

        old = weight.size
        weight = np.concatenate([weight, new_weight])
        order = np.argsort(-weight, kind="stable")[:budget]
        weight = weight[order]
        token = np.concatenate([token, new_token])[order]
        parent = np.concatenate([parent, beam_ident[above]])[order]
        ident = np.concatenate([ident, new_ident])[order]

        alive = np.count_nonzero(order >= old)
        beam_weight, beam_ident = new_weight[:alive], new_ident[:alive]

    place = np.full(born + 1, -1, np.int64)
    place[ident] = np.arange(ident.size)
    return token.astype(np.int64), place[parent]


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _checked_parents(parents)
    prefix_len = _count(prefix_len, "prefix_len")
    count = len(parents)
    mask = np.zeros((count + 1, prefix_len + count + 1), dtype=bool)
    mask[0, :prefix_len + 1] = True
    for node, parent in enumerate(parents):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, prefix_len + node + 1] = True
    return mask


# ---------------------------------------------------------------- verification

def _walk(tokens, parents, pick):
    """Follow the picks (a function of the row) from the root down as long as they were drafted."""
    child = {edge: node for node, edge in enumerate(zip(parents, tokens))}
    path = []
    here = -1
    while True:
        picked = pick(here + 1)
        following = child.get((here, picked))
        if following is None:
            return path, picked
        path.append(following)
        here = following


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _checked_tree(tokens, parents)
    choices = _array(choices, 1, np.integer, "choices").tolist()
    if len(choices) != len(tokens) + 1:
        raise ValueError("choices needs one entry more than the tree has nodes")
    return _walk(tokens, parents, choices.__getitem__)


def _sample(law, number):
    """The first token whose cumulative probability exceeds the number; the last possible one if there is none."""
    total = np.cumsum(law, dtype=np.float64)
    token = int(np.searchsorted(total, number, side="right"))
    return token if token < total.size else int(np.flatnonzero(law)[-1])


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _checked_tree(tokens, parents)
    probs = _array(probs, 2, np.floating, "probs")
    uniforms = _array(uniforms, 1, np.floating, "uniforms")
    rows = len(tokens) + 1
    if probs.shape[0] != rows or uniforms.shape[0] != rows:
        raise ValueError("probs and uniforms need one row more than the tree has nodes")
    if not (probs >= 0).all():
        raise ValueError("probs holds negative numbers or NaN")
    if not (probs > 0).any(axis=1).all():
        raise ValueError("a law has no possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    return _walk(tokens, parents, lambda row: _sample(probs[row], float(uniforms[row])))


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    if kv.ndim < 2:
        raise ValueError("kv needs at least two axes")
    kept = _count(prefix_len, "prefix_len") + 1
    nodes = kv.shape[-2] - kept
    if nodes < 0:
        raise ValueError("the cache is shorter than prefix and root")
    path = np.asarray(path)
    if path.size == 0:
        path = path.astype(np.int64)
    path = _array(path, 1, np.integer, "path")
    if ((path < 0) | (path >= nodes)).any():
        raise ValueError("the path leaves the cache")
    rows = np.concatenate([np.arange(kept), kept + path.astype(np.int64)])
    return np.take(kv, rows, axis=-2)


# ---------------------------------------------------------------- generation

def _picks(log_probs, rows, vocabulary):
    """The most likely token of every row of the target's answer."""
    log_probs = _array(log_probs, 2, np.floating, "the target's answer")
    if log_probs.shape != (rows, vocabulary) or vocabulary == 0:
        raise ValueError("the target's answer is not (N+1, V)")
    if np.isnan(log_probs).any():
        raise ValueError("the target's answer holds NaN")
    if (log_probs.max(axis=1) == -np.inf).any():
        raise ValueError("a law has no possible token")
    return log_probs.argmax(axis=1)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    committed = [operator.index(token) for token in prompt]
    if not committed:
        raise ValueError("the prompt is empty")
    max_new_tokens = _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")

    generated = []
    stats = {"target_passes": 0, "accepted": 0}
    finished = False
    while len(generated) < max_new_tokens and not finished:
        log_q = drafter.block(list(committed))
        tokens, parents = build_tree(log_q, budget)
        log_probs = target.tree_log_probs(list(committed), tokens, parents)
        stats["target_passes"] += 1
        path, bonus = verify_tree(tokens, parents, _picks(log_probs, tokens.size + 1, log_q.shape[1]))

        fresh = [int(tokens[node]) for node in path] + [bonus]
        fresh = fresh[:max_new_tokens - len(generated)]
        if eos_id in fresh:
            fresh = fresh[:fresh.index(eos_id) + 1]
            finished = True
        stats["accepted"] += min(len(path), len(fresh))
        generated += fresh
        committed += fresh
    return generated, stats
