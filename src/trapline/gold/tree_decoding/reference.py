"""Draft trees with torch operations of fixed size: on a GPU nothing waits for the host.

The same trees as `tree.heaviest_prefixes`, for batches of drafts, level by level instead of by a
heap. Letters: R rows of the batch, L depths, V vocabulary, N nodes. A tree with fewer than N
possible prefixes is padded at its end with nodes of token `PAD` below the root: they match nothing.
"""

from functools import lru_cache

import torch
from torch import Tensor

PAD = -1


def heaviest_prefixes(log_q: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The `budget` heaviest prefixes of drafts (R, L, V), best first: tokens, parents (R, N).

    Values must not exceed 0. On a GPU one kernel does it.
    """
    if log_q.is_cuda:
        from trapline.gold.tree_decoding.triton import tree

        return tree.heaviest_prefixes(log_q, budget)
    return by_levels(log_q, budget)


def by_levels(log_q: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """`heaviest_prefixes`, one depth after the other.

    At every depth only the N best prefixes can be in the tree, and their
    parents are among the N best of the depth above; in the order of one depth (weight, parent,
    token) at least (p+1)·(r+1) prefixes stand up to the child of rank r below the parent of rank p,
    so only about N·ln N pairs (p, r) a depth are looked at.
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
    """The `count` largest of each row as float64 and their tokens, ties by lower token."""
    if log_q.dtype == torch.float64:
        order = torch.sort(log_q, dim=-1, descending=True, stable=True).indices[..., :count]
    else:
        order = _by_unique_keys(log_q.float(), count)
    return log_q.gather(-1, order).double(), order


def _by_unique_keys(log_q: Tensor, count: int) -> Tensor:
    """Selection does not say which of equal values it takes; value and token in one integer do."""
    bits = (log_q + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = log_q.shape[-1] - 1
    tokens = torch.arange(last, -1, -1, device=log_q.device)
    keys = torch.topk((ordered << 32) | tokens, count, dim=-1).values
    return last - (keys & 0xFFFFFFFF)


def node_count(shape: torch.Size, budget: int) -> int:
    """No more nodes than there are prefixes."""
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
    """The best prefixes one deeper: weights, ranks of their parents among `above`, tokens."""
    parent, rank = _pairs(above.shape[1], values.shape[1], nodes, str(above.device))
    sums = above[:, parent] + values[:, rank]
    # Pairs stand in order of parent, then of token: a stable sort leaves ties in that order.
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
    both = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(device)
    return both[0], both[1]


def _merged(
    weights: list[Tensor], tokens: list[Tensor], parents: list[Tensor], nodes: int
) -> tuple[Tensor, Tensor]:
    """One order over all depths. Depths stand one after the other, so ties go to the lower one."""
    starts = [0]
    for level in weights:
        starts.append(starts[-1] + level.shape[1])
    # Where a parent stands in the row of all depths; 0 is the root, everything else one later.
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
    """bool (R, N+1, N+1): which of root and nodes each of them continues, itself included.

    Paths double in every round, so a tree of any depth takes log2 N rounds.
    """
    rows, nodes = parents.shape
    reach = torch.eye(nodes + 1, dtype=torch.float32, device=parents.device).repeat(rows, 1, 1)
    reach[:, 1:].scatter_(2, (parents + 1)[:, :, None], 1.0)
    for _ in range(max(nodes, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0.5


def depths(seen: Tensor) -> Tensor:
    """(R, N+1): the depth of the root (0) and of every node, from `ancestors`."""
    return seen.sum(dim=-1) - 1
