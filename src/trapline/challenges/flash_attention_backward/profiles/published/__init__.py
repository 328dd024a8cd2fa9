"""The published prompt: tiled attention and its gradients from a cache."""
