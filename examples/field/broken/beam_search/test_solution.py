import numpy as np
from solution import log_softmax


def test_log_softmax():
    x = np.array([[1.0, 2.0, 3.0]])
    assert np.allclose(np.exp(log_softmax(x)).sum(), 1.0)
