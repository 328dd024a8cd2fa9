"""The traps of fused_softmax_topk: one named bug each, in the smallest situation that shows it."""

from trapline.challenges.fused_softmax_topk import (
    traps_answers,
    traps_inputs,
    traps_ranking,
    traps_refusals,
    traps_softmax,
    traps_tiles,
)

PARTS = (
    traps_softmax,
    traps_tiles,
    traps_ranking,
    traps_answers,
    traps_inputs,
    traps_refusals,
)
