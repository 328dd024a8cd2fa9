"""Bugs of KV caches, and the situations that show them."""

from trapline.challenges.kv_cache import (
    traps_appending,
    traps_attention,
    traps_budget,
    traps_chunks,
    traps_codes,
    traps_corners,
    traps_forks,
    traps_keeping,
    traps_pages,
    traps_prefill,
    traps_quantisation,
    traps_room,
    traps_rows,
    traps_sizes,
    traps_softmax,
    traps_valid,
)

PARTS = (
    traps_attention,
    traps_appending,
    traps_pages,
    traps_forks,
    traps_keeping,
    traps_quantisation,
    traps_prefill,
    traps_sizes,
    traps_corners,
    traps_softmax,
    traps_rows,
    traps_room,
    traps_codes,
    traps_chunks,
    traps_budget,
    traps_valid,
)
