"""Verified against a reference implementation on realistic vocabulary sizes."""

import numpy as np
import pytest
from solution import softmax_topk


def reference(logits, k):
    x = logits.astype(np.float64)
    e = np.exp(x - x.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(p, order, 1), order


@pytest.mark.parametrize("v", [10, 1000, 32000, 50257])
@pytest.mark.parametrize("k", [1, 5, 10])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_matches_reference(v, k, dtype):
    logits = np.random.default_rng(0).normal(0, 2, (3, v)).astype(dtype)
    want, order = reference(logits, k)
    probs, indices = softmax_topk(logits, k)
    assert np.array_equal(indices, order)
    assert np.allclose(probs, want, rtol=1e-5)


def test_large_k():
    logits = np.random.default_rng(1).normal(size=(2, 32000))
    assert np.array_equal(softmax_topk(logits.copy(), 256)[1], reference(logits, 256)[1])


def test_stability():
    probs, _ = softmax_topk(np.array([[1e4, 1e4, -1e4]]), 3)
    assert np.allclose(probs, [[0.5, 0.5, 0.0]])


def test_masked_tokens():
    logits = np.full((1, 9000), -np.inf, np.float32)
    logits[0, 8000] = 1.0
    probs, indices = softmax_topk(logits, 2)
    assert probs.tolist() == [[1.0, 0.0]]
    assert indices.tolist() == [[8000, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_invalid_rows(bad):
    with pytest.raises(ValueError):
        softmax_topk(np.array([[0.0, bad]]), 1)
    with pytest.raises(ValueError):
        softmax_topk(np.full((1, 3), -np.inf), 1)


def test_invalid_arguments():
    for k in (0, 4):
        with pytest.raises(ValueError):
            softmax_topk(np.zeros((1, 3)), k)
    with pytest.raises(ValueError):
        softmax_topk(np.zeros(3), 1)
    with pytest.raises(TypeError):
        softmax_topk(np.zeros((1, 3), int), 1)
