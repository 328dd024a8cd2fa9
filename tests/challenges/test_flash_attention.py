"""What the memory traps of flash attention tell apart."""

import pytest

from trapline.arena.errors import Violation
from trapline.challenges.flash_attention_forward.situations import holds_no_mask, holds_no_matrix

PAIRS = 4608 * 4608


def test_a_mask_of_all_pairs_is_not_taken_for_their_scores():
    holds_no_matrix(PAIRS, PAIRS, "scores")
    with pytest.raises(Violation):
        holds_no_mask(PAIRS, PAIRS)


def test_scores_of_all_pairs_are_not_taken_for_a_mask():
    holds_no_mask(4 * PAIRS, PAIRS)
    with pytest.raises(Violation):
        holds_no_matrix(4 * PAIRS, PAIRS, "scores")
