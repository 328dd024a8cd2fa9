"""Bugs of tiled attention, each with the smallest situation that provokes it."""

from trapline.challenges.flash_attention_forward import (
    traps_answers,
    traps_arrays,
    traps_causal,
    traps_cuts,
    traps_edges,
    traps_heads,
    traps_masks,
    traps_numbers,
    traps_scale,
    traps_softmax,
    traps_tiles,
)

PARTS = (
    traps_softmax,
    traps_tiles,
    traps_masks,
    traps_causal,
    traps_scale,
    traps_heads,
    traps_arrays,
    traps_answers,
    traps_numbers,
    traps_edges,
    traps_cuts,
)
