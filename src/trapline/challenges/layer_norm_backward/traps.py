"""The traps of layer_norm_backward: one named bug each, in the smallest situation that shows it."""

from trapline.challenges.layer_norm_backward import (
    traps_cache,
    traps_check,
    traps_epsilon,
    traps_factors,
    traps_formula,
    traps_inputs,
    traps_parameters,
    traps_refusals,
    traps_statistics,
)

PARTS = (
    traps_formula,
    traps_parameters,
    traps_statistics,
    traps_epsilon,
    traps_cache,
    traps_inputs,
    traps_refusals,
    traps_check,
    traps_factors,
)
