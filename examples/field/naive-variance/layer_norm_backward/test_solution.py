import numpy as np
import pytest
from solution import gradient_check, layer_norm_backward, layer_norm_forward

RNG = np.random.default_rng(3)
X = RNG.normal(1.0, 2.0, (3, 4, 16))
GAMMA, BETA = RNG.normal(size=(2, 16))
DY = RNG.normal(size=X.shape)


def test_mean_and_variance():
    y, _ = layer_norm_forward(X, np.ones(16), np.zeros(16))
    assert np.allclose(y.mean(-1), 0)
    assert np.allclose(y.var(-1), 1, atol=1e-4)


def test_affine_and_eps():
    y, _ = layer_norm_forward(X, GAMMA, BETA, 0.5)
    want = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 0.5)
    assert np.allclose(y, want * GAMMA + BETA)


def test_gradients_against_differences():
    errors = gradient_check(layer_norm_forward, layer_norm_backward, X, GAMMA, BETA, DY)
    assert all(error < 1e-7 for error in errors.values())


def test_a_wrong_backward_fails_the_check():
    def doubled(dy, cache):
        return tuple(2 * g for g in layer_norm_backward(dy, cache))

    errors = gradient_check(layer_norm_forward, doubled, X, GAMMA, BETA, DY)
    assert all(error == pytest.approx(0.5, abs=1e-3) for error in errors.values())


def test_zero_input():
    y, cache = layer_norm_forward(X * 0, GAMMA, BETA)
    assert np.allclose(y, BETA)
    dx, dgamma, _ = layer_norm_backward(DY, cache)
    assert np.isfinite(dx).all()
    assert not dgamma.any()


def test_dtypes_and_refusals():
    y, cache = layer_norm_forward(*(a.astype(np.float32) for a in (X, GAMMA, BETA)))
    assert y.dtype == np.float32
    assert layer_norm_backward(DY.astype(np.float32), cache)[0].dtype == np.float32
    for bad in ((X[0], GAMMA, BETA), (X, GAMMA[:1], BETA), (X, GAMMA, BETA, -1.0)):
        with pytest.raises(ValueError):
            layer_norm_forward(*bad)
    with pytest.raises(TypeError):
        layer_norm_forward(X.astype(int), GAMMA, BETA)
    with pytest.raises(ValueError):
        layer_norm_backward(DY[:1], cache)
