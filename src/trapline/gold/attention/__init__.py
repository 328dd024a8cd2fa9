"""Attention by tiles: forward, log-sum-exp and backward, full or causal, grouped, packed."""
