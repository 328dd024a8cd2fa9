"""Speculative decoding with draft trees: build, mask, verify, commit, generate.

Node i of a tree carries `tokens[i]` and hangs below `parents[i]`; -1 is the root, the last
committed token. Whatever is indexed by nodes has the root in row 0 and node i in row i + 1.
"""

import heapq
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

Ints = Sequence[int] | np.ndarray


def build_tree(log_q: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """The `budget` heaviest prefixes under the product of per-position probabilities, best first.

    A child is never heavier than its parent nor than its better sibling, so a heap that holds the
    next sibling and the first child of everything taken always holds the heaviest that is left.
    """
    log_q = checked_log_q(log_q)
    budget = whole(budget, "budget", least=0)
    ranked = [ranking(row, budget) for row in log_q]
    tokens, parents, heap = [], [], []

    def offer(above: float, depth: int, parent: int, rank: int) -> None:
        """Puts the child of this rank below `parent`, whose weight is `above`, on the heap."""
        if depth < len(ranked) and rank < len(ranked[depth]):
            value, token = ranked[depth][rank]
            heapq.heappush(heap, (-(above + value), depth, parent, token, rank, above))

    offer(0.0, 0, -1, 0)
    while heap and len(tokens) < budget:
        negative, depth, parent, token, rank, above = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        offer(above, depth, parent, rank + 1)
        offer(-negative, depth + 1, len(tokens) - 1, 0)
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def ranking(row: np.ndarray, count: int) -> list[tuple[float, int]]:
    """The `count` best possible (value, token) of a row, best first, ties by lower token."""
    if row.size > count > 0:
        cut = np.partition(row, row.size - count)[row.size - count]
        candidates = np.flatnonzero(row >= cut)
    else:
        candidates = np.arange(row.size)
    candidates = candidates[row[candidates] > -np.inf]
    best = candidates[np.argsort(-row[candidates], kind="stable")[:count]]
    return list(zip(row[best].tolist(), best.tolist(), strict=True))


def tree_mask(parents: Ints, prefix_len: int) -> np.ndarray:
    """Who sees whom, bool (N+1, prefix_len+N+1): prefix, root, own ancestors, and oneself."""
    parents = checked_parents(parents)
    prefix_len = whole(prefix_len, "prefix_len", least=0)
    count = len(parents)
    mask = np.zeros((count + 1, prefix_len + 1 + count), dtype=bool)
    mask[0, : prefix_len + 1] = True
    for node, parent in enumerate(parents):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, prefix_len + 1 + node] = True
    return mask


def verify_tree(tokens: Ints, parents: Ints, choices: Ints) -> tuple[list[int], int]:
    """Follows the target's picks down from the root for as long as the tree has them."""
    parents = checked_parents(parents)
    tokens = checked_ints(tokens, len(parents), "tokens")
    choices = checked_ints(choices, len(parents) + 1, "choices")
    children = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault((parent, token), node)
    path = []
    node = -1
    while (node, choices[node + 1]) in children:
        node = children[node, choices[node + 1]]
        path.append(node)
    return path, choices[node + 1]


def verify_sampled(
    tokens: Ints, parents: Ints, probs: np.ndarray, uniforms: np.ndarray
) -> tuple[list[int], int]:
    """Verification against one sample a row: what comes out follows the target's law exactly."""
    probs = checked_probs(probs)
    uniforms = checked_uniforms(uniforms, len(probs))
    choices = [pick(row, uniform) for row, uniform in zip(probs, uniforms, strict=True)]
    return verify_tree(tokens, parents, choices)


def pick(row: np.ndarray, uniform: float) -> int:
    """The first token whose cumulative probability exceeds `uniform`, by inverting the law."""
    exceeding = np.flatnonzero(np.cumsum(row) > uniform)
    if exceeding.size:
        return int(exceeding[0])
    # Rounding left the total at or below `uniform`: the last token that is possible at all.
    return int(np.flatnonzero(row > 0.0)[-1])


def compact(kv: np.ndarray, prefix_len: int, path: Iterable[int]) -> np.ndarray:
    """The committed rows of a cache (..., prefix_len+N+1, D): prefix, root, path."""
    kv = np.asarray(kv)
    if kv.dtype.kind != "f" or kv.ndim < 2:
        raise TypeError(f"kv must be a floating array (..., rows, D), not {kv.dtype} {kv.shape}")
    prefix_len = whole(prefix_len, "prefix_len", least=0)
    first = prefix_len + 1
    nodes = [whole(node, "a node of the path", least=0) for node in path]
    rows = [*range(first), *(first + node for node in nodes)]
    if max(rows) >= kv.shape[-2]:
        raise ValueError(f"row {max(rows)} is outside a cache of {kv.shape[-2]} rows")
    return kv[..., rows, :]


