"""Attention over a paged key/value cache."""
