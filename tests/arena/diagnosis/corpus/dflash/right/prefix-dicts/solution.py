# ruff: noqa: B905, E501, RUF005
"""Draft trees whose nodes are tuples of tokens, kept in dictionaries; a sorted list is the queue."""

import bisect
from operator import index

import numpy as np


def whole(number):
    number = index(number)
    if number < 0:
        raise ValueError("a negative number")
    return number


def as_ints(values):
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError("one axis expected")
    if array.dtype.kind in "iu":
        return [int(v) for v in array]
    if array.size or isinstance(values, np.ndarray):
        raise TypeError("integers expected")
    return []


def as_floats(values, axes):
    array = np.asarray(values)
    if array.dtype.kind != "f":
        raise TypeError("floating-point numbers expected")
    if array.ndim != axes:
        raise ValueError("wrong number of axes")
    return np.array(array, dtype=np.float64, order="C")


def check_parents(parents):
    for child, parent in enumerate(parents):
        if not (parent == -1 or 0 <= parent < child):
            raise ValueError("parent does not come before child")


def name_nodes(tokens, parents):
    """{node index: (parent's index, token)} the other way round: who hangs there with that token."""
    if len(tokens) != len(parents):
        raise ValueError("tokens and parents differ in length")
    check_parents(parents)
    table = {}
    for node, key in enumerate(zip(parents, tokens)):
        table.setdefault(key, node)
    return table


def build_tree(log_q, budget):
    log_q = as_floats(log_q, 2)
    budget = whole(budget)
    if np.isnan(log_q).any() or np.isinf(log_q[log_q > 0]).any():
        raise ValueError("NaN or +inf in log_q")
    ranking = {}
    for depth, law in enumerate(log_q):
        tokens = np.lexsort((np.arange(law.size), -law))[:budget]
        ranking[depth] = [(int(t), float(law[t])) for t in tokens if law[t] > -np.inf]
    weight = {(): 0.0}
    number = {(): -1}
    waiting = []  # ascending, so the next one is at the end

    def consider(prefix, rank):
        """Queue the child of this prefix that has this rank."""
        choices = ranking.get(len(prefix), ())
        if rank < len(choices):
            token, log_p = choices[rank]
            child = weight[prefix] + log_p
            key = (child, -len(prefix), -number[prefix], -token)
            bisect.insort(waiting, (key, rank, prefix))

    consider((), 0)
    while waiting and len(number) <= budget:
        key, rank, prefix = waiting.pop()
        grown = prefix + (-key[3],)
        weight[grown] = key[0]
        number[grown] = len(number) - 1
        consider(grown, 0)
        consider(prefix, rank + 1)
    del number[()]
    nodes = list(number)
    tokens = [prefix[-1] for prefix in nodes]
    parents = [number.get(prefix[:-1], -1) for prefix in nodes]
    return np.asarray(tokens, dtype=np.int64), np.asarray(parents, dtype=np.int64)


def tree_mask(parents, prefix_len):
    parents = as_ints(parents)
    check_parents(parents)
    prefix_len = whole(prefix_len)
    visible = {-1: [*range(prefix_len + 1)]}
    for node, parent in enumerate(parents):
        visible[node] = visible[parent] + [prefix_len + 1 + node]
    mask = np.zeros((len(parents) + 1, prefix_len + 1 + len(parents)), dtype=np.bool_)
    for node, columns in visible.items():
        mask[node + 1, columns] = True
    return mask


def verify_tree(tokens, parents, choices):
    tokens, parents, choices = map(as_ints, (tokens, parents, choices))
    table = name_nodes(tokens, parents)
    if len(choices) != 1 + len(tokens):
        raise ValueError("one choice for the root and for each node")
    path = []
    at = -1
    while (at, choices[at + 1]) in table:
        at = table[at, choices[at + 1]]
        path.append(at)
    return np.array(path, dtype=np.int64), choices[at + 1]


def verify_sampled(tokens, parents, probs, uniforms):
    probs, uniforms = as_floats(probs, 2), as_floats(uniforms, 1)
    if probs.shape[0] != uniforms.shape[0]:
        raise ValueError("probs and uniforms differ in length")
    picks = []
    for law, u in zip(probs, uniforms):
        if np.isnan(law).any() or (law < 0).any() or not law.any():
            raise ValueError("not a law")
        if not (u >= 0 and u < 1):
            raise ValueError("number outside [0, 1)")
        support = np.flatnonzero(law)
        cumulative = np.add.accumulate(law[support])
        place = bisect.bisect_right(cumulative.tolist(), float(u))
        picks.append(int(support[min(place, support.size - 1)]))
    return verify_tree(tokens, parents, picks)


def compact(kv, prefix_len, path):
    kv = np.asarray(kv)
    prefix_len = whole(prefix_len)
    path = as_ints(path)
    if kv.ndim < 2:
        raise ValueError("kv needs a row axis and a column axis")
    length = kv.shape[-2]
    if length < prefix_len + 1:
        raise ValueError("the cache is shorter than its prefix and root")
    if path and (min(path) < 0 or max(path) + prefix_len + 1 >= length):
        raise ValueError("the path leaves the cache")
    answer = np.empty(kv.shape[:-2] + (prefix_len + 1 + len(path), kv.shape[-1]), dtype=kv.dtype)
    answer[..., : prefix_len + 1, :] = kv[..., : prefix_len + 1, :]
    for place, node in enumerate(path, start=prefix_len + 1):
        answer[..., place, :] = kv[..., prefix_len + 1 + node, :]
    return answer


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    prompt = tuple(index(token) for token in prompt)
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    max_new_tokens, budget = whole(max_new_tokens), whole(budget)
    tokens_out, drafted = [], []
    passes = 0
    while len(tokens_out) < max_new_tokens and eos_id not in tokens_out[-1:]:
        prefix = [*prompt, *tokens_out]
        log_q = as_floats(drafter.block(prefix), 2)
        tokens, parents = build_tree(log_q, budget)
        laws = as_floats(target.tree_log_probs([*prompt, *tokens_out], tokens, parents), 2)
        passes += 1
        if laws.shape != (1 + len(tokens), log_q.shape[1]) or laws.shape[1] < 1:
            raise ValueError("the target's answer has the wrong shape")
        if np.isnan(laws).any():
            raise ValueError("NaN in the target's answer")
        path, bonus = verify_tree(tokens, parents, [int(np.argmax(law)) for law in laws])
        for place, token in enumerate([*tokens[path].tolist(), bonus]):
            tokens_out.append(token)
            drafted.append(place < len(path))
            if token == eos_id:
                break
    tokens_out, drafted = tokens_out[:max_new_tokens], drafted[:max_new_tokens]
    return tokens_out, {"target_passes": passes, "accepted": sum(drafted)}
