"""Softmax fused with top-k."""


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    raise NotImplementedError
