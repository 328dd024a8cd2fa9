"""Named bugs of ternary code, each in the smallest situation that shows it for every seed."""

from trapline.challenges.ternary_training import (
    traps_answers,
    traps_arguments,
    traps_model,
    traps_packing,
    traps_quantiser,
    traps_split,
    traps_trained,
    traps_training,
)

PARTS = (
    traps_quantiser,
    traps_packing,
    traps_split,
    traps_model,
    traps_training,
    traps_trained,
    traps_answers,
    traps_arguments,
)
