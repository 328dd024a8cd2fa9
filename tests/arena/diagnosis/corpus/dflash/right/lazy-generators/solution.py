# ruff: noqa: B905, E501, RUF005
"""Draft trees from lazy streams: every node is a generator of its own subtree in order of weight."""

import heapq
from itertools import accumulate, islice, takewhile
from operator import index

import numpy as np


def natural(x):
    if index(x) < 0:
        raise ValueError("must not be negative")
    return index(x)


def vector_of(kind, x):
    a = np.asarray(x)
    if a.size == 0 and isinstance(x, (list, tuple)) and a.ndim == 1:
        return []
    if a.dtype.kind not in kind:
        raise TypeError("wrong kind of numbers")
    if a.ndim != 1:
        raise ValueError("wrong rank")
    return a.tolist()


def ints(x):
    return vector_of("iu", x)


def matrix(x):
    a = np.asarray(x)
    if a.dtype.kind != "f":
        raise TypeError("floating-point numbers required")
    if a.ndim != 2:
        raise ValueError("wrong rank")
    return a.astype(np.float64)


def ordered(parents):
    parents = ints(parents)
    if not all(-1 <= p < i for i, p in enumerate(parents)):
        raise ValueError("parents must come before their children")
    return parents


def ranked(law, most):
    """Pairs (log-probability, token), likeliest first, without the impossible ones."""
    return [
        (float(law[t]), int(t)) for t in np.argsort(-law, kind="stable")[:most] if law[t] != -np.inf
    ]


def family(row, depth, parent, above):
    """The children of one node as heap keys, heaviest first."""
    return ((-(above + lp), depth, parent, token) for lp, token in row)


def prefixes(rows):
    """All prefixes, heaviest first, as (token, parent)."""
    streams = []

    def draw(stream):
        head = next(stream, None)
        if head is not None:
            heapq.heappush(streams, (head, id(stream), stream))

    if rows:
        draw(family(rows[0], 0, -1, 0.0))
    number = 0
    while streams:
        (minus, depth, parent, token), _, stream = heapq.heappop(streams)
        yield token, parent
        draw(stream)
        if depth + 1 < len(rows):
            draw(family(rows[depth + 1], depth + 1, number, -minus))
        number += 1


def build_tree(log_q, budget):
    log_q, budget = matrix(log_q), natural(budget)
    if np.isnan(log_q).any() or np.isposinf(log_q).any():
        raise ValueError("NaN or +inf in log_q")
    rows = [ranked(law, budget) for law in log_q]
    flat = np.array(list(islice(prefixes(rows), budget)), dtype=np.int64).reshape(-1, 2)
    tokens, parents = flat.T.copy()
    return tokens, parents


def climb(parents, node):
    while node >= 0:
        yield node
        node = parents[node]


def tree_mask(parents, prefix_len):
    parents, prefix_len = ordered(parents), natural(prefix_len)
    n = len(parents)
    seen = [set(climb(parents, i)) for i in range(-1, n)]
    mask = np.ones((n + 1, prefix_len + n + 1), dtype=bool)
    for row, allowed in zip(mask, seen):
        row[prefix_len + 1 :] = [j in allowed for j in range(n)]
    return mask


def descend(tokens, parents, choices):
    """Yields the accepted nodes from the root downwards."""
    below = {(p, t): i for i, (t, p) in reversed(list(enumerate(zip(tokens, parents))))}
    node = below.get((-1, choices[0]))
    while node is not None:
        yield node
        node = below.get((node, choices[node + 1]))


def verify_tree(tokens, parents, choices):
    tokens, parents, choices = ints(tokens), ordered(parents), ints(choices)
    if not len(tokens) == len(parents) == len(choices) - 1:
        raise ValueError("lengths do not fit together")
    path = list(descend(tokens, parents, choices))
    return path, choices[path[-1] + 1 if path else 0]


def pick(law, u):
    if not 0 <= u < 1:
        raise ValueError("number outside [0, 1)")
    if not all(p >= 0 for p in law):
        raise ValueError("negative or NaN probability")
    possible = [t for t, p in enumerate(law) if p > 0]
    if not possible:
        raise ValueError("a law without any possible token")
    below = sum(1 for _ in takewhile(lambda total: total <= u, accumulate(law)))
    return min(below, possible[-1])


def verify_sampled(tokens, parents, probs, uniforms):
    laws, numbers = matrix(probs).tolist(), vector_of("f", uniforms)
    if len(laws) != len(numbers):
        raise ValueError("lengths do not fit together")
    return verify_tree(tokens, parents, [pick(*pair) for pair in zip(laws, numbers)])


def compact(kv, prefix_len, path):
    kv, prefix_len, path = np.asarray(kv), natural(prefix_len), ints(path)
    if kv.ndim < 2 or kv.shape[-2] < prefix_len + 1:
        raise ValueError("kv does not fit the prefix")
    rows = kv.shape[-2]
    wanted = [*range(prefix_len + 1), *(prefix_len + 1 + i for i in path)]
    if any(i < 0 for i in path) or any(r >= rows for r in wanted):
        raise ValueError("the path leaves the cache")
    return np.stack([kv[..., r, :] for r in wanted], axis=-2).astype(kv.dtype, copy=False)


def argmaxes(answer, shape):
    answer = matrix(answer)
    if answer.shape != shape or shape[1] == 0:
        raise ValueError("the target's answer has the wrong shape")
    if np.isnan(answer).any():
        raise ValueError("NaN in the target's answer")
    return [max(range(len(law)), key=law.__getitem__) for law in answer.tolist()]


def stream_tokens(target, drafter, prompt, budget, counter):
    """The target's own tokens, without end, each with whether it was drafted."""
    committed = list(prompt)
    while True:
        log_q = matrix(drafter.block(committed[:]))
        tokens, parents = build_tree(log_q, budget)
        answer = target.tree_log_probs(committed[:], tokens, parents)
        counter["target_passes"] += 1
        path, bonus = verify_tree(
            tokens, parents, argmaxes(answer, (len(tokens) + 1, log_q.shape[1]))
        )
        branch = tokens[path].tolist() if path else []
        yield from ((t, True) for t in branch)
        yield bonus, False
        committed += branch + [bonus]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    prompt, budget, limit = [index(t) for t in prompt], natural(budget), natural(max_new_tokens)
    if not prompt:
        raise ValueError("empty prompt")
    stats = {"target_passes": 0, "accepted": 0}
    out = []
    for token, drafted in islice(stream_tokens(target, drafter, prompt, budget, stats), limit):
        out.append(token)
        stats["accepted"] += drafted
        if token == eos_id:
            break
    return out, stats
