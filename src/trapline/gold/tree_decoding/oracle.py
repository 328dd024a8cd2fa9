"""Tree decoding in its most literal form: every prefix is enumerated.

L depths, V vocabulary, N nodes. Node i of a tree is `tokens[i]` below node `parents[i]`; −1 is the
root, the last committed token. In arrays with one row per node, row 0 belongs to the root and row
i + 1 to node i.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

#: Log-probabilities (V,) of every next token after a prefix.
Law = Callable[[tuple[int, ...]], np.ndarray]
#: Log-probabilities (L, V) of the next L tokens after a prefix, position by position.
Draft = Callable[[tuple[int, ...]], np.ndarray]


class Decoded(NamedTuple):
    """What `generate` must return, and the prefix of each pass."""

    tokens: list[int]
    target_passes: int
    accepted: int
    prefixes: list[tuple[int, ...]]


def all_prefixes(log_q: np.ndarray) -> dict[tuple[int, ...], float]:
    """Every prefix of non-zero probability of every depth, with its log-probability."""
    weights: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for row in log_q.tolist():
        longer = {
            (*prefix, token): weight + value
            for prefix, weight in level.items()
            for token, value in enumerate(row)
        }
        level = {prefix: weight for prefix, weight in longer.items() if weight > -math.inf}
        weights |= level
    return weights


def build_tree(log_q: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """The `budget` likeliest prefixes, added one after the other.

    A prefix is never likelier than its parent, so the likeliest remaining one has its parent in
    the tree already. Ties: lower depth, lower parent, lower token.
    """
    tokens, parents = _built(log_q.tobytes(), log_q.dtype.str, log_q.shape, budget)
    return tokens.copy(), parents.copy()


@lru_cache(maxsize=2048)
def _built(
    values: bytes, dtype: str, shape: tuple[int, ...], budget: int
) -> tuple[np.ndarray, np.ndarray]:
    """Built once: a check compares many answers with the trees of the same drafts."""
    return _heaviest(all_prefixes(np.ndarray(shape, dtype, values)), budget)


def _heaviest(weights: dict[tuple[int, ...], float], budget: int) -> tuple[np.ndarray, np.ndarray]:
    left = dict(weights)
    index: dict[tuple[int, ...], int] = {(): -1}
    parents: list[int] = []
    while left and len(parents) < budget:
        reachable = [prefix for prefix in left if prefix[:-1] in index]
        best = min(reachable, key=lambda p: (-left[p], len(p), index[p[:-1]], p[-1]))
        index[best] = len(parents)
        parents.append(index[best[:-1]])
        del left[best]
    chosen = list(index)[1:]
    tokens = [prefix[-1] for prefix in chosen]
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The nodes on the path from the root (excluded) to `node` (included)."""
    path: list[int] = []
    while node != -1:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def tree_mask(parents: Sequence[int], prefix_len: int) -> np.ndarray:
    """(N+1, prefix_len+N+1), True where a row sees a column; columns are prefix, root, nodes."""
    count = len(parents)
    mask = np.zeros((count + 1, prefix_len + count + 1), dtype=bool)
    mask[0, : prefix_len + 1] = True
    for node in range(count):
        mask[node + 1, : prefix_len + 1] = True
        for seen in ancestors(parents, node):
            mask[node + 1, prefix_len + 1 + seen] = True
    return mask


def verify_tree(
    tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]
) -> tuple[list[int], int]:
    """Accepts a node if every token on its path is the target's choice; path and bonus token."""
    accepted = [
        node
        for node in range(len(tokens))
        if all(tokens[n] == choices[parents[n] + 1] for n in ancestors(parents, node))
    ]
    path = sorted(accepted, key=lambda node: len(ancestors(parents, node)))
    last = path[-1] if path else -1
    return path, int(choices[last + 1])


def pick(probabilities: np.ndarray, uniform: float) -> int:
    """The first token whose cumulative probability exceeds `uniform`; never an impossible one."""
    cumulative = 0.0
    possible = [token for token, p in enumerate(probabilities.tolist()) if p > 0.0]
    for token in possible:
        cumulative += float(probabilities[token])
        if cumulative > uniform:
            return token
    return possible[-1]


