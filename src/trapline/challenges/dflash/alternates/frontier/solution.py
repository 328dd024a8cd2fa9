"""Tree decoding with a plain frontier: a sorted list of all that could come next.

Nodes are objects that know their parent and children; arrays are made only at the boundary.
"""

import math
from bisect import insort

import numpy as np


class Node:
    """One node of a draft tree; the root has no token."""

    def __init__(self, index, token, parent):
        self.index, self.token, self.parent = index, token, parent
        self.children = {}

    def lineage(self):
        """Indices from the top of the tree down to this node."""
        return [] if self.parent is None else [*self.parent.lineage(), self.index]


def _nodes(tokens, parents):
    parents = _integers(parents)
    tokens = [0] * len(parents) if tokens is None else _integers(tokens)
    if len(tokens) != len(parents):
        raise ValueError("tokens and parents differ in length")
    nodes = [Node(-1, None, None)]
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent < -1 or parent >= index:
            raise ValueError(f"parent {parent} of node {index} does not come before it")
        node = Node(index, token, nodes[parent + 1])
        node.parent.children.setdefault(token, node)
        nodes.append(node)
    return nodes


def build_tree(log_q, budget):
    """Takes the first of a sorted frontier and puts all its children in, `budget` times."""
    log_q = np.asarray(log_q)
    if log_q.ndim != 2 or not np.issubdtype(log_q.dtype, np.floating):
        raise ValueError("log_q must be a float array (L, V)")
    if np.isnan(log_q).any() or (log_q == np.inf).any():
        raise ValueError("log_q must hold log-probabilities")
    budget = _natural(budget)
    rows = [sorted((-float(v), t) for t, v in enumerate(row))[:budget] for row in log_q.tolist()]
    frontier, tokens, parents = [], [], []

    def open_up(negative, depth, index):
        for cost, token in rows[depth] if depth < len(rows) else []:
            if cost < math.inf:
                insort(frontier, (negative + cost, depth, index, token))
        del frontier[max(budget - len(tokens), 0) :]

    open_up(0.0, 0, -1)
    while frontier and len(tokens) < budget:
        negative, depth, parent, token = frontier.pop(0)
        tokens.append(token)
        parents.append(parent)
        open_up(negative, depth + 1, len(tokens) - 1)
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def tree_mask(parents, prefix_len):
    nodes, prefix_len = _nodes(None, parents), _natural(prefix_len)
    mask = np.zeros((len(nodes), prefix_len + len(nodes)), dtype=bool)
    for row, node in enumerate(nodes):
        seen = [*range(prefix_len + 1), *(prefix_len + 1 + index for index in node.lineage())]
        mask[row, seen] = True
    return mask


def verify_tree(tokens, parents, choices):
    nodes, choices = _nodes(tokens, parents), _integers(choices)
    if len(choices) != len(nodes):
        raise ValueError("one choice a row is needed")

    def walk(node):
        child = node.children.get(choices[node.index + 1])
        return node if child is None else walk(child)

    last = walk(nodes[0])
    return last.lineage(), choices[last.index + 1]


def verify_sampled(tokens, parents, probs, uniforms):
    probs, uniforms = np.asarray(probs), np.asarray(uniforms)
    if probs.ndim != 2 or not np.issubdtype(probs.dtype, np.floating):
        raise ValueError("probs must be a float array (N+1, V)")
    if uniforms.shape != probs.shape[:1] or not np.issubdtype(uniforms.dtype, np.floating):
        raise ValueError("one uniform a row is needed")
    if np.isnan(probs).any() or (probs < 0).any() or not (probs > 0).any(axis=1).all():
        raise ValueError("probs must be laws")
    if not all(0.0 <= u < 1.0 for u in uniforms):
        raise ValueError("uniforms lie in [0, 1)")
    choices = [_drawn(row, u) for row, u in zip(probs.tolist(), uniforms.tolist(), strict=True)]
    return verify_tree(tokens, parents, choices)


def _drawn(row, uniform):
    total, last = 0.0, 0
    for token, probability in enumerate(row):
        if probability > 0.0:
            total, last = total + probability, token
            if total > uniform:
                break
    return last


def compact(kv, prefix_len, path):
    kv = np.asarray(kv)
    if kv.ndim < 2 or not np.issubdtype(kv.dtype, np.floating):
        raise ValueError("kv must be a float array (..., rows, D)")
    first = _natural(prefix_len) + 1
    rows = list(range(first)) + [first + _natural(node) for node in path]
    if any(row >= kv.shape[-2] for row in rows):
        raise ValueError("a row lies outside the cache")
    kept = np.empty((*kv.shape[:-2], len(rows), kv.shape[-1]), dtype=kv.dtype)
    for place, row in enumerate(rows):
        kept[..., place, :] = kv[..., row, :]
    return kept


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    history = _integers(list(prompt))
    start = len(history)
    if not start:
        raise ValueError("an empty prompt has no root")
    limit, budget = _natural(max_new_tokens), _natural(budget)
    stats = {"target_passes": 0, "accepted": 0}
    while len(history) - start < limit:
        draft = np.asarray(drafter.block(list(history)))
        tokens, parents = build_tree(draft, budget)
        rows = np.asarray(target.tree_log_probs(list(history), tokens, parents))
        stats["target_passes"] += 1
        if not np.issubdtype(rows.dtype, np.floating):
            raise ValueError("tree_log_probs must answer floating numbers")
        if rows.shape != (len(tokens) + 1, draft.shape[1]) or np.isnan(rows).any():
            raise ValueError("tree_log_probs must answer (N+1, V) numbers")
        path, bonus = verify_tree(tokens, parents, [row.index(max(row)) for row in rows.tolist()])
        for node in [*path, None]:
            history.append(bonus if node is None else int(tokens[node]))
            stats["accepted"] += node is not None
            if history[-1] == eos_id or len(history) - start == limit:
                break
        if history[-1] == eos_id:
            break
    return history[start:], stats


def _integers(values):
    values = np.asarray(values)
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise ValueError("integers in one dimension are needed")
    return [int(value) for value in values]


def _natural(value):
    if isinstance(value, float) or int(value) != value or value < 0:
        raise ValueError("a whole number of at least 0 is needed")
    return int(value)
