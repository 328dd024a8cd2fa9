"""Attention over dense and packed tensors."""
