"""Draft trees: the public functions, their checks, and the choice of an implementation.

Node i of a tree carries `tokens[i]` and is a child of `parents[i]`; −1 is the root, the last
committed token. In every argument with N+1 rows, row 0 belongs to the root and row i + 1 to node i.

NumPy arrays give NumPy arrays. Torch tensors give tensors whose size does not depend on values, so
nothing waits for the device: trees are padded with nodes of token −1 below the root, paths with −1.
Tensors may have a batch axis in front.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trapline.gold import checks
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.tree_decoding import numpy_tree, oracle

_NO_LIMIT = 2**62


class Tree(NamedTuple):
    """A draft tree, heaviest node first."""

    tokens: Any  # (N,) int64
    parents: Any  # (N,) int64, -1 for the root


class Verified(NamedTuple):
    """The accepted path and the target's next token."""

    path: Any  # node indices from the root downwards; a list, or a tensor padded with -1
    bonus: Any  # the target's own next token


def build_tree(log_q: Any, budget: int) -> Tree:
    """The `budget` heaviest prefixes of a draft; row d of `log_q` (L, V) is for depth d + 1."""
    checks.integer_between(1, _NO_LIMIT, budget=budget)
    if _is_tensor(log_q):
        rows = _batch(_draft_tensor(log_q), 3)
        return Tree(*_like(log_q, 3, _heaviest_prefixes(rows, int(budget))))
    return Tree(*numpy_tree.heaviest_prefixes(_draft(log_q), int(budget)))


def _heaviest_prefixes(log_q: Any, budget: int) -> tuple[Any, Any]:
    if log_q.is_cuda:
        from trapline.gold.tree_decoding.triton import tree

        return tree.heaviest_prefixes(log_q, budget)
    from trapline.gold.tree_decoding import reference

    return reference.heaviest_prefixes(log_q, budget)


def chain_tree(log_q: Any) -> Tree:
    """The most likely token of every depth as a single branch (chain drafting)."""
    if _is_tensor(log_q):
        from trapline.gold.tree_decoding import reference

        return Tree(*_like(log_q, 3, reference.chain(_batch(_draft_tensor(log_q), 3))))
    return Tree(*numpy_tree.chain(_draft(log_q)))


def wide_tree(log_q: Any, widths: Sequence[int]) -> Tree:
    """A tree in which each node of depth d has the `widths[d]` most likely tokens as children."""
    shape = log_q.shape if _is_tensor(log_q) else _draft(log_q).shape
    if len(widths) > shape[-2]:
        raise RangeError(f"got {len(widths)} widths, but the draft has {shape[-2]} depths")
    for width in widths:
        checks.integer_between(1, int(shape[-1]), width=width)
    if _is_tensor(log_q):
        from trapline.gold.tree_decoding import reference

        rows = _batch(_draft_tensor(log_q), 3)
        return Tree(*_like(log_q, 3, reference.fixed_width(rows, tuple(widths))))
    return Tree(*numpy_tree.fixed_width(_draft(log_q), tuple(widths)))


def tree_mask(parents: Any, prefix_len: int) -> Any:
    """The attention mask, bool (N+1, prefix_len+N+1); columns are prefix, root, nodes."""
    checks.integer_between(0, _NO_LIMIT, prefix_len=prefix_len)
    if _is_tensor(parents):
        from trapline.gold.tree_decoding import reference

        seen = reference.ancestors(_batch(parents, 2))
        prefix = seen.new_ones((*seen.shape[:2], int(prefix_len)))
        mask = sys.modules["torch"].cat((prefix, seen), dim=-1)
        return mask if parents.ndim == 2 else mask[0]
    return numpy_tree.ancestor_mask(_parents(parents), int(prefix_len))


def verify_tree(tokens: Any, parents: Any, choices: Any) -> Verified:
    """The branch on which every token is the target's choice; `choices` (N+1,) are its tokens."""
    if _is_tensor(tokens):
        from trapline.gold.tree_decoding import reference

        rows, hang = _batch(tokens, 2), _batch(parents, 2)
        checks.axes(tokens=(rows, "R N"), parents=(hang, "R N"))
        picks = _batch(choices, 2)
        checks.axes(choices=(picks, "R rows"), tokens=(rows, "R N"))
        if picks.shape[1] != rows.shape[1] + 1:
            raise ShapeError(
                f"choices must have one entry for the root and one for each of "
                f"{rows.shape[1]} nodes, got {picks.shape[1]}"
            )
        seen = reference.ancestors(hang)
        done = reference.accepted_branch(rows, hang, seen, picks, int(rows.shape[1]))
        return Verified(*_like(tokens, 2, (done.path, done.bonus)))
    parents = _parents(parents)
    tokens = _integers("tokens", tokens, len(parents))
    choices = _integers("choices", choices, len(parents) + 1)
    return Verified(*numpy_tree.accepted_branch(tokens, parents, choices))


def verify_sampled(tokens: Any, parents: Any, probs: Any, uniforms: Any) -> Verified:
    """`verify_tree` against one sample of each row: probs (N+1, V), uniforms (N+1,) in [0, 1)."""
    if _is_tensor(tokens):
        from trapline.gold.tree_decoding import reference

        checks.axes(probs=(probs, "... rows V"), uniforms=(uniforms, "... rows"))
        return verify_tree(tokens, parents, reference.inverted(probs, uniforms))
    probs, uniforms = _distributions(probs=probs), _numbers(uniforms)
    checks.axes(probs=(probs, "rows V"), uniforms=(uniforms, "rows"))
    return verify_tree(tokens, parents, numpy_tree.inverted(probs, uniforms))


