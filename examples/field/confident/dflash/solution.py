"""DFlash / DDTree speculative decoding: optimal draft trees, tree attention, lossless verification.

Key design decisions
--------------------
* Best-first tree construction with a binary heap: O(N log N).
* Tree attention mask computed in a single pass over the parents.
* Depth-indexed verification: the logits after accepting ``d`` tokens decide about depth ``d + 1``.
* Rejection sampling for temperature > 0.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DraftTree:
    """A draft tree with depth information."""

    tokens: np.ndarray
    parents: np.ndarray

    @property
    def depths(self) -> np.ndarray:
        depths = np.zeros(len(self.tokens), dtype=np.int64)
        for node, parent in enumerate(self.parents):
            depths[node] = 0 if parent < 0 else depths[parent] + 1
        return depths


def build_tree(log_q: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-first construction of the optimal draft tree."""
    log_q = np.asarray(log_q)
    if log_q.ndim != 2:
        raise ValueError("log_q must be two-dimensional")
    if budget < 0:
        raise ValueError("budget must not be negative")
    depth_count, vocabulary = log_q.shape
    order = np.argsort(-log_q, axis=1)
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, float]] = []
    if depth_count:
        heap.append((-float(log_q[0, order[0, 0]]), -1, 0, 0, 0.0))
    while heap and len(tokens) < budget:
        negative, parent, depth, rank, base = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(int(order[depth, rank]))
        parents.append(parent)
        if rank + 1 < vocabulary:
            weight = base + float(log_q[depth, order[depth, rank + 1]])
            heapq.heappush(heap, (-weight, parent, depth, rank + 1, base))
        if depth + 1 < depth_count:
            weight = -negative + float(log_q[depth + 1, order[depth + 1, 0]])
            heapq.heappush(heap, (-weight, node, depth + 1, 0, -negative))
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def tree_mask(parents: np.ndarray, prefix_len: int) -> np.ndarray:
    """Tree attention mask: prefix, root, ancestors, self."""
    count = len(parents)
    mask = np.zeros((count + 1, prefix_len + count + 1), dtype=bool)
    mask[:, : prefix_len + 1] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node + 1] |= mask[parent + 1]
        mask[node + 1, prefix_len + 1 + node] = True
    return mask


def verify_tree(tokens, parents, choices):
    """Accepts the longest matching branch; logits are indexed by depth."""
    tree = DraftTree(np.asarray(tokens), np.asarray(parents))
    choices = np.asarray(choices)
    depths = tree.depths
    path: list[int] = []
    last = -1
    depth = 0
    while True:
        # All nodes of one depth are decided by the same position of the target.
        wanted = choices[depth] if depth < len(choices) else -1
        matches = [
            node
            for node in range(len(tree.tokens))
            if depths[node] == depth and tree.parents[node] == last and tree.tokens[node] == wanted
        ]
        if not matches:
            break
        last = matches[0]
        path.append(last)
        depth += 1
    return path, int(choices[last + 1])


def verify_sampled(tokens, parents, probs, uniforms):
    """Rejection sampling over the tree: a child is accepted with its target probability."""
    tokens, parents = np.asarray(tokens), np.asarray(parents)
    probs, uniforms = np.asarray(probs), np.asarray(uniforms)
    path: list[int] = []
    current = -1
    while True:
        children = [node for node in range(len(tokens)) if parents[node] == current]
        accepted = None
        for child in children:
            if uniforms[child + 1] < probs[current + 1, tokens[child]]:
                accepted = child
                break
        if accepted is None:
            break
        path.append(accepted)
        current = accepted
    cumulative = np.cumsum(probs[current + 1])
    bonus = int(np.searchsorted(cumulative, uniforms[current + 1]))
    return path, min(bonus, probs.shape[1] - 1)


def compact(kv: np.ndarray, prefix_len: int, path) -> np.ndarray:
    """Keeps the prefix, the root and the accepted path."""
    rows = np.concatenate([np.arange(prefix_len + 1), prefix_len + 1 + np.array(path, dtype=int)])
    return np.take(kv, rows, axis=-2)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """Greedy speculative generation."""
    if not len(prompt):
        raise ValueError("empty prompt")
    output: list[int] = []
    passes = accepted = 0
    while len(output) < max_new_tokens:
        prefix = list(prompt) + output
        tokens, parents = build_tree(drafter.block(prefix), budget)
        log_probs = target.tree_log_probs(prefix, tokens, parents)
        passes += 1
        path, bonus = verify_tree(tokens, parents, np.argmax(log_probs, axis=1))
        accepted += len(path)
        output += [int(tokens[node]) for node in path] + [bonus]
        if eos_id in output:
            output = output[: output.index(eos_id) + 1]
            break
    return output[:max_new_tokens], {"target_passes": passes, "accepted": accepted}
