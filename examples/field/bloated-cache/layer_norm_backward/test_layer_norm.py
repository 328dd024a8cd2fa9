import numpy as np
import pytest
from solution import gradient_check, layer_norm_backward, layer_norm_forward


@pytest.fixture
def data():
    rng = np.random.default_rng(42)
    return (
        rng.normal(size=(2, 4, 8)),
        rng.normal(size=8),
        rng.normal(size=8),
        rng.normal(size=(2, 4, 8)),
    )


def reference(x, gamma, beta, eps):
    mean = x.mean(-1, keepdims=True)
    return gamma * (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) + beta


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_forward(data, eps):
    x, gamma, beta, _ = data
    assert np.allclose(layer_norm_forward(x, gamma, beta, eps)[0], reference(x, gamma, beta, eps))


def test_cache_is_complete(data):
    x, gamma, beta, _ = data
    _, cache = layer_norm_forward(x, gamma, beta)
    assert len(cache) == 12
    assert np.allclose(cache["x_centered"] / cache["std"][..., None], cache["x_norm"])
    assert np.allclose(cache["std"] ** 2, cache["var"] + cache["eps"])
    assert np.allclose(cache["mean"], x.mean(-1))


def test_gradients(data):
    errors = gradient_check(layer_norm_forward, layer_norm_backward, *data)
    assert max(errors.values()) < 1e-7


def test_wrong_gradients_are_seen(data):
    errors = gradient_check(
        layer_norm_forward, lambda dy, c: [1.2 * g for g in layer_norm_backward(dy, c)], *data
    )
    assert min(errors.values()) > 0.1


def test_large_mean(data):
    x, gamma, beta, _ = data
    x = np.round(x * 8)
    a = layer_norm_forward(x, gamma, beta)[0]
    assert np.allclose(layer_norm_forward(x + 2.0**27, gamma, beta)[0], a)


def test_constant_row(data):
    _, gamma, beta, dy = data
    y, cache = layer_norm_forward(np.ones((2, 4, 8)), gamma, beta)
    assert np.allclose(y, beta)
    assert np.isfinite(layer_norm_backward(dy, cache)[0]).all()


def test_rejects(data):
    x, gamma, beta, dy = data
    for bad in ((x[0], gamma, beta), (x, gamma[1:], beta), (x, gamma, beta[:1]), (x, gamma, beta, 0)):
        with pytest.raises(ValueError):
            layer_norm_forward(*bad)
    with pytest.raises(TypeError):
        layer_norm_forward(x.astype(int), gamma, beta)
    with pytest.raises(ValueError):
        layer_norm_backward(dy[:1], layer_norm_forward(x, gamma, beta)[1])


def test_float32(data):
    x, gamma, beta, dy = (a.astype(np.float32) for a in data)
    y, cache = layer_norm_forward(x, gamma, beta)
    assert {y.dtype, *(g.dtype for g in layer_norm_backward(dy, cache))} == {np.dtype(np.float32)}
