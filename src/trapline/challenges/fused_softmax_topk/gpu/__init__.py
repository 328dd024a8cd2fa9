"""The GPU track of fused_softmax_topk."""
