import numpy as np
from solution import flash_attention


def test_rows_are_averages():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 2, 8, 4))
    v = np.ones((1, 2, 8, 4))
    out, lse = flash_attention(q, k, v)
    assert np.allclose(out, 1)
    assert out.shape == (1, 2, 8, 4)
