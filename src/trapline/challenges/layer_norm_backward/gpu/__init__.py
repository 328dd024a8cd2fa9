"""The GPU track of layer_norm_backward."""
