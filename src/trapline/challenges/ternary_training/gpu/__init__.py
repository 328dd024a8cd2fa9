"""The GPU track of ternary_training."""
