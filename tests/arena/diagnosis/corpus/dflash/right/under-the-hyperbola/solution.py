"""Speculative decoding with draft trees.

A tree is a pair of integer arrays (tokens, parents); row 0 of whatever has N + 1 rows is the root's, row
i + 1 that of node i. The trees are built level by level with sorted arrays and stable sorts, without a heap.
"""

import operator
import sys

import numpy as np

ROOT = -1


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,).

    Two facts carry the construction. Within a level the prefix of parent i (counted from 0 in the order of the
    tree) and token j (in the order of its row) stands behind all those of parents up to i and tokens up to j: with
    (i + 1) * (j + 1) > budget it cannot be in the tree. And a stable sort by falling weight of candidates that lie in the
    order depth, parent, token settles all ties.
    """
    log_q = _checked_draft(log_q)
    budget = min(_natural(budget, "budget"), sys.maxsize)
    empty = np.empty(0, dtype=np.int64)
    level_weights = np.zeros(1)
    level_start = ROOT
    weights, tokens, parents = np.empty(0), empty, empty
    for row in log_q:
        if budget == 0 or level_weights.size == 0:
            break
        best_tokens = _best_tokens(row, budget)
        best_values = row[best_tokens].astype(np.float64)
        parent, rank = _pairs_under_hyperbola(level_weights.size, best_tokens.size, budget)
        candidates = level_weights[parent] + best_values[rank]
        worthy = np.flatnonzero(candidates > _weight_to_beat(weights, budget))
        order = worthy[np.argsort(-candidates[worthy], kind="stable")[:budget]]

        level_weights = candidates[order]
        tokens = np.concatenate([tokens, best_tokens[rank[order]]])
        parents = np.concatenate([parents, level_start + parent[order]])
        level_start = weights.size
        weights = np.concatenate([weights, level_weights])
    return _heaviest_first(weights, tokens, parents, budget)


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _checked_parents(parents)
    prefix_len = _natural(prefix_len, "prefix_len")
    count = parents.size
    first_node = prefix_len + 1
    mask = np.zeros((count + 1, first_node + count), dtype=bool)
    mask[:, :first_node] = True
    nodes = np.arange(count)
    seen = nodes
    while nodes.size:  # all nodes climb together, each until it is at the root
        mask[nodes + 1, first_node + seen] = True
        seen = parents[seen]
        below_root = seen >= 0
        nodes, seen = nodes[below_root], seen[below_root]
    return mask


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _checked_tree(tokens, parents)
    choices = _integers(choices, "choices")
    _require_rows(choices, "choices", tokens.size + 1)
    picks = choices.tolist()
    return _walk(tokens, parents, lambda row: picks[row])


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _checked_tree(tokens, parents)
    probs = _floats(probs, "probs", 2)
    uniforms = _floats(uniforms, "uniforms", 1)
    _require_rows(probs, "probs", tokens.size + 1)
    _require_rows(uniforms, "uniforms", tokens.size + 1)
    if not (np.isfinite(probs).all() and (probs >= 0).all()):
        raise ValueError("probs must be finite and not negative")
    if not (probs > 0).any(axis=1).all():
        raise ValueError("every law needs a possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")

    def sampled_pick(row):
        cumulative = np.cumsum(probs[row], dtype=np.float64)
        last_possible = np.flatnonzero(probs[row])[-1]
        first_above = np.searchsorted(cumulative, np.float64(uniforms[row]), side="right")
        return int(min(first_above, last_possible))

    return _walk(tokens, parents, sampled_pick)


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    prefix_len = _natural(prefix_len, "prefix_len")
    if kv.ndim < 2:
        raise ValueError(f"kv must be (..., rows, D), not {kv.shape}")
    nodes = kv.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError(f"kv has {kv.shape[-2]} rows, too few for a prefix of {prefix_len} and the root")
    path = _integers(path, "path")
    if np.any(path < 0) or np.any(path >= nodes):
        raise ValueError(f"path leaves the cache of {nodes} nodes")
    first_node = prefix_len + 1
    rows = np.concatenate([np.arange(first_node), first_node + path.astype(np.int64)])
    return np.take(kv, rows, axis=-2)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    prompt = [operator.index(token) for token in prompt]
    if not prompt:
        raise ValueError("the prompt is empty")
    max_new_tokens = _natural(max_new_tokens, "max_new_tokens")
    budget = _natural(budget, "budget")
    generated = []
    stats = {"target_passes": 0, "accepted": 0}
    while len(generated) < max_new_tokens and eos_id not in generated[-1:]:
        log_q = _checked_draft(drafter.block(prompt + generated))
        tokens, parents = build_tree(log_q, budget)
        answer = target.tree_log_probs(prompt + generated, tokens, parents)
        stats["target_passes"] += 1
        choices = _greedy_choices(answer, (tokens.size + 1, log_q.shape[1]))
        path, bonus = verify_tree(tokens, parents, choices)
        committed = tokens[path].tolist() + [bonus]
        if eos_id in committed:
            committed = committed[: committed.index(eos_id) + 1]
        committed = committed[: max_new_tokens - len(generated)]
        generated += committed
        stats["accepted"] += min(len(path), len(committed))
    return generated, stats


def _best_tokens(row, count):
    """The `count` likeliest possible tokens of a row, likeliest first, the lower first on a tie."""
    possible = np.flatnonzero(row > -np.inf)
    if possible.size > count:
        values = row[possible]
        cut = np.partition(values, values.size - count)[values.size - count]
        possible = possible[values >= cut]  # too many if there are ties at the cut
    return possible[np.argsort(-row[possible], kind="stable")][:count]


def _pairs_under_hyperbola(parents, tokens, budget):
    """All pairs (i, j), i < parents, j < tokens, with (i + 1) * (j + 1) <= budget, in lexical order."""
    widths = np.minimum(tokens, budget // np.arange(1, parents + 1))
    starts = np.cumsum(widths) - widths
    i = np.repeat(np.arange(parents), widths)
    j = np.arange(i.size) - np.repeat(starts, widths)
    return i, j


def _weight_to_beat(weights, budget):
    """What a deeper prefix must exceed, given the weights of all higher ones: the budget-th of them."""
    if weights.size < budget:
        return -np.inf
    return np.partition(weights, weights.size - budget)[weights.size - budget]


def _heaviest_first(weights, tokens, parents, budget):
    """The first `budget` nodes in the order of weight, renumbered."""
    order = np.argsort(-weights, kind="stable")[:budget]
    place = np.empty(weights.size + 1, dtype=np.int64)
    place[order] = np.arange(order.size)
    place[ROOT] = ROOT  # the spare last place, which index -1 finds
    return tokens[order].astype(np.int64), place[parents[order]]


def _walk(tokens, parents, pick):
    """Follow the picks from the root down for as long as they were drafted."""
    child = {edge: node for node, edge in enumerate(zip(parents.tolist(), tokens.tolist()))}
    path = []
    node = ROOT
    while True:
        picked = pick(node + 1)
        node = child.get((node, picked))
        if node is None:
            return path, picked
        path.append(node)


def _greedy_choices(answer, shape):
    """The likeliest token of each row of the target's answer, the lower on a tie."""
    answer = _floats(answer, "the target's answer", 2)
    if answer.shape != shape or shape[1] == 0:
        raise ValueError(f"the target's answer is {answer.shape}, the draft asks for {shape}")
    if np.isnan(answer).any():
        raise ValueError("NaN in the target's answer")
    return np.argmax(answer, axis=1)