def verify_rejection(
    tokens: Any,
    parents: Any,
    draft: Any,
    target: Any,
    uniforms: Any,
    *,
    replacement: bool = False,
) -> Verified:
    """Lossless verification of a tree that was *sampled* from a drafter: multi-round rejection.

    Rows of `draft` and `target` (N+1, V) are the distributions after root and nodes. The children
    of a node must have been drawn from its draft distribution one after another, in the order of
    the arrays; `replacement` says whether a token could be drawn twice. uniforms (N+1,): row i + 1
    decides node i, row 0 draws the bonus.
    """
    if _is_tensor(tokens):
        from trapline.gold.tree_decoding import reference

        rows, hang = _batch(tokens, 2), _batch(parents, 2)
        done = reference.rejection_branch(
            rows,
            hang,
            _batch(draft, 3),
            _batch(target, 3),
            _batch(uniforms, 2),
            replacement=replacement,
            longest=int(rows.shape[1]),
        )
        return Verified(*_like(tokens, 2, (done.path, done.bonus)))
    parents = _parents(parents)
    nodes = _integers("tokens", tokens, len(parents))
    draft, target = _distributions(draft=draft), _distributions(target=target)
    uniforms = _numbers(uniforms)
    checks.axes(draft=(draft, "rows V"), target=(target, "rows V"), uniforms=(uniforms, "rows"))
    if len(uniforms) != len(parents) + 1:
        raise ShapeError(
            f"draft, target and uniforms must have {len(parents) + 1} rows, one for the root and "
            f"one for each node, got {len(uniforms)}"
        )
    if nodes.size and not 0 <= nodes.min() <= nodes.max() < draft.shape[1]:
        raise RangeError(
            f"tokens must lie between 0 and {draft.shape[1] - 1}, "
            f"got {nodes.min()} to {nodes.max()}"
        )
    chance = _Uniforms(uniforms)
    both = nodes.tolist(), parents.tolist()
    return Verified(*oracle.verify_rejection(*both, draft, target, chance, replacement=replacement))


class _Uniforms:
    """Randomness from one given number per row."""

    def __init__(self, uniforms: np.ndarray) -> None:
        self._uniforms = uniforms

    def coin(self, node: int, probability: float) -> bool:
        return bool(self._uniforms[node + 1] < probability)

    def draw(self, law: np.ndarray) -> int:
        return oracle.pick(law, float(self._uniforms[0]))


def compact(kv: Any, prefix_len: int, path: Sequence[int]) -> Any:
    """The committed rows (prefix, root, path) of a cache (..., prefix_len+N+1, D)."""
    checks.arrays(kv=kv)
    if len(kv.shape) < 2:
        raise ShapeError(f"kv must have axes (... rows D), got shape {tuple(kv.shape)}")
    checks.integer_between(0, int(kv.shape[-2]) - 1, prefix_len=prefix_len)
    nodes = [int(node) for node in path]
    drafted = int(kv.shape[-2]) - prefix_len - 1
    for node in nodes:
        checks.integer_between(0, drafted - 1, node=node)
    return kv[..., numpy_tree.committed_rows(int(prefix_len), nodes), :]


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
        raise RangeError(
            f"the parent of node {node} must be -1 or an earlier node, got {parents[node]}"
        )
    return parents


def _draft(log_q: Any) -> np.ndarray:
    draft: np.ndarray = np.asarray(log_q)
    checks.floating(*checks.LOW_FLOATS, log_q=draft)
    checks.axes(log_q=(draft, "L V"))
    if not (draft < np.inf).all():
        raise RangeError("log_q must not contain NaN or +inf")
    return draft


def _draft_tensor(log_q: Any) -> Any:
    checks.floating(*checks.LOW_FLOATS, log_q=log_q)
    if log_q.ndim not in (2, 3):
        raise ShapeError(f"log_q must have axes (L V) or (R L V), got {tuple(log_q.shape)}")
    return log_q


def _distributions(**argument: Any) -> np.ndarray:
    ((name, values),) = argument.items()
    law: np.ndarray = np.asarray(values)
    checks.floating(*checks.LOW_FLOATS, **{name: law})
    checks.axes(**{name: (law, "rows V")})
    if not (law >= 0.0).all() or not (law > 0.0).any(axis=1).all():
        raise RangeError(f"rows of {name} must be non-negative with a positive sum")
    return law


def _numbers(values: Any) -> np.ndarray:
    uniforms: np.ndarray = np.asarray(values)
    if not ((uniforms >= 0.0) & (uniforms < 1.0)).all():
        raise RangeError("uniforms must lie in [0, 1)")
    return uniforms


def _is_tensor(value: Any) -> bool:
    # A caller that holds a tensor has imported torch already.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _batch(value: Any, axes: int) -> Any:
    if not _is_tensor(value):
        raise DTypeError(
            f"all arrays must be torch tensors if one of them is, got {type(value).__name__}"
        )
    return value if value.ndim == axes else value[None]


def _like(value: Any, axes: int, answers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The answers without a batch axis if the argument had none."""
    return answers if value.ndim == axes else tuple(answer[0] for answer in answers)
