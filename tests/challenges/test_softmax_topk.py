"""Situations of the softmax + top-k challenge that once depended on the draw."""

import numpy as np
import pytest

from trapline.challenges.fused_softmax_topk.cases import overlapping


@pytest.mark.parametrize(("rows", "vocabulary"), [(48, 2048), (512, 2048), (24, 1 << 16)])
def test_rounding_cannot_turn_round_the_best_two_of_overlapping_rows(rows, vocabulary):
    """Equal float32 probabilities gave an answer that is wrong beside its memory in some draws."""
    for seed in range(5):
        logits = overlapping(np.random.default_rng(seed), rows, vocabulary)
        best = -np.partition(-logits, 2, axis=1)[:, :3]
        best = -np.sort(-best, axis=1)
        assert np.all(best[:, :-1] - best[:, 1:] > 1.0)
