"""The traps of layer_norm_backward: one named bug each, in the smallest situation that shows it."""

from trapline.challenges.layer_norm_backward import (
    traps_check,
    traps_formula,
    traps_inputs,
    traps_statistics,
)

PARTS = (
    traps_statistics,
    traps_formula,
    traps_inputs,
    traps_check,
)
