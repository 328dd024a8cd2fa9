"""Batched beam search with an exact stop bound and a pool of finished hypotheses."""
