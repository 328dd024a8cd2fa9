import numpy as np
import pytest
from solution import gradient_check, layer_norm_backward, layer_norm_forward


def random_inputs(B=2, T=3, D=5, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(2.0, 3.0, (B, T, D)),
        rng.normal(size=D),
        rng.normal(size=D),
        rng.normal(size=(B, T, D)),
    )


def test_rows_are_normalized():
    x, _, _, _ = random_inputs(D=64)
    y, _ = layer_norm_forward(x, np.ones(64), np.zeros(64))
    assert np.allclose(y.mean(-1), 0, atol=1e-12)
    assert np.allclose(y.std(-1), 1, atol=1e-4)


def test_scale_and_shift():
    x, gamma, beta, _ = random_inputs()
    plain, _ = layer_norm_forward(x, np.ones(5), np.zeros(5))
    y, _ = layer_norm_forward(x, gamma, beta)
    assert np.allclose(y, plain * gamma + beta)


def test_eps():
    x, gamma, beta, _ = random_inputs()
    y, _ = layer_norm_forward(x, np.ones(5), np.zeros(5), 1.0)
    assert np.allclose(y, (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1))


def test_gradients():
    errors = gradient_check(layer_norm_forward, layer_norm_backward, *random_inputs())
    assert set(errors) == {"dx", "dgamma", "dbeta"}
    assert max(errors.values()) < 1e-8


def test_gradient_check_catches_errors():
    def wrong(dy, cache):
        dx, dgamma, dbeta = layer_norm_backward(dy, cache)
        return dx * 1.1, dgamma * 1.1, dbeta * 1.1

    errors = gradient_check(layer_norm_forward, wrong, *random_inputs())
    assert min(errors.values()) > 0.05


def test_zero_upstream_gradient():
    x, gamma, beta, dy = random_inputs()
    errors = gradient_check(layer_norm_forward, layer_norm_backward, x, gamma, beta, dy * 0)
    assert max(errors.values()) == 0


def test_constant_rows_and_large_mean():
    y, _ = layer_norm_forward(np.full((1, 2, 4), 7.0), np.ones(4), np.ones(4))
    assert np.allclose(y, 1)
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    a, _ = layer_norm_forward(x, np.ones(4), np.zeros(4))
    b, _ = layer_norm_forward(x + 1e8, np.ones(4), np.zeros(4))
    assert np.allclose(a, b)


def test_float32_and_empty():
    x, gamma, beta, dy = (a.astype(np.float32) for a in random_inputs())
    y, cache = layer_norm_forward(x, gamma, beta)
    assert y.dtype == np.float32
    assert all(g.dtype == np.float32 for g in layer_norm_backward(dy, cache))
    y, cache = layer_norm_forward(x[:0], gamma, beta)
    assert y.shape == (0, 3, 5)
    assert layer_norm_backward(dy[:0], cache)[1].tolist() == [0.0] * 5


@pytest.mark.parametrize("eps", [0, -1, np.nan, np.inf])
def test_bad_eps(eps):
    x, gamma, beta, _ = random_inputs()
    with pytest.raises(ValueError):
        layer_norm_forward(x, gamma, beta, eps)


def test_bad_shapes_and_types():
    x, gamma, beta, dy = random_inputs()
    for args in [(x[0], gamma, beta), (x, gamma[:1], beta), (x, gamma, beta[:2])]:
        with pytest.raises(ValueError):
            layer_norm_forward(*args)
    for args in [(x.astype(int), gamma, beta), (x.tolist(), gamma, beta)]:
        with pytest.raises(TypeError):
            layer_norm_forward(*args)
    _, cache = layer_norm_forward(x, gamma, beta)
    with pytest.raises(ValueError):
        layer_norm_backward(dy[:1], cache)
