import numpy as np
import pytest

from trapline.gold import testing
from trapline.gold.norms import oracle


def test_rows_have_mean_zero_and_variance_one():
    x = np.random.default_rng(0).standard_normal((3, 5, 64)) * 7 + 3
    y = oracle.layer_norm(x, np.ones(64), np.zeros(64), eps=1e-12)
    assert np.allclose(y.mean(-1), 0, atol=1e-14)
    assert np.allclose(y.var(-1), 1, atol=1e-10)


def test_offset_of_1e10_keeps_precision():
    row = np.array([-2.0, -1.0, 1.0, 2.0] * 4)
    y = oracle.layer_norm(row + 1e10, np.ones(16), np.zeros(16))
    assert np.allclose(y, oracle.layer_norm(row, np.ones(16), np.zeros(16)), rtol=1e-12)


@pytest.mark.parametrize("width", [1, 2, 33])
def test_gradients_match_differences(width):
    rng = np.random.default_rng(width)
    x, dy = rng.standard_normal((2, 4, 3, width))
    gamma, beta = rng.standard_normal((2, width))
    grads = oracle.layer_norm_backward(dy, x, gamma)
    # A single feature is constant after centring: both sides are zero up to rounding.
    inputs = (x, gamma, beta) if width > 1 else (gamma, beta)

    def forward(*args):
        return oracle.layer_norm(*args) if width > 1 else oracle.layer_norm(x, *args)

    errors = testing.gradient_errors(forward, grads[-len(inputs) :], inputs, dy)
    # Two features are ±1 after the norm, whatever x: what is left of dx is small, its error not.
    assert max(errors) < (1e-6 if width == 2 else 1e-8)
    if width == 1:
        assert not grads.dx.any()


def test_rms_gradients_match_differences():
    rng = np.random.default_rng(5)
    x, dy = rng.standard_normal((2, 4, 3, 17))
    gamma = rng.standard_normal(17)
    grads = oracle.rms_norm_backward(dy, x, gamma)
    assert max(testing.gradient_errors(oracle.rms_norm, grads, (x, gamma), dy)) < 1e-8


def test_a_constant_row_gives_beta_and_no_gradient():
    x = np.full((2, 8), 5.0)
    gamma, beta = np.random.default_rng(0).standard_normal((2, 8))
    assert np.array_equal(oracle.layer_norm(x, gamma, beta), np.broadcast_to(beta, (2, 8)))
    grads = oracle.layer_norm_backward(np.ones((2, 8)), x, np.ones(8))
    assert np.allclose(grads.dx, 0)


def test_zero_rows_are_accepted():
    grads = oracle.layer_norm_backward(np.zeros((0, 4)), np.zeros((0, 4)), np.ones(4))
    assert grads.dx.shape == (0, 4)
    assert not grads.dgamma.any()
