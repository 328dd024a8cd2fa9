"""Verification by parents, sampling by inversion, and the rows of a cache that stay."""

import numpy as np


def accepted_branch(
    tokens: np.ndarray, parents: np.ndarray, choices: np.ndarray
) -> tuple[list[int], int]:
    """Walks from the root to the child with the target's pick for as long as there is one.

    Row i + 1 of `choices` says what follows node i, wherever node i stands in the arrays. A
    rejected node's subtree is never entered, so nothing needs to be marked.
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
    """Per row the first token whose cumulative probability exceeds the row's number.

    Where rounding leaves the total at or below the number it is the last possible token.
    """
    cumulative = np.cumsum(probs, axis=1, dtype=np.float64)
    picks = (cumulative <= uniforms[:, None]).sum(axis=1)
    last = probs.shape[1] - 1 - (probs[:, ::-1] > 0.0).argmax(axis=1)
    return np.asarray(np.minimum(picks, last))


def committed_rows(prefix_len: int, path: list[int]) -> list[int]:
    """Prefix, root, and the path's nodes: everything but the bonus, which has no row yet."""
    first = prefix_len + 1
    return [*range(first), *(first + node for node in path)]
