"""Draft trees in NumPy: building, attention masks, verification, sampling by inversion."""

import heapq

import numpy as np


def heaviest_prefixes(log_q: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """The `budget` heaviest possible prefixes of a draft (L, V), best first: (tokens, parents).

    A child is never heavier than its parent or than its better sibling, and ties place it after
    both. A heap that holds the next sibling and the first child of every prefix taken so far
    therefore always has the next prefix on top: O(L·V + N log N) instead of V^L.
    """
    ranked = [_ranking(row, budget) for row in log_q.astype(np.float64)]
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int, float]] = []

    def offer(above: float, depth: int, parent: int, rank: int) -> None:
        if depth < len(ranked) and rank < len(ranked[depth]):
            value, token = ranked[depth][rank]
            # Ties: lower depth, lower parent, lower token. The last two fields are not compared.
            heapq.heappush(heap, (-(above + value), depth, parent, token, rank, above))

    offer(0.0, 0, -1, 0)
    while heap and len(tokens) < budget:
        negative, depth, parent, token, rank, above = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        offer(above, depth, parent, rank + 1)
        offer(-negative, depth + 1, len(tokens) - 1, 0)
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def _ranking(row: np.ndarray, count: int) -> list[tuple[float, int]]:
    """The `count` best possible (value, token) of a row, ties by lower token."""
    candidates = np.arange(row.size)
    if row.size > count > 0:
        cut = np.partition(row, row.size - count)[row.size - count]
        candidates = np.flatnonzero(row >= cut)
    candidates = candidates[row[candidates] > -np.inf]
    best = candidates[np.argsort(-row[candidates], kind="stable")[:count]]
    return list(zip(row[best].tolist(), best.tolist(), strict=True))


def chain(log_q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most likely token of every depth, one below the other."""
    tokens = log_q.argmax(axis=1) if log_q.size else np.zeros(0, dtype=np.int64)
    return tokens.astype(np.int64), np.arange(-1, len(tokens) - 1)


def fixed_width(log_q: np.ndarray, widths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Every node of depth d has the `widths[d]` most likely tokens as children; breadth first."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [-1]
    for row, width in zip(log_q, widths, strict=False):
        best = np.argsort(-row.astype(np.float64), kind="stable")[:width].tolist()
        first = len(tokens)
        for parent in level:
            tokens += best
            parents += [parent] * width
        level = list(range(first, len(tokens)))
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def ancestor_mask(parents: np.ndarray, prefix_len: int) -> np.ndarray:
    """bool (N+1, prefix_len+N+1): a row sees what its parent sees, and itself."""
    count = len(parents)
    mask = np.zeros((count + 1, prefix_len + 1 + count), dtype=bool)
    mask[0, : prefix_len + 1] = True
    for node, parent in enumerate(parents.tolist()):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, prefix_len + 1 + node] = True
    return mask


def depths(parents: np.ndarray) -> np.ndarray:
    """Depth of the root (0) and of every node: the offset of its position from the root's."""
    found = np.zeros(len(parents) + 1, dtype=np.int64)
    for node, parent in enumerate(parents.tolist()):
        found[node + 1] = found[parent + 1] + 1
    return found


def accepted_branch(
    tokens: np.ndarray, parents: np.ndarray, choices: np.ndarray
) -> tuple[list[int], int]:
    """Walk from the root to the child whose token is the target's choice while there is one.

    Row i + 1 of `choices` is the target's next token after node i. Returns the path and the bonus
    token. Subtrees of rejected nodes are never entered.
    """
    picks: list[int] = choices.tolist()
    edges = zip(parents.tolist(), tokens.tolist(), strict=True)
    children = {edge: node for node, edge in reversed(list(enumerate(edges)))}
    path: list[int] = []
    node = -1
    while (node, picks[node + 1]) in children:
        node = children[node, picks[node + 1]]
        path.append(node)
    return path, picks[node + 1]


def inverted(probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """For each row, the first token whose cumulative probability exceeds the row's number.

    If rounding leaves the total at or below the number, the last token of positive probability.
    """
    cumulative = np.cumsum(probs, axis=1, dtype=np.float64)
    picks = (cumulative <= uniforms[:, None]).sum(axis=1)
    last = probs.shape[1] - 1 - (probs[:, ::-1] > 0.0).argmax(axis=1)
    return np.asarray(np.minimum(picks, last))


def committed_rows(prefix_len: int, path: list[int]) -> list[int]:
    """Cache rows of prefix, root and path. The bonus token has no cache row yet."""
    first = prefix_len + 1
    return [*range(first), *(first + node for node in path)]
