"""Beam search: batched, with a pool of finished hypotheses and an exact stop bound."""
