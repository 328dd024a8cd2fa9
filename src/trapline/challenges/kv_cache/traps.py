"""Bugs of KV caches, and the situations that show them."""

from trapline.challenges.kv_cache import (
    traps_appending,
    traps_attention,
    traps_corners,
    traps_forks,
    traps_keeping,
    traps_pages,
    traps_prefill,
    traps_quantisation,
    traps_sizes,
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
)
