"""Paged attention in plain Triton."""
