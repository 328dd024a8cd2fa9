"""The bugs of tree decoding, each in the smallest situation that shows it.

Weights are multiples of a power of two, so that sums and ties are exact in every dtype. Rows of
choices, probabilities and masks: 0 is the root, i + 1 is node i.
"""

from trapline.challenges.dflash import (
    traps_committing,
    traps_corners,
    traps_generating,
    traps_indices,
    traps_laws,
    traps_levels,
    traps_mask,
    traps_refusals,
    traps_rounds,
    traps_sampling,
    traps_shapes,
    traps_slips,
    traps_ties,
    traps_tree,
    traps_valid,
    traps_verification,
)

PARTS = (
    traps_tree,
    traps_ties,
    traps_levels,
    traps_mask,
    traps_verification,
    traps_sampling,
    traps_laws,
    traps_committing,
    traps_generating,
    traps_rounds,
    traps_corners,
    traps_slips,
    traps_refusals,
    traps_shapes,
    traps_valid,
    traps_indices,
)
