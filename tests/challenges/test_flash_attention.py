"""What the memory traps of flash attention tell apart."""

import pytest

from trapline.arena.errors import Violation
from trapline.challenges.flash_attention_forward.situations import holds_no_mask, holds_no_matrix

PAIRS = 4608 * 4608


@pytest.mark.parametrize("bytes_a_pair", [1, 3, 8])
def test_a_mask_of_all_pairs_is_not_taken_for_their_scores(bytes_a_pair):
    """np.triu holds three bytes a pair at a time, np.tri in float64 eight."""
    with pytest.raises(Violation):
        holds_no_mask(lambda causal: bytes_a_pair * PAIRS if causal else 0, PAIRS)


def test_scores_of_all_pairs_are_not_taken_for_a_mask():
    holds_no_mask(lambda causal: 4 * PAIRS, PAIRS)
    with pytest.raises(Violation):
        holds_no_matrix(4 * PAIRS, PAIRS, "scores")
