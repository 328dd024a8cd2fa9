"""A stable sort of every row in float32, and a softmax beside it."""

import torch


def softmax_topk(logits, k, probs, indices):
    for first in range(0, logits.shape[0], 1024):
        rows = slice(first, first + 1024)
        wide = logits[rows].float() + 0.0  # −0 becomes +0
        weights = torch.exp(wide - wide.amax(dim=1, keepdim=True))
        order = torch.sort(wide, dim=1, descending=True, stable=True).indices[:, :k]
        total = weights.sum(dim=1, keepdim=True)
        probs[rows] = (weights.gather(1, order) / total).to(probs.dtype)
        indices[rows] = order
