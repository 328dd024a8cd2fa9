import numpy as np
import pytest
from solution import gradient_check, layer_norm_backward, layer_norm_forward


def setup(shape=(2, 3, 6)):
    """Parameters as a layer has them when it is created."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=shape)
    return x, np.ones(shape[-1]), np.zeros(shape[-1]), rng.normal(size=shape)


def test_forward_matches_definition():
    x, gamma, beta, _ = setup()
    y, _ = layer_norm_forward(x, gamma * 2, beta + 1)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    assert np.allclose(y, 2 * want + 1)


def test_all_gradients():
    errors = gradient_check(layer_norm_forward, layer_norm_backward, *setup())
    assert max(errors.values()) < 1e-7


def test_check_notices_errors():
    errors = gradient_check(
        layer_norm_forward, lambda dy, c: [-g for g in layer_norm_backward(dy, c)], *setup()
    )
    assert min(errors.values()) > 1


def test_dx_sums_to_zero():
    x, gamma, beta, dy = setup()
    dx, _, _ = layer_norm_backward(dy, layer_norm_forward(x, gamma, beta)[1])
    assert np.allclose(dx.sum(-1), 0)


def test_edge_cases():
    x, gamma, beta, dy = setup()
    y, cache = layer_norm_forward(np.zeros_like(x), gamma, beta)
    assert not y.any()
    assert np.isfinite(layer_norm_backward(dy, cache)[0]).all()
    y, _ = layer_norm_forward(x + 1e8, gamma, beta)
    assert np.allclose(y, layer_norm_forward(x, gamma, beta)[0], atol=1e-6)


def test_refusals():
    x, gamma, beta, dy = setup()
    with pytest.raises(ValueError):
        layer_norm_forward(x, gamma[:-1], beta)
    with pytest.raises(ValueError):
        layer_norm_forward(x, gamma, beta, 0.0)
    with pytest.raises(TypeError):
        layer_norm_forward(x.astype(int), gamma, beta)
    with pytest.raises(ValueError):
        layer_norm_backward(dy[:1], layer_norm_forward(x, gamma, beta)[1])
