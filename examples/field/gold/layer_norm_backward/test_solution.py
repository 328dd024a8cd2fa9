"""Tests of the layer norm: values, gradients, cache, refusals, and the gradient check itself."""

import numpy as np
import pytest
from solution import gradient_check, layer_norm_backward, layer_norm_forward


def make(shape=(2, 3, 8), dtype=np.float64, offset=0.0, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    x = (offset + spread * rng.standard_normal(shape)).astype(dtype)
    gamma, beta = rng.uniform(0.5, 2.0, (2, shape[-1])).astype(dtype)
    dy = rng.standard_normal(shape).astype(dtype)
    return x, gamma, beta, dy


def by_definition(x, gamma, beta, eps):
    """One row at a time, from the formula on the page."""
    y = np.empty(x.shape)
    for place in np.ndindex(x.shape[:-1]):
        row = x[place].astype(np.float64)
        mean = sum(row) / len(row)
        var = sum((value - mean) ** 2 for value in row) / len(row)
        y[place] = gamma * (row - mean) / np.sqrt(var + eps) + beta
    return y


def by_jacobian(x, gamma, dy, eps):
    """dx through the full Jacobian of each row."""
    width = x.shape[-1]
    dx = np.empty(x.shape)
    for place in np.ndindex(x.shape[:-1]):
        centred = x[place] - x[place].mean()
        std = np.sqrt(np.mean(centred**2) + eps)
        jacobian = (np.eye(width) - 1 / width) / std - np.outer(centred, centred) / (width * std**3)
        dx[place] = jacobian @ (gamma * dy[place])
    return dx


@pytest.mark.parametrize(
    "shape", [(2, 3, 8), (1, 1, 5), (1, 4, 3), (4, 1, 3), (2, 3, 1), (2, 5, 5)]
)
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_values_and_gradients_follow_the_definition(shape, eps):
    x, gamma, beta, dy = make(shape, spread=2.0)
    y, cache = layer_norm_forward(x, gamma, beta, eps)
    assert np.allclose(y, by_definition(x, gamma, beta, eps), atol=1e-12)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    x_hat = by_definition(x, np.ones(shape[-1]), np.zeros(shape[-1]), eps)
    assert np.allclose(dx, by_jacobian(x, gamma, dy, eps), atol=1e-10)
    assert np.allclose(dgamma, np.einsum("btd,btd->d", dy, x_hat), atol=1e-12)
    assert np.allclose(dbeta, np.einsum("btd->d", dy), atol=1e-12)


def test_default_eps_is_1e_minus_5():
    x, gamma, beta, _ = make(spread=1e-3)
    assert np.array_equal(
        layer_norm_forward(x, gamma, beta)[0], layer_norm_forward(x, gamma, beta, 1e-5)[0]
    )
    assert not np.allclose(
        layer_norm_forward(x, gamma, beta)[0], layer_norm_forward(x, gamma, beta, 1e-6)[0]
    )


@pytest.mark.parametrize("offset", [1e4, -1e8])
def test_a_large_mean_does_not_cancel(offset):
    pattern = np.array([-2.0, -1.0, 1.0, 2.0] * 2)
    x = np.broadcast_to(pattern, (1, 2, 8)) + offset
    y, cache = layer_norm_forward(x, np.ones(8), np.zeros(8))
    assert np.allclose(y, pattern / np.sqrt(2.5 + 1e-5), rtol=1e-12)
    dy = np.random.default_rng(1).standard_normal(x.shape)
    dx = layer_norm_backward(dy, cache)[0]
    assert np.allclose(dx, by_jacobian(x - offset, np.ones(8), dy, 1e-5), atol=1e-10)


def test_constant_rows_give_beta():
    _, gamma, beta, dy = make()
    y, cache = layer_norm_forward(np.full((2, 3, 8), 0.1), gamma, beta)
    assert np.allclose(y, np.broadcast_to(beta, y.shape))
    dx = layer_norm_backward(dy, cache)[0]
    g = dy * gamma
    assert np.allclose(dx, (g - g.mean(-1, keepdims=True)) / np.sqrt(1e-5))


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_float32_in_float32_out_and_accurate(scale):
    x, gamma, beta, dy = make((2, 3, 64), np.float32, spread=scale)
    y, cache = layer_norm_forward(x, gamma, beta)
    grads = layer_norm_backward(dy, cache)
    assert [part.dtype for part in (y, *grads)] == [np.float32] * 4
    assert np.allclose(y, by_definition(x, gamma, beta, 1e-5), rtol=1e-6, atol=1e-6)
    wide = by_jacobian(x.astype(np.float64), gamma, dy, 1e-5)
    assert np.allclose(grads[0] * scale, wide * scale, rtol=1e-5, atol=1e-5)


def test_many_float32_rows_sum_accurately():
    x, gamma, beta, dy = make((50, 80, 4), np.float32)
    y, cache = layer_norm_forward(x, gamma, beta)
    _, dgamma, dbeta = layer_norm_backward(dy, cache)
    assert np.allclose(dbeta, dy.astype(np.float64).sum((0, 1)), rtol=1e-6)
    x_hat = (y.astype(np.float64) - beta) / gamma
    assert np.allclose(dgamma, (dy * x_hat).sum((0, 1)), rtol=1e-4)


def test_zero_gamma_keeps_its_own_gradient():
    x, gamma, beta, dy = make()
    right = layer_norm_backward(dy, layer_norm_forward(x, gamma, beta)[1])[1]
    gamma[3] = 0.0
    assert np.allclose(layer_norm_backward(dy, layer_norm_forward(x, gamma, beta)[1])[1], right)


def test_the_cache_is_minimal_plain_and_owned():
    x, gamma, beta, dy = make((4, 5, 16), np.float32)
    _, cache = layer_norm_forward(x, gamma, beta)
    assert all(isinstance(part, np.ndarray) for part in cache)
    assert sum(part.nbytes for part in cache) <= x.nbytes + 2 * 4 * (20 + 16) + 64
    assert not any(np.shares_memory(part, source) for part in cache for source in (x, gamma, beta))
    before = [part.copy() for part in cache]
    first = layer_norm_backward(dy, cache)
    layer_norm_forward(x + 1, gamma, beta)
    second = layer_norm_backward(dy, cache)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(before, cache, strict=True))