def _checked_draft(log_q):
    log_q = _floats(log_q, "log_q", 2)
    if np.isnan(log_q).any() or np.isposinf(log_q).any():
        raise ValueError("NaN or +inf in log_q")
    return log_q


def _checked_tree(tokens, parents):
    tokens = _integers(tokens, "tokens")
    parents = _checked_parents(parents)
    _require_rows(tokens, "tokens", parents.size)
    return tokens, parents


def _checked_parents(parents):
    parents = _integers(parents, "parents")
    if np.any(parents < ROOT) or np.any(parents >= np.arange(parents.size)):
        raise ValueError("a parent must come before its children")
    return parents.astype(np.int64)


def _require_rows(array, name, rows):
    if array.shape[0] != rows:
        raise ValueError(f"{name} must have {rows} rows, not {array.shape[0]}")


def _integers(values, name):
    """A one-dimensional integer array; an empty list is one too."""
    array = np.asarray(values)
    if isinstance(values, (list, tuple)) and len(values) == 0:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, not {array.ndim}")
    return array


def _floats(values, name, axes):
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must be floating-point, not {array.dtype}")
    if array.ndim != axes:
        raise ValueError(f"{name} must have {axes} axes, not {array.ndim}")
    return array


def _natural(value, name):
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, not {value}")
    return value
