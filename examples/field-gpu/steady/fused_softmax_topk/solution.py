"""Softmax and top-k with torch: 512 rows at a time, a stable argsort."""

import torch


def softmax_topk(logits, k, probs, indices):
    for block, p, i in zip(logits.split(512), probs.split(512), indices.split(512)):
        x = block.to(torch.float32)
        x = torch.where(x == 0, torch.zeros_like(x), x)
        lse = torch.logsumexp(x, dim=1, keepdim=True)
        order = torch.argsort(x, dim=1, descending=True, stable=True)[:, :k]
        p.copy_(torch.exp(x.gather(1, order) - lse))
        i.copy_(order)
