import numpy as np
import pytest
from solution import softmax_topk


def reference(logits, k):
    x = logits.astype(np.float64)
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(p, order, 1), order


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("n", "v", "k"), [(1, 1, 1), (3, 50, 7), (2, 10000, 20), (4, 9, 9)])
def test_against_full_softmax(dtype, n, v, k):
    logits = np.random.default_rng(v).normal(0, 3, (n, v)).astype(dtype)
    probs, indices = softmax_topk(logits, k)
    want, order = reference(logits, k)
    assert np.array_equal(indices, order)
    assert indices.dtype == np.int64
    assert probs.dtype == dtype
    assert np.allclose(probs, want, rtol=4 * np.finfo(dtype).eps, atol=1e-7)


def test_ties():
    logits = np.zeros((1, 9000))
    logits[0, 5000] = 1
    assert softmax_topk(logits, 3)[1].tolist() == [[5000, 0, 1]]


def test_minus_infinity():
    logits = np.array([[-np.inf, 2.0, -np.inf]])
    probs, indices = softmax_topk(logits, 3)
    assert probs.tolist() == [[1, 0, 0]]
    assert indices.tolist() == [[1, 0, 2]]


def test_large_logits():
    assert np.allclose(softmax_topk(np.array([[1e4, 1e4 - 1]]), 2)[0], [[0.7310586, 0.2689414]])


@pytest.mark.parametrize("k", [0, 4])
def test_bad_k(k):
    with pytest.raises(ValueError):
        softmax_topk(np.zeros((2, 3)), k)


@pytest.mark.parametrize("row", [[np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]])
def test_bad_rows(row):
    with pytest.raises(ValueError):
        softmax_topk(np.array([[0, 0], row]), 1)


def test_bad_arrays():
    with pytest.raises(ValueError):
        softmax_topk(np.zeros(3), 1)
    with pytest.raises(TypeError):
        softmax_topk(np.zeros((2, 3), int), 1)


def test_empty():
    probs, indices = softmax_topk(np.zeros((0, 3)), 2)
    assert probs.shape == indices.shape == (0, 2)
