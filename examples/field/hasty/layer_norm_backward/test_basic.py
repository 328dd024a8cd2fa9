import numpy as np
from solution import gradient_check, layer_norm_backward, layer_norm_forward


def test_gradients():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, 3, 4))
    gamma, beta = rng.normal(size=(2, 4))
    errors = gradient_check(layer_norm_forward, layer_norm_backward, x, gamma, beta, dy)
    assert max(errors.values()) < 1e-4
