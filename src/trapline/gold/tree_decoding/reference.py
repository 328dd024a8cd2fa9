"""Draft trees and their verification in torch, in tensors of fixed size and without host syncs.

Builds the same trees as `numpy_tree.heaviest_prefixes`, for batches of drafts, one depth at a time
instead of with a heap. A tree with fewer than N possible prefixes is padded at its end with nodes
of token `PAD` below the root, which match nothing.

Letters: R rows of the batch, L depths, V vocabulary, N nodes.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

PAD = -1


def heaviest_prefixes(log_q: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The `budget` heaviest prefixes of drafts (R, L, V), best first: tokens, parents (R, N).

    Values must not exceed 0. At each depth only the N best prefixes can be in the tree, and their
    parents are among the N best of the depth above. In the order of one depth (weight, parent,
    token), the child of rank r below the parent of rank p has at least (p+1)·(r+1) − 1 prefixes
    before it, so about N·ln N pairs (p, r) per depth suffice.
    """
    rows, depths, _ = log_q.shape
    nodes = node_count(log_q.shape, budget)
    if nodes == 0:
        none = torch.zeros((rows, 0), dtype=torch.int64, device=log_q.device)
        return none, none.clone()
    values, candidates = ranked(log_q, min(nodes, log_q.shape[-1]))
    first = values.new_zeros((rows, 1))
    weights, tokens, parents = [first], [], []
    for depth in range(depths):
        best, parent, token = _next_level(
            weights[-1], values[:, depth], candidates[:, depth], nodes
        )
        weights.append(best)
        parents.append(parent)
        tokens.append(token)
    return _merged(weights[1:], tokens, parents, nodes)


