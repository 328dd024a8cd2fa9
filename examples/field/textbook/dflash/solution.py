"""Speculative decoding with a draft tree, written plainly."""

import heapq

import numpy as np


def build_tree(log_q, budget):
    log_q = np.asarray(log_q)
    if log_q.ndim != 2 or log_q.dtype.kind != "f":
        raise ValueError("log_q must be a float array (L, V)")
    if np.isnan(log_q).any() or (log_q == np.inf).any():
        raise ValueError("log_q contains NaN or inf")
    check_size(budget)
    # Each row as (minus log-probability, token), best first; impossible tokens are left out.
    rows = [
        sorted((-float(value), token) for token, value in enumerate(row) if value > -np.inf)
        for row in log_q
    ]
    tokens, parents = [], []
    # What could be the next node: (minus weight, depth, parent, token, rank, parent's weight).
    heap = []
    push(heap, rows, 0.0, 0, -1, 0)
    while heap and len(tokens) < budget:
        weight, depth, parent, token, rank, above = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        push(heap, rows, above, depth, parent, rank + 1)
        push(heap, rows, weight, depth + 1, len(tokens) - 1, 0)
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def push(heap, rows, above, depth, parent, rank):
    if depth < len(rows) and rank < len(rows[depth]):
        cost, token = rows[depth][rank]
        heapq.heappush(heap, (above + cost, depth, parent, token, rank, above))


def tree_mask(parents, prefix_len):
    parents = check_parents(parents)
    check_size(prefix_len)
    n = len(parents)
    mask = np.zeros((n + 1, prefix_len + n + 1), dtype=bool)
    mask[:, : prefix_len + 1] = True
    for node in range(n):
        current = node
        while current != -1:
            mask[node + 1, prefix_len + 1 + current] = True
            current = parents[current]
    return mask


def verify_tree(tokens, parents, choices):
    parents = check_parents(parents)
    tokens, choices = check_ints(tokens), check_ints(choices)
    if len(tokens) != len(parents) or len(choices) != len(parents) + 1:
        raise ValueError("lengths do not fit")
    path = []
    current = -1
    while True:
        # The row of the current node judges its children.
        wanted = choices[current + 1]
        found = None
        for node in range(len(tokens)):
            if parents[node] == current and tokens[node] == wanted:
                found = node
                break
        if found is None:
            return path, wanted
        path.append(found)
        current = found


def verify_sampled(tokens, parents, probs, uniforms):
    probs = np.asarray(probs)
    uniforms = np.asarray(uniforms)
    if probs.ndim != 2 or probs.dtype.kind != "f" or uniforms.shape != (len(probs),):
        raise ValueError("wrong shapes")
    if not (probs >= 0).all() or not (probs.sum(axis=1) > 0).all():
        raise ValueError("not probabilities")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must be in [0, 1)")
    choices = [sample(row, float(u)) for row, u in zip(probs, uniforms)]
    return verify_tree(tokens, parents, choices)


def sample(row, uniform):
    total = 0.0
    last = 0
    for token, probability in enumerate(row):
        if probability > 0:
            total += float(probability)
            last = token
            if total > uniform:
                return token
    return last


def compact(kv, prefix_len, path):
    kv = np.asarray(kv)
    if kv.ndim < 2 or kv.dtype.kind != "f":
        raise ValueError("kv must be a float array (..., rows, D)")
    check_size(prefix_len)
    rows = list(range(prefix_len + 1))
    for node in path:
        if node < 0 or prefix_len + 1 + node >= kv.shape[-2]:
            raise ValueError("node outside the cache")
        rows.append(prefix_len + 1 + int(node))
    if prefix_len + 1 > kv.shape[-2]:
        raise ValueError("prefix outside the cache")
    return kv[..., rows, :]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    check_size(max_new_tokens)
    text = [int(token) for token in prompt]
    output = []
    passes = 0
    accepted = 0
    finished = False
    while not finished and len(output) < max_new_tokens:
        tokens, parents = build_tree(drafter.block(text + output), budget)
        log_probs = np.asarray(target.tree_log_probs(text + output, tokens, parents))
        passes += 1
        if log_probs.ndim != 2 or len(log_probs) != len(tokens) + 1:
            raise ValueError("the target's answer has the wrong shape")
        if np.isnan(log_probs).any():
            raise ValueError("the target's answer contains NaN")
        path, bonus = verify_tree(tokens, parents, log_probs.argmax(axis=1))
        new = [(int(tokens[node]), True) for node in path] + [(bonus, False)]
        for token, drafted in new:
            output.append(token)
            accepted += int(drafted)
            if token == eos_id:
                finished = True
            if finished or len(output) == max_new_tokens:
                break
    return output, {"target_passes": passes, "accepted": accepted}


def check_size(value):
    if not isinstance(value, int):
        raise TypeError("an int is needed")
    if value < 0:
        raise ValueError("must not be negative")


def check_ints(values):
    values = np.asarray(values)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ValueError("a list of ints is needed")
    return [int(value) for value in values]


def check_parents(parents):
    parents = check_ints(parents)
    for node, parent in enumerate(parents):
        if parent < -1 or parent >= node:
            raise ValueError("a parent must come before its child")
    return parents
