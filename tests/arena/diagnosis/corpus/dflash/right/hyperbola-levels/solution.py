"""Speculative decoding with draft trees, one whole level of the tree at a time.

The tree is grown level by level with array operations and no heap. If the parents of a level and the tokens
of the next depth are both sorted, best first, then child (i, j) is preceded by all (i', j') with i' <= i and
j' <= j. Only the pairs below the hyperbola (i + 1)(j + 1) <= budget can be among the heaviest `budget`.
"""

import operator

import numpy as np

ROOT = -1


def _count(value, name):
    """A non-negative whole number as an int."""
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {number}")
    return number


def _floats(array, name, rank):
    """An array of floating-point numbers of this rank."""
    array = np.asarray(array)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must be floating-point, got {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, got shape {array.shape}")
    return array


def _integers(array, name):
    """A one-dimensional integer array (or an empty sequence) as a list of ints."""
    if not isinstance(array, np.ndarray):
        array = np.asarray(array) if len(array) else np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    return array.tolist()


def _parents(parents):
    """Checked parents as a list of ints."""
    above = _integers(parents, "parents")
    for node, parent in enumerate(above):
        if not ROOT <= parent < node:
            raise ValueError(f"node {node} cannot hang below {parent}")
    return above


def _tree(tokens, parents):
    """A checked tree as two lists of ints."""
    labels, above = _integers(tokens, "tokens"), _parents(parents)
    if len(labels) != len(above):
        raise ValueError(f"{len(labels)} tokens but {len(above)} parents")
    return labels, above


# ---------------------------------------------------------------- building


def _best_tokens(row, limit):
    """The `limit` likeliest possible tokens of a law, best first, the lower one first on a tie."""
    if limit < row.size:
        last = np.partition(row, row.size - limit)[row.size - limit]
        better = np.flatnonzero(row > last)
        level = np.flatnonzero(row == last)[: limit - better.size]
        chosen = np.sort(np.concatenate([better, level]))
    else:
        chosen = np.arange(row.size)
    chosen = chosen[row[chosen] > -np.inf]
    return chosen[np.argsort(-row[chosen], kind="stable")]


def _hyperbola(rows, columns, budget):
    """All pairs (i, j), row by row, with i < rows, j < columns and (i + 1)(j + 1) <= budget."""
    widths = np.minimum(columns, budget // np.arange(1, rows + 1))
    starts = np.cumsum(widths) - widths
    i = np.repeat(np.arange(rows), widths)
    j = np.arange(i.size) - np.repeat(starts, widths)
    return i, j


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = _floats(log_q, "log_q", 2)
    budget = min(_count(budget, "budget"), np.iinfo(np.int64).max)
    if log_q.size and not log_q.max() < np.inf:
        raise ValueError("log_q holds NaN or +inf")

    # The pool is always in its final order; `frontier` are the positions of its deepest level.
    weights = np.zeros(0)
    tokens = np.zeros(0, np.int64)
    parents = np.zeros(0, np.int64)
    frontier, frontier_weights = np.array([ROOT]), np.zeros(1)
    for row in log_q:
        if not (budget and frontier.size):
            break
        ranked = _best_tokens(row, budget)
        i, j = _hyperbola(frontier.size, ranked.size, budget)
        with np.errstate(over="ignore"):
            fresh = frontier_weights[i] + row[ranked].astype(np.float64)[j]
        if weights.size == budget:
            useful = fresh > weights[-1]
            fresh, i, j = fresh[useful], i[useful], j[useful]

        known = weights.size
        weights = np.concatenate([weights, fresh])
        tokens = np.concatenate([tokens, ranked[j]])
        parents = np.concatenate([parents, frontier[i]])
        # Stable: on a tie the pool (lower depth) wins, then the earlier parent, then the lower token.
        order = np.argsort(-weights, kind="stable")[:budget]
        position = np.full(weights.size + 1, ROOT)
        position[order] = np.arange(order.size)
        weights, tokens, parents = weights[order], tokens[order], position[parents[order]]
        frontier = np.flatnonzero(order >= known)
        frontier_weights = weights[frontier]
    return tokens.astype(np.int64), parents.astype(np.int64)


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    above = _parents(parents)
    prefix_len = _count(prefix_len, "prefix_len")
    mask = np.zeros((len(above) + 1, prefix_len + len(above) + 1), bool)
    mask[0, : prefix_len + 1] = True
    for node, parent in enumerate(above):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, prefix_len + 1 + node] = True
    return mask


# ---------------------------------------------------------------- verifying


def _descend(labels, above, pick):
    """Follow pick(row) from the root for as long as the tree holds the picked token."""
    child = {edge: node for node, edge in enumerate(zip(above, labels))}
    path, here, token = [], ROOT, pick(0)
    while (here, token) in child:
        here = child[here, token]
        path.append(here)
        token = pick(here + 1)
    return path, token


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    labels, above = _tree(tokens, parents)
    picks = _integers(choices, "choices")
    if len(picks) != len(labels) + 1:
        raise ValueError(f"{len(labels)} nodes need {len(labels) + 1} choices, got {len(picks)}")
    return _descend(labels, above, picks.__getitem__)


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    labels, above = _tree(tokens, parents)
    probs = _floats(probs, "probs", 2)
    uniforms = _floats(uniforms, "uniforms", 1)
    if not len(probs) == len(uniforms) == len(labels) + 1:
        raise ValueError(f"{len(labels)} nodes, {len(probs)} laws and {len(uniforms)} numbers do not fit")
    if not ((probs >= 0) & (probs < np.inf)).all():
        raise ValueError("probabilities must be finite and not negative")
    if not (probs > 0).any(axis=1).all():
        raise ValueError("a law has no possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")

    def pick(row):
        total = np.cumsum(probs[row], dtype=np.float64)
        first = int(np.searchsorted(total, np.float64(uniforms[row]), side="right"))
        last = int(np.flatnonzero(probs[row])[-1])
        return min(first, last)

    return _descend(labels, above, pick)


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    prefix_len = _count(prefix_len, "prefix_len")
    nodes = _integers(path, "path")
    if kv.ndim < 2:
        raise ValueError(f"kv must be (..., rows, D), got shape {kv.shape}")
    drafted = kv.shape[-2] - prefix_len - 1
    if drafted < 0:
        raise ValueError(f"{kv.shape[-2]} rows cannot hold a prefix of {prefix_len} and a root")
    if any(not 0 <= node < drafted for node in nodes):
        raise ValueError(f"the path {nodes} leaves a cache of {drafted} nodes")
    rows = list(range(prefix_len + 1)) + [prefix_len + 1 + node for node in nodes]
    return np.take(kv, rows, axis=-2)


# ---------------------------------------------------------------- generating


def _round(target, drafter, prefix, budget):
    """One draft and one pass of the target: (committed tokens, how many of them were drafted)."""
    log_q = _floats(drafter.block(list(prefix)), "the draft", 2)
    tokens, parents = build_tree(log_q, budget)
    answer = _floats(target.tree_log_probs(list(prefix), tokens.copy(), parents.copy()), "the target's answer", 2)
    if answer.shape != (tokens.size + 1, log_q.shape[1]):
        raise ValueError(f"the target answered {answer.shape} to {tokens.size} nodes")
    if np.isnan(answer).any():
        raise ValueError("the target's answer holds NaN")
    path, bonus = verify_tree(tokens, parents, answer.argmax(axis=1))
    return [*tokens[path].tolist(), bonus], len(path)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    prompt = [operator.index(token) for token in prompt]
    if not prompt:
        raise ValueError("the prompt is empty")
    limit = _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")

    out, passes, accepted = [], 0, 0
    done = False
    while not done and len(out) < limit:
        fresh, drafted = _round(target, drafter, prompt + out, budget)
        passes += 1
        fresh = fresh[: limit - len(out)]
        if eos_id in fresh:
            fresh = fresh[: fresh.index(eos_id) + 1]
            done = True
        out += fresh
        accepted += min(drafted, len(fresh))
    return out, {"target_passes": passes, "accepted": accepted}
