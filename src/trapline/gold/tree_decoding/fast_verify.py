"""Verification with torch operations of fixed size, for batches of trees of equal node count.

R rows of the batch, N nodes, V vocabulary. Nothing here waits for the host: paths come padded with
−1 to `longest` entries, with their lengths beside them.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """What the target accepts of every row."""

    path: Tensor  # (R, longest) node indices from the root downwards, then −1
    length: Tensor  # (R,)
    bonus: Tensor  # (R,)


def accepted_branch(
    tokens: Tensor, parents: Tensor, seen: Tensor, choices: Tensor, longest: int
) -> Accepted:
    """The branch of which every token is the target's pick where it hangs.

    `seen` are the `ancestors` of the tree, `choices` (R, N+1) the picks. A node is accepted when no
    node on its branch is wrong. Siblings must differ, or be `PAD`.
    """
    right = tokens == choices.gather(1, parents + 1)
    wrong_above = seen[:, 1:, 1:].float() @ (~right).float()[:, :, None]
    accepted = wrong_above[:, :, 0] < 0.5
    depth = seen[:, 1:].sum(dim=-1) - 1  # (R, N), 1 below the root
    length = accepted.sum(dim=1)
    # Slot 0 takes in everything that is not accepted.
    slots = torch.where(accepted, depth, 0)
    path = tokens.new_full((len(tokens), max(longest, tokens.shape[1]) + 1), -1)
    path.scatter_(1, slots, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
    path = path[:, 1 : longest + 1].contiguous()
    last = torch.cat([path.new_full((len(path), 1), -1), path], dim=1).gather(1, length[:, None])
    return Accepted(path, length, choices.gather(1, last + 1)[:, 0])


def inverted(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the number: (…, V), (…) to (…).

    Never an impossible token; where rounding leaves the total below the number, the last possible.
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
    """Multi-round rejection: the oracle's `verify_rejection` for batches, one node after the other.

    draft and target are (R, N+1, V): the law from which a row's children were drawn, and the
    target's. uniforms (R, N+1): row i + 1 decides about node i, row 0 draws the bonus. Children
    come after their parents, so one pass over the nodes meets those of the node it stands at in
    order.
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
    """The law scaled to 1; where nothing is left of it, the other one."""
    total = law.sum(dim=1, keepdim=True)
    return torch.where(total > 0, law / total.clamp(min=1e-300), otherwise)
