"""Training of ternary language models."""
