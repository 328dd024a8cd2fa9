"""Speculative decoding with draft trees.

The tree is merged from sorted streams: every node that is already in the tree owns a generator of its
children, best first, and a sorted frontier holds the next child of each stream.
"""

from bisect import insort
from operator import index
from typing import NamedTuple

import numpy as np


class Candidate(NamedTuple):
    """The next child that a stream offers. The frontier takes the largest one first."""

    weight: float
    higher: int  # minus the depth
    older: int  # minus the parent's index
    smaller: int  # minus the token


# ---------------------------------------------------------------- checks


def _count(value, name):
    """A whole number that is not negative."""
    number = index(value)
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _integers(values, name):
    """A one-dimensional list of Python ints."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    if array.size == 0 and not isinstance(values, np.ndarray):
        return []
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers")
    return array.tolist()


def _floats(values, rank, name):
    """An array of real floating-point numbers with this many axes."""
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must hold floating-point numbers")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes")
    return array


def _parent_list(parents):
    """The parents as ints, each of them before its child."""
    parents = _integers(parents, "parents")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError("a parent must come before its children")
    return parents


def _tree(tokens, parents):
    """Both arrays of a tree as lists."""
    tokens = _integers(tokens, "tokens")
    parents = _parent_list(parents)
    if len(tokens) != len(parents):
        raise ValueError("tokens and parents must have the same length")
    return tokens, parents


# ---------------------------------------------------------------- building


def _best_tokens(row, count):
    """The `count` likeliest possible tokens of a law, best first, and their values in float64."""
    possible = int(np.count_nonzero(row > -np.inf))
    count = min(count, possible)
    if count == 0:
        return np.empty(0, np.int64), np.empty(0)
    bound = np.partition(row, row.size - count)[row.size - count]
    tokens = np.flatnonzero(row >= bound)
    order = np.argsort(-row[tokens], kind="stable")[:count]
    tokens = tokens[order]
    return tokens, row[tokens].astype(np.float64)


def _children(weight, depth, parent, law):
    """The stream of one node's children, best first."""
    tokens, values = law
    for token, value in zip(tokens, values):
        yield Candidate(weight + value, -depth, -parent, -token)


def _advance(frontier, stream):
    """Put the stream's next child into the frontier."""
    candidate = next(stream, None)
    if candidate is not None:
        insort(frontier, (candidate, stream), key=lambda entry: entry[0])


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = _floats(log_q, 2, "log_q")
    budget = _count(budget, "budget")
    if np.isnan(log_q).any() or np.isposinf(log_q).any():
        raise ValueError("log_q must not hold NaN or +inf")
    tokens, parents = [], []
    laws = []
    frontier = []

    def open_stream(weight, depth, parent):
        """Offer the children at this depth below a node."""
        if depth > len(log_q):
            return
        if depth > len(laws):
            laws.append(_best_tokens(log_q[depth - 1], budget))
        _advance(frontier, _children(weight, depth, parent, laws[depth - 1]))

    open_stream(0.0, 1, -1)
    while frontier and len(tokens) < budget:
        best, stream = frontier.pop()
        node = len(tokens)
        tokens.append(-best.smaller)
        parents.append(-best.older)
        _advance(frontier, stream)
        open_stream(best.weight, 1 - best.higher, node)
    return np.array(tokens, np.int64), np.array(parents, np.int64)


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _parent_list(parents)
    prefix_len = _count(prefix_len, "prefix_len")
    rows = np.arange(len(parents) + 1)
    parent_rows = np.array([0] + [parent + 1 for parent in parents])
    mask = np.zeros((rows.size, prefix_len + rows.size), dtype=bool)
    mask[:, : prefix_len + 1] = True
    seen = rows
    while seen.any():
        mask[rows, prefix_len + seen] = True
        seen = parent_rows[seen]
    return mask


# ---------------------------------------------------------------- verifying


def _follow(tokens, parents, picks):
    """The branch along which every token is what was picked, and the pick at its end."""
    nodes = {edge: node for node, edge in enumerate(zip(parents, tokens))}
    path = []
    node = nodes.get((-1, picks[0]))
    while node is not None:
        path.append(node)
        node = nodes.get((node, picks[node + 1]))
    end = path[-1] + 1 if path else 0
    return path, picks[end]


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _tree(tokens, parents)
    choices = _integers(choices, "choices")
    if len(choices) != len(tokens) + 1:
        raise ValueError("choices must have one entry for the root and one for each node")
    return _follow(tokens, parents, choices)


def _sample(law, number):
    """The first token whose cumulative probability exceeds the number."""
    cumulative = np.cumsum(law, dtype=np.float64)
    pick = int(np.searchsorted(cumulative, number, side="right"))
    last = int(np.flatnonzero(law)[-1])
    return min(pick, last)


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _tree(tokens, parents)
    probs = _floats(probs, 2, "probs")
    uniforms = _floats(uniforms, 1, "uniforms")
    if len(probs) != len(tokens) + 1 or len(uniforms) != len(tokens) + 1:
        raise ValueError("probs and uniforms must have one row for the root and one for each node")
    if not (np.isfinite(probs).all() and (probs >= 0).all()):
        raise ValueError("probabilities must be finite and not negative")
    if not (probs > 0).any(axis=1).all():
        raise ValueError("every law needs a possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    picks = [_sample(law, number) for law, number in zip(probs, uniforms.astype(np.float64))]
    return _follow(tokens, parents, picks)


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    prefix_len = _count(prefix_len, "prefix_len")
    path = _integers(path, "path")
    if kv.ndim < 2:
        raise ValueError("kv must have at least two axes")
    nodes = kv.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError("kv is shorter than the prefix and the root")
    if any(not 0 <= node < nodes for node in path):
        raise ValueError("the path leaves the cache")
    rows = list(range(prefix_len + 1)) + [prefix_len + 1 + node for node in path]
    return np.take(kv, np.array(rows, np.int64), axis=-2)


# ---------------------------------------------------------------- generating


def _target_picks(answer, rows, vocabulary):
    """The most likely token of every row of the target's answer, the lower one on a tie."""
    answer = _floats(answer, 2, "the target's answer")
    if answer.shape != (rows, vocabulary):
        raise ValueError("the target must answer for the root and every node, over the draft's vocabulary")
    if np.isnan(answer).any():
        raise ValueError("the target's answer holds NaN")
    return answer.argmax(axis=1).tolist()


def _round(target, drafter, committed, budget):
    """One draft and one pass of the target: the new tokens, of which all but the last are drafted."""
    log_q = _floats(drafter.block(list(committed)), 2, "log_q")
    tokens, parents = build_tree(log_q, budget)
    answer = target.tree_log_probs(list(committed), tokens, parents)
    picks = _target_picks(answer, len(tokens) + 1, log_q.shape[1])
    path, bonus = verify_tree(tokens, parents, np.array(picks, np.int64))
    return [int(tokens[node]) for node in path] + [bonus]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    prompt = _integers(prompt, "prompt")
    if not prompt:
        raise ValueError("the prompt is empty")
    max_new_tokens = _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")
    generated = []
    passes = accepted = 0
    while len(generated) < max_new_tokens and eos_id not in generated[-1:]:
        new = _round(target, drafter, prompt + generated, budget)
        passes += 1
        drafted = len(new) - 1
        new = new[: max_new_tokens - len(generated)]
        if eos_id in new:
            new = new[: new.index(eos_id) + 1]
        accepted += min(drafted, len(new))
        generated += new
    return generated, {"target_passes": passes, "accepted": accepted}
