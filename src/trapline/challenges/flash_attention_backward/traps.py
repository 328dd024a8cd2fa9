"""Bugs of the backward pass of tiled attention, each in its smallest situation."""

from trapline.challenges.flash_attention_backward import (
    traps_answers,
    traps_arrays,
    traps_both,
    traps_cuts,
    traps_edges,
    traps_factors,
    traps_formula,
    traps_forward,
    traps_heads,
    traps_memory,
    traps_merging,
    traps_numbers,
    traps_ranges,
    traps_shapes,
    traps_strides,
    traps_tiles,
)

PARTS = (
    traps_formula,
    traps_factors,
    traps_shapes,
    traps_arrays,
    traps_numbers,
    traps_both,
    traps_edges,
    traps_ranges,
    traps_strides,
    traps_forward,
    traps_answers,
    traps_memory,
    traps_merging,
    traps_tiles,
    traps_cuts,
    traps_heads,
)
