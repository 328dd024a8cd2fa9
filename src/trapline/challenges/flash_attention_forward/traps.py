"""Bugs of tiled attention, each with the smallest situation that provokes it."""

from trapline.challenges.flash_attention_forward import (
    traps_arrays,
    traps_masks,
    traps_numbers,
    traps_scale,
    traps_softmax,
)

PARTS = (
    traps_softmax,
    traps_masks,
    traps_scale,
    traps_arrays,
    traps_numbers,
)
