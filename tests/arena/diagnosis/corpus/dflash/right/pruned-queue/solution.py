# ruff: noqa: B905, E501, RUF005
"""Draft trees by exhaustive search with pruning: a queue, a bound that rises, one sort at the end."""

import heapq
import math
import operator
from collections import deque

import numpy as np

TINY = -math.inf


def size_of(x):
    n = operator.index(x)
    if n < 0:
        raise ValueError("sizes are not negative")
    return n


def int_array(x):
    a = np.asarray(x)
    if isinstance(x, (list, tuple)) and len(x) == 0:
        a = a.astype(np.int64)
    if a.dtype.kind != "i" and a.dtype.kind != "u":
        raise TypeError("integers required")
    if a.ndim != 1:
        raise ValueError("one axis required")
    return a


def float_array(x, rank):
    a = np.asarray(x)
    if a.dtype.kind != "f":
        raise TypeError("floating-point numbers required")
    if a.ndim != rank:
        raise ValueError("wrong rank")
    return a


def search(rows, budget):
    """All prefixes that can be among the `budget` heaviest: (weight, depth, parent's number, token)."""
    found = []
    bound = []  # the best (weight, -depth) so far, the worst of them on top
    queue = deque([(0, -1, 0.0, 0)])  # depth, parent's number, its weight, rank of the next token
    while queue:
        depth, parent, above, rank = queue.popleft()
        if rank == len(rows[depth]):
            continue
        log_p, token = rows[depth][rank]
        weight = above + log_p
        rating = (weight, -depth)
        if len(bound) == budget and rating < bound[0]:
            continue  # its later siblings and all below it are no better
        (heapq.heappush if len(bound) < budget else heapq.heappushpop)(bound, rating)
        queue.appendleft((depth, parent, above, rank + 1))
        if depth + 1 < len(rows):
            queue.append((depth + 1, len(found), weight, 0))
        found.append((weight, depth, parent, token))
    return found, bound[0] if bound else (TINY, 0)


def order_of(found, lightest):
    """Numbers of the found prefixes in the order of the answer."""
    place = {-1: -1}
    result = []
    by_weight = {}
    for number, entry in enumerate(found):
        if (entry[0], -entry[1]) >= lightest:
            by_weight.setdefault(entry[0], {}).setdefault(entry[1], []).append(number)
    for weight in sorted(by_weight, reverse=True):
        for depth in sorted(by_weight[weight]):
            for number in sorted(
                by_weight[weight][depth], key=lambda k: (place[found[k][2]], found[k][3])
            ):
                place[number] = len(result)
                result.append(number)
    return result, place


def build_tree(log_q, budget):
    log_q = float_array(log_q, 2)
    budget = size_of(budget)
    rows = []
    for law in log_q:
        law = law.astype(np.float64)
        if not (law < math.inf).all():
            raise ValueError("NaN or +inf in log_q")
        top = np.argsort(-law, kind="stable")[:budget]
        rows.append([(p, t) for p, t in zip(law[top].tolist(), top.tolist()) if p != TINY])
    tokens = np.empty(0, dtype=np.int64)
    parents = tokens.copy()
    if budget and rows:
        found, lightest = search(rows, budget)
        numbers, place = order_of(found, lightest)
        numbers = numbers[:budget]
        tokens = np.fromiter((found[k][3] for k in numbers), np.int64, len(numbers))
        parents = np.fromiter((place[found[k][2]] for k in numbers), np.int64, len(numbers))
    return tokens, parents


def checked_parents(parents):
    parents = int_array(parents).tolist()
    for i in range(len(parents)):
        if parents[i] not in range(-1, i):
            raise ValueError("a parent must come before its children")
    return parents


def tree_mask(parents, prefix_len):
    parents, prefix_len = checked_parents(parents), size_of(prefix_len)
    n = len(parents)
    sees = np.eye(n + 1, dtype=bool)
    sees[:, 0] = True
    # from the last node upwards: whoever sees a node sees its parent
    for i in range(n - 1, -1, -1):
        sees[:, parents[i] + 1] |= sees[:, i + 1]
    return np.hstack([np.ones((n + 1, prefix_len), dtype=bool), sees])


def verify_tree(tokens, parents, choices):
    tokens, parents, choices = (
        int_array(tokens).tolist(),
        checked_parents(parents),
        int_array(choices).tolist(),
    )
    n = len(tokens)
    if len(parents) != n or len(choices) != n + 1:
        raise ValueError("lengths do not fit together")
    # length of the agreeing branch that ends at each row; 0 where the branch has a wrong token
    length = [1] + [0] * n
    for i, (token, parent) in enumerate(zip(tokens, parents)):
        if length[parent + 1] and token == choices[parent + 1]:
            length[i + 1] = length[parent + 1] + 1
    row = length.index(max(length))
    bonus = choices[row]
    path = []
    while row:
        path.append(row - 1)
        row = parents[row - 1] + 1
    return path[::-1], bonus


def draw(law, u):
    if not 0.0 <= u < 1.0:
        raise ValueError("a number outside [0, 1)")
    if any(math.isnan(p) or p < 0 for p in law) or not any(law):
        raise ValueError("not a law")
    total = 0.0
    latest = None
    for token, p in enumerate(law):
        if p == 0:
            continue
        latest = token
        total += p
        if total > u:
            break
    return latest


def verify_sampled(tokens, parents, probs, uniforms):
    probs, uniforms = float_array(probs, 2).tolist(), float_array(uniforms, 1).tolist()
    if len(probs) != len(uniforms):
        raise ValueError("lengths do not fit together")
    picks = np.array([draw(law, u) for law, u in zip(probs, uniforms)], dtype=np.int64)
    return verify_tree(tokens, parents, picks)


def compact(kv, prefix_len, path):
    kv, prefix_len, path = np.asarray(kv), size_of(prefix_len), int_array(path).tolist()
    if kv.ndim < 2 or kv.shape[-2] - prefix_len < 1:
        raise ValueError("no room for prefix and root")
    if not set(path) <= set(range(kv.shape[-2] - prefix_len - 1)):
        raise ValueError("the path leaves the cache")
    rows_first = np.moveaxis(kv, -2, 0)
    chosen = rows_first[list(range(prefix_len + 1)) + [prefix_len + 1 + i for i in path]]
    return np.ascontiguousarray(np.moveaxis(chosen, 0, -2))


def one_round(target, drafter, prefix, budget):
    log_q = float_array(drafter.block(prefix[:]), 2)
    tokens, parents = build_tree(log_q, budget)
    answer = float_array(target.tree_log_probs(prefix[:], tokens.copy(), parents.copy()), 2)
    if answer.shape != (tokens.size + 1, log_q.shape[1]) or answer.size == 0:
        raise ValueError("the target's answer has the wrong shape")
    if np.isnan(answer).any():
        raise ValueError("NaN in the target's answer")
    path, bonus = verify_tree(tokens, parents, answer.argmax(axis=-1))
    return [int(tokens[i]) for i in path], int(bonus)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    prompt = int_array(prompt).tolist()
    room, budget = size_of(max_new_tokens), size_of(budget)
    if not prompt:
        raise ValueError("empty prompt")
    out, passes, accepted = [], 0, 0
    while room > 0:
        branch, bonus = one_round(target, drafter, prompt + out, budget)
        passes += 1
        for step, token in enumerate(branch + [bonus]):
            if room == 0:
                break
            out.append(token)
            accepted += step < len(branch)
            room -= 1
            if token == eos_id:
                room = 0
    return out, {"target_passes": passes, "accepted": accepted}