def chain(log_q: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token of every depth, one below the other: (R, L) each."""
    rows, depths, _ = log_q.shape
    parents = torch.arange(-1, depths - 1, device=log_q.device).expand(rows, -1)
    return log_q.argmax(dim=-1), parents.contiguous()


def fixed_width(log_q: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Every node of depth d has the `widths[d]` most likely tokens as children; breadth first."""
    rows = log_q.shape[0]
    _, candidates = ranked(log_q[:, : len(widths)], max(widths, default=0))
    tokens, parents = [], []
    first_above, above = -1, 1
    for depth, width in enumerate(widths):
        tokens.append(candidates[:, depth, :width].repeat(1, above))
        level = torch.arange(first_above, first_above + above, device=log_q.device)
        parents.append(level.repeat_interleave(width).expand(rows, -1))
        first_above, above = first_above + above, above * width
    empty = log_q.new_zeros((rows, 0), dtype=torch.int64)
    return torch.cat([empty, *tokens], dim=1), torch.cat([empty, *parents], dim=1)


def ranked(log_q: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row as float64, and their tokens; ties by lower token."""
    if log_q.dtype == torch.float64:
        order = torch.sort(log_q, dim=-1, descending=True, stable=True).indices[..., :count]
    else:
        order = _by_unique_keys(log_q.float(), count)
    return log_q.gather(-1, order).double(), order


def _by_unique_keys(log_q: Tensor, count: int) -> Tensor:
    """Top-k of keys that combine value and token, since `topk` leaves the order of ties open."""
    bits = (log_q + 0.0).view(torch.int32)  # + 0.0 turns −0.0 into +0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = log_q.shape[-1] - 1
    tokens = torch.arange(last, -1, -1, device=log_q.device)
    keys = torch.topk((ordered << 32) | tokens, count, dim=-1).values
    return last - (keys & 0xFFFFFFFF)


def node_count(shape: torch.Size, budget: int) -> int:
    """`budget`, or the number of all prefixes if that is smaller."""
    _, depths, vocabulary = shape
    total, level = 0, 1
    for _ in range(depths):
        level *= vocabulary
        total += level
        if total >= budget:
            return budget
    return total


def _next_level(
    above: Tensor, values: Tensor, tokens: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best prefixes of the next depth: weights, ranks of their parents in `above`, tokens."""
    parent, rank = _pairs(above.shape[1], values.shape[1], nodes, str(above.device))
    sums = above[:, parent] + values[:, rank]
    # Pairs are ordered by parent, then token; a stable sort keeps that order among ties.
    best, order = torch.sort(sums, dim=1, descending=True, stable=True)
    best, order = best[:, :nodes], order[:, :nodes]
    return best, parent[order], tokens.gather(1, rank[order])


@lru_cache(maxsize=256)
def _pairs(parents: int, ranks: int, nodes: int, device: str) -> tuple[Tensor, Tensor]:
    """All (parent, rank) with (parent + 1)·(rank + 1) ≤ nodes, in that order."""
    pairs = [
        (parent, rank)
        for parent in range(parents)
        for rank in range(min(ranks, nodes // (parent + 1)))
    ]
    both = torch.tensor(pairs, dtype=torch.int64, device="cpu").T.contiguous().to(device)
    return both[0], both[1]


def _merged(
    weights: list[Tensor], tokens: list[Tensor], parents: list[Tensor], nodes: int
) -> tuple[Tensor, Tensor]:
    """The N best of all depths. Depths are concatenated in order, so ties go to the lower depth."""
    starts = [0]
    for level in weights:
        starts.append(starts[-1] + level.shape[1])
    # Index of each parent in the concatenation of all depths; 0 is the root, others are shifted.
    places = [parents[0] * 0]
    places += [rank + 1 + start for rank, start in zip(parents[1:], starts, strict=False)]
    best, order = torch.sort(torch.cat(weights, dim=1), dim=1, descending=True, stable=True)
    best, order = best[:, :nodes], order[:, :nodes]
    index = order.new_full((order.shape[0], starts[-1] + 1), -1)
    numbers = torch.arange(order.shape[1], device=order.device).expand_as(order)
    index.scatter_(1, order + 1, numbers)
    chosen_parents = index.gather(1, torch.cat(places, dim=1).gather(1, order))
    impossible = best == -torch.inf
    chosen = torch.cat(tokens, dim=1).gather(1, order)
    return chosen.masked_fill(impossible, PAD), chosen_parents.masked_fill(impossible, -1)


def ancestors(parents: Tensor) -> Tensor:
    """bool (R, N+1, N+1): the ancestors of root and nodes, each node included.

    Squaring the reachability matrix doubles path lengths, so log2 N products suffice.
    """
    rows, nodes = parents.shape
    reach = torch.eye(nodes + 1, dtype=torch.float32, device=parents.device).repeat(rows, 1, 1)
    reach[:, 1:].scatter_(2, (parents + 1)[:, :, None], 1.0)
    for _ in range(max(nodes, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0.5


def depths(seen: Tensor) -> Tensor:
    """(R, N+1): depth of the root (0) and of every node, computed from `ancestors`."""
    return seen.sum(dim=-1) - 1


class Accepted(NamedTuple):
    """The accepted branch of every row."""

    path: Tensor  # (R, longest) node indices from the root downwards, then −1
    length: Tensor  # (R,)
    bonus: Tensor  # (R,)


def accepted_branch(
    tokens: Tensor, parents: Tensor, seen: Tensor, choices: Tensor, longest: int
) -> Accepted:
    """The branch on which every token equals the target's choice at its parent.

    `seen` is `ancestors(parents)`, `choices` (R, N+1) the target's tokens after root and nodes. A
    node is accepted when no node of its branch is wrong. Siblings must differ or be `PAD`. The path
    is padded with −1 to `longest` entries.
    """
    right = tokens == choices.gather(1, parents + 1)
    wrong_above = seen[:, 1:, 1:].float() @ (~right).float()[:, :, None]
    accepted = wrong_above[:, :, 0] < 0.5
    depth = seen[:, 1:].sum(dim=-1) - 1  # (R, N), 1 below the root
    length = accepted.sum(dim=1)
    # Rejected nodes are written to slot 0, which is cut off below.
    slots = torch.where(accepted, depth, 0)
    path = tokens.new_full((len(tokens), max(longest, tokens.shape[1]) + 1), -1)
    path.scatter_(1, slots, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
    path = path[:, 1 : longest + 1].contiguous()
    last = torch.cat([path.new_full((len(path), 1), -1), path], dim=1).gather(1, length[:, None])
    return Accepted(path, length, choices.gather(1, last + 1)[:, 0])


def inverted(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the number: (…, V), (…) to (…).

    If rounding leaves the total below the number, the last token of positive probability.
    """
    cumulative = probs.double().cumsum(dim=-1)
    picks = (cumulative <= uniforms[..., None]).sum(dim=-1)
    numbers = torch.arange(probs.shape[-1], device=probs.device)
    last = torch.where(probs > 0, numbers, -1).amax(dim=-1)
    return torch.minimum(picks, last)


def rejection_branch(
    tokens: Tensor,
    parents: Tensor,
    draft: Tensor,
    target: Tensor,
    uniforms: Tensor,
    *,
    replacement: bool,
    longest: int,
) -> Accepted:
    """Multi-round rejection sampling (the oracle's `verify_rejection`) for batches, node by node.

    `draft` and `target` (R, N+1, V) are the distributions after root and nodes; the children of a
    node were drawn from its draft distribution. `uniforms` (R, N+1): row i + 1 decides node i, row
    0 draws the bonus. Children follow their parents, so one pass over the nodes meets the children
    of the current node in order.
    """
    rows, nodes = tokens.shape
    at = tokens.new_full((rows,), -1)
    path = tokens.new_full((rows, longest + 1), -1)
    length = tokens.new_zeros(rows)
    residual, proposal = target[:, 0].double(), draft[:, 0].double()
    for node in range(nodes):
        asked = (parents[:, node] == at) & (tokens[:, node] >= 0)
        token = tokens[:, node].clamp(min=0)[:, None]
        p, q = residual.gather(1, token)[:, 0], proposal.gather(1, token)[:, 0]
        taken = asked & (uniforms[:, node + 1] * q < p)
        refused = asked & ~taken
        rest = _normalised((residual - proposal).clamp(min=0.0), residual)
        residual = torch.where(refused[:, None], rest, residual)
        if not replacement:
            others = _normalised(proposal.scatter(1, token, 0.0), proposal)
            proposal = torch.where(refused[:, None], others, proposal)
        residual = torch.where(taken[:, None], target[:, node + 1].double(), residual)
        proposal = torch.where(taken[:, None], draft[:, node + 1].double(), proposal)
        path.scatter_(1, torch.where(taken, length, longest)[:, None], node)
        at, length = torch.where(taken, node, at), length + taken
    return Accepted(path[:, :longest].contiguous(), length, inverted(residual, uniforms[:, 0]))


def _normalised(law: Tensor, otherwise: Tensor) -> Tensor:
    """The distribution scaled to sum 1, or `otherwise` where its mass is 0."""
    total = law.sum(dim=1, keepdim=True)
    return torch.where(total > 0, law / total.clamp(min=1e-300), otherwise)
