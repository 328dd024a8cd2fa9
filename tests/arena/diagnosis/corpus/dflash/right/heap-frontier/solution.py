# ruff: noqa: B905
"""Speculative decoding with draft trees: a best-first heap, small classes, plain loops."""

import heapq
import operator

import numpy as np


def _count(value, name):
    """A non-negative int, or an error."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int")
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _floats(values, rank, name):
    """An array of floating-point numbers of this rank, or an error."""
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must be floating-point")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes")
    return array


def _ints(values, name):
    """A list of Python ints from a one-dimensional integer array, or an error."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    if isinstance(values, (list, tuple)) and not values:
        return []
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers")
    return array.tolist()


class _Row:
    """The tokens of one depth in falling order of probability, sorted only as far as needed."""

    def __init__(self, values, most):
        possible = np.flatnonzero(values > -np.inf)
        if most < possible.size:
            held = values[possible]
            edge = np.partition(held, held.size - most)[held.size - most]
            above = possible[held > edge]
            level = possible[held == edge][: most - above.size]
            possible = np.sort(np.concatenate([above, level]))
        order = possible[np.argsort(-values[possible], kind="stable")]
        self.tokens = order.tolist()
        self.weights = values[order].astype(np.float64).tolist()

    def entry(self, base, depth, parent, rank):
        """The heap entry of the rank-th child of a parent of weight `base`."""
        weight = base + self.weights[rank]
        return (-weight, depth, parent, self.tokens[rank], rank, base)

    def __len__(self):
        return len(self.tokens)


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = _floats(log_q, 2, "log_q")
    budget = _count(budget, "budget")
    if np.isnan(log_q).any() or (log_q == np.inf).any():
        raise ValueError("log_q holds NaN or +inf")
    rows = {}
    tokens, parents, heap = [], [], []

    def push(base, depth, parent, rank):
        if depth > log_q.shape[0]:
            return
        if depth not in rows:
            rows[depth] = _Row(log_q[depth - 1], budget)
        if rank < len(rows[depth]):
            heapq.heappush(heap, rows[depth].entry(base, depth, parent, rank))

    if budget:
        push(0.0, 1, -1, 0)
    while heap and len(tokens) < budget:
        negative, depth, parent, token, rank, base = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        push(base, depth, parent, rank + 1)
        push(-negative, depth + 1, node, 0)
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


class _Tree:
    """A checked tree with its children by (parent, token)."""

    def __init__(self, tokens, parents):
        self.tokens = _ints(tokens, "tokens")
        self.parents = _checked_parents(parents)
        if len(self.tokens) != len(self.parents):
            raise ValueError("tokens and parents differ in length")
        pairs = zip(self.parents, self.tokens)
        self.child = {pair: node for node, pair in enumerate(pairs)}

    def follow(self, pick):
        """Walk down from the root while pick(row) is a child's token."""
        path, node = [], -1
        while True:
            token = pick(node + 1)
            following = self.child.get((node, token))
            if following is None:
                return path, token
            path.append(following)
            node = following


def _checked_parents(parents):
    parents = _ints(parents, "parents")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError("a parent must come before its children")
    return parents


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _checked_parents(parents)
    prefix_len = _count(prefix_len, "prefix_len")
    size = len(parents) + 1
    mask = np.zeros((size, prefix_len + size), dtype=bool)
    mask[0, : prefix_len + 1] = True
    for node, parent in enumerate(parents):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, prefix_len + node + 1] = True
    return mask


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tree = _Tree(tokens, parents)
    choices = _ints(choices, "choices")
    if len(choices) != len(tree.tokens) + 1:
        raise ValueError("choices must have one entry for the root and each node")
    return tree.follow(choices.__getitem__)


def _sample(law, number):
    """The first token whose cumulative probability exceeds the number."""
    total = np.cumsum(law, dtype=np.float64)
    token = int(np.searchsorted(total, number, side="right"))
    if token == law.size:
        token = int(np.flatnonzero(law)[-1])
    return token


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tree = _Tree(tokens, parents)
    probs = _floats(probs, 2, "probs")
    uniforms = _floats(uniforms, 1, "uniforms")
    size = len(tree.tokens) + 1
    if probs.shape[0] != size or uniforms.shape[0] != size:
        raise ValueError("probs and uniforms need a row for the root and each node")
    if not (probs >= 0).all() or np.isinf(probs).any():
        raise ValueError("probabilities must not be negative, NaN or infinite")
    if not (probs > 0).any(axis=1).all():
        raise ValueError("a law without any possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    return tree.follow(lambda row: _sample(probs[row], float(uniforms[row])))


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    prefix_len = _count(prefix_len, "prefix_len")
    path = _ints(path, "path")
    if kv.ndim < 2:
        raise ValueError("kv needs at least two axes")
    nodes = kv.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError("kv has no room for prefix and root")
    if any(not 0 <= node < nodes for node in path):
        raise ValueError("the path leaves the cache")
    kept = prefix_len + 1
    answer = np.empty((*kv.shape[:-2], kept + len(path), kv.shape[-1]), dtype=kv.dtype)
    answer[..., :kept, :] = kv[..., :kept, :]
    for place, node in enumerate(path):
        answer[..., kept + place, :] = kv[..., kept + node, :]
    return answer


class _Decoder:
    """One greedy generation: what is committed, and the counts."""

    def __init__(self, target, drafter, prompt, budget):
        self.target, self.drafter, self.budget = target, drafter, budget
        self.committed = prompt
        self.passes = 0

    def round(self):
        """One round: the accepted tokens with the bonus last."""
        log_q = _floats(self.drafter.block(list(self.committed)), 2, "log_q")
        tokens, parents = build_tree(log_q, self.budget)
        answer = self.target.tree_log_probs(list(self.committed), tokens, parents)
        self.passes += 1
        answer = _floats(answer, 2, "the target's answer")
        if answer.shape != (len(tokens) + 1, log_q.shape[1]) or answer.shape[1] == 0:
            raise ValueError("the target's answer must be (N+1, V)")
        if np.isnan(answer).any():
            raise ValueError("the target's answer holds NaN")
        path, bonus = verify_tree(tokens, parents, answer.argmax(axis=1))
        return [int(tokens[node]) for node in path] + [bonus]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    limit = _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")
    start = [operator.index(token) for token in prompt]
    if not start:
        raise ValueError("the prompt is empty")
    decoder = _Decoder(target, drafter, list(start), budget)
    accepted, done = 0, False
    while not done and len(decoder.committed) - len(start) < limit:
        emitted = decoder.round()
        drafted = len(emitted) - 1
        for place, token in enumerate(emitted):
            decoder.committed.append(token)
            accepted += place < drafted
            done = token == eos_id
            if done or len(decoder.committed) - len(start) == limit:
                break
    stats = {"target_passes": decoder.passes, "accepted": accepted}
    return decoder.committed[len(start) :], stats
