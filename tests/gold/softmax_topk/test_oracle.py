import numpy as np
import pytest

from trapline.gold.errors import RangeError
from trapline.gold.softmax_topk import oracle


def test_a_row_worked_out_by_hand():
    ranked = oracle.softmax_topk(np.log([[1.0, 4.0, 2.0, 1.0]]), 3)
    assert ranked.indices.tolist() == [[1, 2, 0]]
    assert np.allclose(ranked.probs, [[0.5, 0.25, 0.125]])
    assert np.allclose(ranked.log_probs, np.log([[0.5, 0.25, 0.125]]))
    assert np.allclose(ranked.lse, np.log(8.0))


def test_temperature_divides_the_logits():
    logits = np.log([[1.0, 2.0]])
    assert np.allclose(oracle.softmax_topk(logits, 2, 0.5).probs, [[0.8, 0.2]])


def test_ties_and_signed_zeros_go_to_the_lower_index():
    ranked = oracle.softmax_topk(np.array([[-0.0, 0.0, -1.0, 0.0]]), 3)
    assert ranked.indices.tolist() == [[0, 1, 3]]


def test_minus_infinity_has_probability_zero():
    ranked = oracle.softmax_topk(np.array([[-np.inf, 3.0, -np.inf]]), 3)
    assert ranked.probs.tolist() == [[1.0, 0.0, 0.0]]
    assert ranked.indices.tolist() == [[1, 0, 2]]


def test_all_probabilities_sum_to_one_at_huge_logits():
    logits = np.random.default_rng(0).standard_normal((3, 50)) * 1e300
    assert np.allclose(oracle.softmax_topk(logits, 50).probs.sum(1), 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_a_softmax_are_refused(bad):
    with pytest.raises(RangeError, match="row 1"):
        oracle.softmax_topk(np.array([[1.0, 2.0], [0.0, bad]]), 1)


def test_an_all_minus_infinity_row_is_refused():
    with pytest.raises(RangeError, match="all -inf"):
        oracle.softmax_topk(np.full((1, 3), -np.inf), 1)
