import numpy as np
import pytest
from solution import inversions, sort


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 33, 100])
def test_sorts_a_copy(count):
    values = np.random.default_rng(count).standard_normal(count)
    before = values.copy()
    assert sort(values).tolist() == sorted(before.tolist())
    assert (values == before).all()


def test_keeps_the_dtype_and_equal_values():
    values = np.array([3, 1, 3, 1, 2], np.float32)
    assert sort(values).dtype == np.float32
    assert sort(values).tolist() == [1, 1, 2, 3, 3]


def test_refuses_a_matrix():
    with pytest.raises(ValueError, match="2 axes"):
        sort(np.zeros((2, 2)))


def test_counts_inversions():
    assert inversions(np.array([])) == 0
    assert inversions(np.array([1.0, 1.0])) == 0
    assert inversions(np.array([3.0, 2.0, 1.0])) == 3
    assert inversions(np.array([1.0, 3.0, 2.0, 4.0])) == 1
