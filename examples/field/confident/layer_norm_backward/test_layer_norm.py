"""Comprehensive test suite."""

import numpy as np
import pytest
from solution import gradient_check, layer_norm_backward, layer_norm_forward


@pytest.fixture
def sample():
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((2, 3, 6)),
        rng.standard_normal(6),
        rng.standard_normal(6),
        rng.standard_normal((2, 3, 6)),
    )


class TestForward:
    @pytest.mark.parametrize("shape", [(1, 1, 4), (2, 3, 8), (4, 1, 16)])
    def test_statistics(self, shape):
        x = np.random.default_rng(1).standard_normal(shape) * 5 + 2
        y, _ = layer_norm_forward(x, np.ones(shape[-1]), np.zeros(shape[-1]))
        assert np.allclose(y.mean(-1), 0)
        assert np.allclose(y.std(-1), 1, atol=1e-3)

    def test_affine(self, sample):
        x, gamma, beta, _ = sample
        plain, _ = layer_norm_forward(x, np.ones(6), np.zeros(6), 0.2)
        assert np.allclose(layer_norm_forward(x, gamma, beta, 0.2)[0], gamma * plain + beta)
        assert np.allclose(plain * np.sqrt(x.var(-1, keepdims=True) + 0.2) + x.mean(-1, keepdims=True), x)

    def test_large_mean(self, sample):
        x, gamma, beta, _ = sample
        a, b = (layer_norm_forward(x + shift, gamma, beta)[0] for shift in (0, 1e6))
        assert np.allclose(a, b, atol=1e-6)

    def test_constant(self):
        y, _ = layer_norm_forward(np.ones((1, 2, 4)), np.ones(4), np.zeros(4))
        assert not y.any()


class TestBackward:
    def test_gradients(self, sample):
        errors = gradient_check(layer_norm_forward, layer_norm_backward, *sample)
        assert max(errors.values()) < 1e-8

    def test_wrong_gradients_fail(self, sample):
        errors = gradient_check(
            layer_norm_forward, lambda dy, c: [g * 1.3 for g in layer_norm_backward(dy, c)], *sample
        )
        assert min(errors.values()) > 0.2

    def test_float32(self, sample):
        x, gamma, beta, dy = (a.astype(np.float32) for a in sample)
        y, cache = layer_norm_forward(x, gamma, beta)
        assert y.dtype == np.float32
        assert {g.dtype for g in layer_norm_backward(dy, cache)} == {np.dtype(np.float32)}


class TestValidation:
    def test_refusals(self, sample):
        x, gamma, beta, _ = sample
        for bad in ((x[0], gamma, beta), (x, gamma[:1], beta), (x, gamma, beta[None]), (x, gamma, beta, -1)):
            with pytest.raises(ValueError):
                layer_norm_forward(*bad)
        with pytest.raises(TypeError):
            layer_norm_forward(x.astype(int), gamma, beta)
