"""Draft trees at the public boundary: what is accepted, and what comes back.

Node i of a tree carries `tokens[i]` and hangs below `parents[i]`; −1 is the root, the last
committed token. Of whatever has N+1 rows, row 0 belongs to the root and row i + 1 to node i.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trapline.gold import checks
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.tree_decoding import tree, verify

_NO_LIMIT = 2**62


class Tree(NamedTuple):
    """A draft tree, heaviest node first."""

    tokens: np.ndarray  # (N,) int64
    parents: np.ndarray  # (N,) int64, -1 for the root


class Verified(NamedTuple):
    """What the target accepts."""

    path: list[int]  # node indices from the root downwards
    bonus: int  # the target's own next token


def build_tree(log_q: Any, budget: int) -> Tree:
    """The `budget` heaviest prefixes of a draft `log_q` (L, V), row d for depth d + 1."""
    log_q = np.asarray(log_q)
    checks.floating(*checks.LOW_FLOATS, log_q=log_q)
    checks.axes(log_q=(log_q, "L V"))
    checks.integer_between(0, _NO_LIMIT, budget=budget)
    if not (log_q < np.inf).all():
        raise RangeError("log_q holds NaN or +inf")
    return Tree(*tree.heaviest_prefixes(log_q, int(budget)))


def tree_mask(parents: Any, prefix_len: int) -> np.ndarray:
    """Who sees whom, bool (N+1, prefix_len+N+1); columns are prefix, root, nodes."""
    checks.integer_between(0, _NO_LIMIT, prefix_len=prefix_len)
    return tree.ancestor_mask(_parents(parents), int(prefix_len))


def verify_tree(tokens: Any, parents: Any, choices: Any) -> Verified:
    """The branch of which every token is the target's pick; `choices` (N+1,) are its picks."""
    parents = _parents(parents)
    tokens = _integers("tokens", tokens, len(parents))
    choices = _integers("choices", choices, len(parents) + 1)
    return Verified(*verify.accepted_branch(tokens, parents, choices))


def verify_sampled(tokens: Any, parents: Any, probs: Any, uniforms: Any) -> Verified:
    """Verification against one sample a row: probs (N+1, V), uniforms (N+1,) in [0, 1)."""
    probs, uniforms = np.asarray(probs), np.asarray(uniforms)
    checks.floating(*checks.LOW_FLOATS, probs=probs)
    checks.axes(probs=(probs, "rows V"), uniforms=(uniforms, "rows"))
    if not (probs >= 0.0).all() or not (probs > 0.0).any(axis=1).all():
        raise RangeError("every row of probs must be a law: nothing negative, something positive")
    if not ((uniforms >= 0.0) & (uniforms < 1.0)).all():
        raise RangeError("uniforms must lie in [0, 1)")
    return verify_tree(tokens, parents, verify.inverted(probs, uniforms))


def compact(kv: Any, prefix_len: int, path: Sequence[int]) -> Any:
    """The committed rows of a cache (..., prefix_len+N+1, D): prefix, root, path."""
    checks.arrays(kv=kv)
    if len(kv.shape) < 2:
        raise ShapeError(f"kv must have axes (... rows D), got shape {tuple(kv.shape)}")
    checks.integer_between(0, int(kv.shape[-2]) - 1, prefix_len=prefix_len)
    nodes = [int(node) for node in path]
    drafted = int(kv.shape[-2]) - prefix_len - 1
    for node in nodes:
        checks.integer_between(0, drafted - 1, node=node)
    return kv[..., verify.committed_rows(int(prefix_len), nodes), :]


def _integers(name: str, values: Any, count: int | None = None) -> np.ndarray:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise DTypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 1 or (count is not None and array.size != count):
        raise ShapeError(
            f"{name} must have shape ({'N' if count is None else count},), got {array.shape}"
        )
    return array.astype(np.int64)


def _parents(values: Any) -> np.ndarray:
    parents = _integers("parents", values)
    wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
    if wrong.size:
        node = int(wrong[0])
        raise RangeError(f"node {node} hangs below {parents[node]}, which is not before it")
    return parents
