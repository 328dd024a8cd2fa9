import numpy as np
from solution import softmax_topk


def test_topk():
    p, i = softmax_topk(np.array([[1.0, 3.0, 2.0]]), 2)
    assert i.tolist() == [[1, 2]]
    assert np.allclose(p, [[0.66524096, 0.24472847]])
