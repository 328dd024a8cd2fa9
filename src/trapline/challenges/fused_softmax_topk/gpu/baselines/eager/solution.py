"""torch's own softmax and top-k."""

import torch


def softmax_topk(logits, k, probs, indices):
    torch.topk(torch.softmax(logits, dim=1), k, dim=1, out=(probs, indices))