def verify_sampled(
    tokens: Sequence[int], parents: Sequence[int], probs: np.ndarray, uniforms: Sequence[float]
) -> tuple[list[int], int]:
    """Verification against one sample of the target per row."""
    choices = [pick(row, float(u)) for row, u in zip(probs, uniforms, strict=True)]
    return verify_tree(tokens, parents, choices)


def compact(kv: np.ndarray, prefix_len: int, path: Sequence[int]) -> np.ndarray:
    """The rows to keep: prefix, root, and the nodes of the path in order."""
    rows = [kv[..., row, :] for row in range(prefix_len + 1)]
    rows += [kv[..., prefix_len + 1 + node, :] for node in path]
    return np.stack(rows, axis=-2)


def greedy(law: Law, prompt: Sequence[int], max_new_tokens: int, eos_id: int) -> list[int]:
    """Plain decoding of the target, one token a pass; a tie goes to the lower token."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and eos_id not in tokens:
        tokens.append(int(np.argmax(law((*prompt, *tokens)))))
    return tokens


def generate(
    law: Law,
    draft: Draft,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_id: int,
    budget: int,
) -> Decoded:
    """Round by round: the output is that of the target; drafts only change the number of passes."""
    output = greedy(law, prompt, max_new_tokens, eos_id)
    done = accepted = 0
    prefixes: list[tuple[int, ...]] = []
    while done < len(output):
        prefix = (*prompt, *output[:done])
        prefixes.append(prefix)
        tokens, parents = build_tree(draft(prefix), budget)
        drafted = _longest_branch(tokens, parents, output[done:])
        accepted += drafted
        # Each pass also gives the target's choice at the last accepted node.
        done = min(done + drafted + 1, len(output))
    return Decoded(output, len(prefixes), accepted, prefixes)


def _longest_branch(tokens: np.ndarray, parents: np.ndarray, continuation: list[int]) -> int:
    """Number of tokens of the continuation that are a branch of the tree."""
    branches = {
        tuple(int(tokens[n]) for n in ancestors(parents.tolist(), node))
        for node in range(len(tokens))
    }
    lengths = [n for n in range(1, len(continuation) + 1) if tuple(continuation[:n]) in branches]
    return max(lengths, default=0)


class Chance(Protocol):
    """The source of randomness of a verifier: a test enumerates it, a program draws it."""

    def coin(self, node: int, probability: float) -> bool:
        """Whether this node is accepted: True with this probability."""

    def draw(self, law: np.ndarray) -> int:
        """A token drawn from this distribution."""


def verify_rejection(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft: np.ndarray,
    target: np.ndarray,
    chance: Chance,
    *,
    replacement: bool,
) -> tuple[list[int], int]:
    """Lossless verification of a tree whose nodes were *drawn*: multi-round rejection.

    Row 0 of `draft` and `target` (N+1, V) belongs to the root: the distribution q from which its
    children were drawn, in the order of the arrays, and the target's distribution p. A child x is
    accepted with probability min(1, p(x) / q(x)); after a rejection p becomes (p − q)⁺, normalised.
    Without replacement, q excludes the earlier siblings. The bonus token is drawn from the p of
    the last accepted node.
    """
    path: list[int] = []
    node = -1
    while True:
        left, law = target[node + 1].astype(np.float64), draft[node + 1].astype(np.float64)
        below = None
        for child in (n for n in range(len(tokens)) if parents[n] == node):
            x = tokens[child]
            odds = left[x] / law[x] if law[x] > 0.0 else float(left[x] > 0.0)
            if chance.coin(child, min(1.0, float(odds))):
                below = child
                break
            left = _scaled(np.maximum(left - law, 0.0), left)
            if not replacement:
                law = _scaled(np.where(np.arange(len(law)) == x, 0.0, law), law)
        if below is None:
            return path, chance.draw(left)
        path.append(below)
        node = below


def _scaled(law: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Normalised; `otherwise` if rounding left only zeros."""
    total = float(law.sum())
    return np.asarray(law / total) if total > 0.0 else otherwise