def test_inputs_stay_as_they_were():
    x, gamma, beta, dy = make(offset=3.0)
    before = [value.copy() for value in (x, gamma, beta, dy)]
    _, cache = layer_norm_forward(x, gamma, beta)
    layer_norm_backward(dy, cache)
    gradient_check(layer_norm_forward, layer_norm_backward, x, gamma, beta, dy)
    assert all(np.array_equal(a, b) for a, b in zip(before, (x, gamma, beta, dy), strict=True))


def test_views_are_read_by_their_strides():
    x, gamma, beta, dy = make((3, 4, 6))
    want_y, want_cache = layer_norm_forward(x, gamma, beta)
    want = layer_norm_backward(dy, want_cache)
    y, cache = layer_norm_forward(np.asfortranarray(x), gamma[::-1].copy()[::-1], beta)
    got = layer_norm_backward(np.asfortranarray(dy), cache)
    assert np.allclose(y, want_y)
    assert all(np.allclose(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_empty_batches(shape):
    x, gamma, beta, dy = make(shape)
    y, cache = layer_norm_forward(x, gamma, beta)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    assert y.shape == dx.shape == shape
    assert dgamma.tolist() == dbeta.tolist() == [0.0] * 4


X, GAMMA, BETA, DY = make()


@pytest.mark.parametrize(
    "arguments",
    [
        (X[0], GAMMA, BETA),
        (X[None], GAMMA, BETA),
        (X, GAMMA[:1], BETA),
        (X, GAMMA, BETA[:-1]),
        (X, GAMMA[None], BETA),
        (X.astype(int), GAMMA, BETA),
        (X.astype(complex), GAMMA, BETA),
        (X, GAMMA.astype(int), BETA),
        (X, GAMMA, BETA.astype(int)),
        (X.tolist(), GAMMA, BETA),
        (X, GAMMA, BETA, 0.0),
        (X, GAMMA, BETA, -1.0),
        (X, GAMMA, BETA, np.inf),
        (X, GAMMA, BETA, np.nan),
    ],
)
def test_bad_input_is_refused(arguments):
    with pytest.raises((ValueError, TypeError)):
        layer_norm_forward(*arguments)


@pytest.mark.parametrize("dy", [DY[:1], DY[:, :, :1], DY[0], DY.astype(int), DY.tolist()])
def test_a_bad_dy_is_refused(dy):
    cache = layer_norm_forward(X, GAMMA, BETA)[1]
    with pytest.raises((ValueError, TypeError)):
        layer_norm_backward(dy, cache)


def test_gradient_check_passes_the_right_one_with_few_calls():
    x, gamma, beta, dy = make((4, 32, 64), offset=2.0)
    calls = []

    def forward(*args):
        calls.append(args)
        return layer_norm_forward(*args)

    errors = gradient_check(forward, layer_norm_backward, x, gamma, beta, dy)
    assert sorted(errors) == ["dbeta", "dgamma", "dx"]
    assert max(errors.values()) < 1e-7
    assert 24 < len(calls) <= 256


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["longer", "one element"])
def test_gradient_check_sees_a_wrong_backward(place, kind):
    x, gamma, beta, dy = make((2, 3, 6))

    def backward(dy, cache):
        grads = [gradient.copy() for gradient in layer_norm_backward(dy, cache)]
        if kind == "longer":
            grads[place] *= 1.25
        else:
            grads[place].flat[-1] += np.linalg.norm(grads[place])
        return grads

    errors = list(gradient_check(layer_norm_forward, backward, x, gamma, beta, dy).values())
    wrong = errors.pop(place)
    assert max(errors) < 1e-6
    assert wrong == pytest.approx(0.2) if kind == "longer" else wrong > 1e-2


def test_gradient_check_is_relative_and_survives_zero():
    x, gamma, beta, dy = make((2, 3, 6))
    for scale in (1e-6, 1e6):
        errors = gradient_check(
            layer_norm_forward,
            lambda dy, cache: [2 * g for g in layer_norm_backward(dy, cache)],
            x,
            gamma,
            beta,
            dy * scale,
        )
        assert all(error == pytest.approx(0.5, abs=1e-4) for error in errors.values())
    errors = gradient_check(layer_norm_forward, layer_norm_backward, x, gamma, beta, dy * 0)
    assert set(errors.values()) == {0.0}


def test_gradient_check_of_rows_of_any_scale():
    x, gamma, beta, dy = make((1, 3, 16))
    x *= np.array([1e-3, 1.0, 1e4])[:, None]
    errors = gradient_check(layer_norm_forward, layer_norm_backward, x, gamma, beta, dy)
    assert max(errors.values()) < 1e-6