def generate(
    target: Any,
    drafter: Any,
    prompt: Iterable[int],
    *,
    max_new_tokens: int,
    eos_id: int,
    budget: int,
) -> tuple[list[int], dict[str, int]]:
    """The target's greedy continuation of the prompt, several tokens a pass where it can."""
    prefix = [whole(token, "a prompt's token", least=0) for token in prompt]
    limit = whole(max_new_tokens, "max_new_tokens", least=0)
    eos_id = whole(eos_id, "eos_id", least=0)
    budget = whole(budget, "budget", least=0)
    if not prefix:
        raise ValueError("the prompt must have at least one token: the root")
    output = []
    passes = accepted = 0
    while len(output) < limit and eos_id not in output[-1:]:
        block = drafter.block(prefix + output)
        tokens, parents = build_tree(block, budget)
        answer = target.tree_log_probs(prefix + output, tokens, parents)
        passes += 1
        choices = best_tokens(answer, len(tokens) + 1, np.shape(block)[1])
        path, bonus = verify_tree(tokens, parents, choices)
        drafted = [int(tokens[node]) for node in path]
        fresh = until_end([*drafted, bonus], eos_id)[: limit - len(output)]
        accepted += min(len(drafted), len(fresh))
        output += fresh
    return output, {"target_passes": passes, "accepted": accepted}


def until_end(tokens: list[int], eos_id: int) -> list[int]:
    """The tokens up to and including the first end."""
    return tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens


def best_tokens(answer: Any, rows: int, vocabulary: int) -> np.ndarray:
    """The target's greedy pick of every row; a tie goes to the lower token."""
    log_probs = np.asarray(answer)
    if log_probs.ndim != 2 or log_probs.shape[0] != rows:
        raise ValueError(f"tree_log_probs answered shape {log_probs.shape} for {rows} rows")
    if log_probs.shape[1] != vocabulary:
        raise ValueError(f"tree_log_probs answered {log_probs.shape[1]} tokens of {vocabulary}")
    if log_probs.dtype.kind != "f":
        raise TypeError(f"tree_log_probs answered {log_probs.dtype}, not floating numbers")
    if np.isnan(log_probs).any():
        raise ValueError("tree_log_probs answered NaN")
    return log_probs.argmax(axis=1)


def checked_log_q(log_q: Any) -> np.ndarray:
    """The draft in float64, or an error that says what is wrong with it."""
    log_q = np.asarray(log_q)
    if log_q.dtype.kind != "f":
        raise TypeError(f"log_q must be floating, not {log_q.dtype}")
    if log_q.ndim != 2:
        raise ValueError(f"log_q must be (L, V), not {log_q.shape}")
    if np.isnan(log_q).any() or np.isposinf(log_q).any():
        raise ValueError("log_q holds NaN or +inf")
    return log_q.astype(np.float64)


def checked_parents(parents: Ints) -> list[int]:
    """Parents as a list; each must be the root or a node before its child."""
    values = checked_ints(parents, None, "parents")
    for node, parent in enumerate(values):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} hangs below {parent}, which does not come before it")
    return values


def checked_ints(values: Ints, count: int | None, name: str) -> list[int]:
    """A one-dimensional integer array as a list of ints, of the length asked for."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.ndim != 1 or (count is not None and array.size != count):
        raise ValueError(f"{name} must have shape ({count},), not {array.shape}")
    return array.tolist()


def checked_probs(probs: Any) -> np.ndarray:
    """The target's laws in float64, or an error that says what is wrong with them."""
    probs = np.asarray(probs)
    if probs.dtype.kind != "f":
        raise TypeError(f"probs must be floating, not {probs.dtype}")
    if probs.ndim != 2:
        raise ValueError(f"probs must be (N+1, V), not {probs.shape}")
    if not (probs >= 0.0).all() or not (probs.max(axis=1) > 0.0).all():
        raise ValueError("every row of probs must be a law: nothing negative, something positive")
    return probs.astype(np.float64)


def checked_uniforms(uniforms: Any, rows: int) -> list[float]:
    """One number in [0, 1) for each row."""
    uniforms = np.asarray(uniforms)
    if uniforms.dtype.kind != "f":
        raise TypeError(f"uniforms must be floating, not {uniforms.dtype}")
    if uniforms.shape != (rows,):
        raise ValueError(f"uniforms must have shape ({rows},), not {uniforms.shape}")
    if not ((uniforms >= 0.0) & (uniforms < 1.0)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    return uniforms.tolist()


def whole(value: Any, name: str, *, least: int) -> int:
    """The value as an int, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return int(value)
