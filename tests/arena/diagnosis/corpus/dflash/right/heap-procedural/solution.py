# ruff: noqa: B905, RUF005, RUF059
"""Draft trees, written as plain loops over Python lists with one heap."""

import heapq
import operator

import numpy as np


def _int_list(values, what):
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{what} must have one axis")
    if array.size == 0 and not isinstance(values, np.ndarray):
        return []
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} must hold integers")
    return array.tolist()


def _count(value, what):
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"{what} must not be negative")
    return value


def _float_matrix(values, what):
    array = np.asarray(values)
    if array.dtype.kind != "f":
        raise TypeError(f"{what} must be floating-point")
    if array.ndim != 2:
        raise ValueError(f"{what} must have two axes")
    return array


def _parent_list(parents):
    parents = _int_list(parents, "parents")
    for i, p in enumerate(parents):
        if p < -1 or p >= i:
            raise ValueError("a parent must come before its children")
    return parents


def build_tree(log_q, budget):
    log_q = _float_matrix(log_q, "log_q")
    budget = _count(budget, "budget")
    if np.isnan(log_q).any() or np.isposinf(log_q).any():
        raise ValueError("log_q holds NaN or +inf")
    depth_count, vocab = log_q.shape
    order = []
    value = []
    for d in range(depth_count):
        row = log_q[d].astype(np.float64)
        best = np.argsort(-row, kind="stable")[:budget]
        best = best[row[best] > -np.inf]
        order.append(best.tolist())
        value.append(row[best].tolist())
    tokens = []
    parents = []
    heap = []
    # entry: -weight, depth, parent, token, rank of the token in its row, weight of the parent
    if depth_count and budget and order[0]:
        heap.append((-value[0][0], 1, -1, order[0][0], 0, 0.0))
    while heap and len(tokens) < budget:
        negative, depth, parent, token, rank, base = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        if rank + 1 < len(order[depth - 1]):
            sibling = base + value[depth - 1][rank + 1]
            heapq.heappush(
                heap, (-sibling, depth, parent, order[depth - 1][rank + 1], rank + 1, base)
            )
        if depth < depth_count and order[depth]:
            child = -negative + value[depth][0]
            heapq.heappush(heap, (-child, depth + 1, node, order[depth][0], 0, -negative))
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def tree_mask(parents, prefix_len):
    parents = _parent_list(parents)
    prefix_len = _count(prefix_len, "prefix_len")
    n = len(parents)
    mask = np.zeros((n + 1, prefix_len + n + 1), dtype=bool)
    mask[:, : prefix_len + 1] = True
    for i in range(n):
        above = i
        while above != -1:
            mask[i + 1, prefix_len + 1 + above] = True
            above = parents[above]
    return mask


def verify_tree(tokens, parents, choices):
    tokens = _int_list(tokens, "tokens")
    parents = _parent_list(parents)
    choices = _int_list(choices, "choices")
    if len(parents) != len(tokens) or len(choices) != len(tokens) + 1:
        raise ValueError("lengths do not fit together")
    path = []
    here = -1
    for i in range(len(tokens)):
        # children come after their parents, so one sweep is enough
        if parents[i] == here and tokens[i] == choices[here + 1]:
            path.append(i)
            here = i
    return path, choices[here + 1]


def verify_sampled(tokens, parents, probs, uniforms):
    probs = _float_matrix(probs, "probs")
    uniforms = np.asarray(uniforms)
    if uniforms.dtype.kind != "f":
        raise TypeError("uniforms must be floating-point")
    if uniforms.shape != probs.shape[:1]:
        raise ValueError("one number for each law")
    picks = []
    for law, u in zip(probs.tolist(), uniforms.tolist()):
        if not 0.0 <= u < 1.0:
            raise ValueError("numbers must be in [0, 1)")
        total = 0.0
        pick = last = -1
        for token, p in enumerate(law):
            if not p >= 0.0:
                raise ValueError("negative or NaN probability")
            if p > 0.0:
                last = token
            total += p
            if pick < 0 and total > u:
                pick = token
        if last < 0:
            raise ValueError("a law without any possible token")
        picks.append(pick if pick >= 0 else last)
    return verify_tree(tokens, parents, picks)


def compact(kv, prefix_len, path):
    kv = np.asarray(kv)
    prefix_len = _count(prefix_len, "prefix_len")
    path = _int_list(path, "path")
    if kv.ndim < 2:
        raise ValueError("kv must have at least two axes")
    nodes = kv.shape[-2] - prefix_len - 1
    if nodes < 0:
        raise ValueError("kv is shorter than the prefix and the root")
    rows = list(range(prefix_len + 1))
    for i in path:
        if i < 0 or i >= nodes:
            raise ValueError("the path leaves the cache")
        rows.append(prefix_len + 1 + i)
    return np.take(kv, rows, axis=-2)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    committed = [operator.index(t) for t in prompt]
    if not committed:
        raise ValueError("empty prompt")
    start = len(committed)
    limit = start + _count(max_new_tokens, "max_new_tokens")
    budget = _count(budget, "budget")
    passes = accepted = 0
    done = False
    while len(committed) < limit and not done:
        log_q = np.asarray(drafter.block(list(committed)))
        tokens, parents = build_tree(log_q, budget)
        answer = _float_matrix(
            target.tree_log_probs(list(committed), tokens, parents), "the target's answer"
        )
        passes += 1
        if answer.shape != (len(tokens) + 1, log_q.shape[1]) or answer.shape[1] == 0:
            raise ValueError("the target's answer has the wrong shape")
        if np.isnan(answer).any():
            raise ValueError("NaN in the target's answer")
        path, bonus = verify_tree(tokens, parents, answer.argmax(axis=1))
        for node in path + [None]:
            token = bonus if node is None else int(tokens[node])
            committed.append(token)
            if node is not None:
                accepted += 1
            done = token == eos_id
            if done or len(committed) == limit:
                break
    return committed[start:], {"target_passes": passes, "accepted": accepted}
