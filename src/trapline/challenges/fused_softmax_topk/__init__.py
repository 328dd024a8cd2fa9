"""Softmax fused with top-k: the k most probable of V, without the matrix of probabilities."""
