"""Tests of the fused softmax and top-k against a plain full softmax with a Python sort."""

import numpy as np
import pytest
import solution
from solution import softmax_topk

DTYPES = [np.float16, np.float32, np.float64]


def plainly(logits, k):
    """Full softmax in float64, then sorted() by (−logit, index)."""
    probs, indices = [], []
    for row in logits.astype(np.float64):
        with np.errstate(over="ignore"):
            weights = np.exp(row - row.max())
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        probs.append((weights / weights.sum())[order])
        indices.append(order)
    shape = (len(logits), k)
    return np.array(probs).reshape(shape), np.array(indices, np.int64).reshape(shape)


def check(logits, k):
    probs, indices = softmax_topk(logits, k)
    want, order = plainly(logits, k)
    assert probs.dtype == logits.dtype
    assert indices.dtype == np.int64
    assert np.array_equal(indices, order)
    eps = np.finfo(logits.dtype).eps
    assert np.allclose(probs, want, rtol=4 * eps, atol=np.finfo(logits.dtype).smallest_subnormal)


@pytest.fixture(params=[3, 64, 8192])
def tile(request, monkeypatch):
    monkeypatch.setattr(solution, "TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "k"), [(3, 10, 4), (1, 1, 1), (2, 65, 65), (3, 129, 40)])
def test_random_rows(dtype, rows, width, k):
    check((3 * np.random.default_rng(k).standard_normal((rows, width))).astype(dtype), k)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("k", [1, 5, 20])
def test_ties_go_to_the_lower_index(k):
    check(np.random.default_rng(k).integers(-2, 3, (4, 70)).astype(np.float32), k)
    check(np.zeros((2, 70)), k)


@pytest.mark.usefixtures("tile")
def test_later_equals_never_displace_earlier_ones():
    logits = np.zeros((1, 30))
    logits[0, 20] = 1.0
    assert softmax_topk(logits, 4)[1].tolist() == [[20, 0, 1, 2]]


@pytest.mark.usefixtures("tile")
def test_signed_zeros_are_equal():
    assert softmax_topk(np.array([[-0.0, 0.0, -0.0, 0.0]]), 4)[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("direction", [1, -1])
def test_sorted_rows(direction):
    check(np.linspace(-30, 30, 200)[None, ::direction], 9)


@pytest.mark.usefixtures("tile")
def test_masked_tiles():
    for hidden in (slice(0, 60), slice(5, 70), slice(3, 67)):
        logits = np.random.default_rng(0).standard_normal((2, 70)).astype(np.float32)
        logits[:, hidden] = -np.inf
        check(logits, 12)


@pytest.mark.usefixtures("tile")
def test_the_best_may_stand_together_or_apart():
    logits = np.random.default_rng(0).standard_normal((2, 400))
    logits[0, 100:140] += 50
    logits[1, ::10] += 50
    check(logits, 40)


@pytest.mark.parametrize("offset", [-1e4, 1e4, 3e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(dtype, offset):
    check((np.arange(20.0)[None] * 32 + offset).astype(dtype), 5)


def test_the_whole_range_of_a_dtype():
    for dtype in DTYPES:
        info = np.finfo(dtype)
        logits = np.array(
            [[info.min, info.max, 0, info.max], [info.min, info.min, info.min, 0]], dtype
        )
        check(logits, 4)
    probs, _ = softmax_topk(np.full((1, 4), 1e17), 4)
    assert probs.tolist() == [[0.25] * 4]


@pytest.mark.usefixtures("tile")
def test_ranked_by_logit_where_probabilities_vanish():
    logits = np.array([[0.0, -900.0, -800.0, -1000.0]], np.float32)
    assert softmax_topk(logits, 4)[1].tolist() == [[0, 2, 1, 3]]
    close = np.array([[1.0, 1.0 + 2**-52, 1.0 - 2**-53]])
    assert softmax_topk(close, 3)[1].tolist() == [[1, 0, 2]]


def test_float16_sums_are_wide():
    probs, _ = softmax_topk(np.zeros((1, 70001), np.float16), 2)
    assert probs.tolist() == [[float(np.float16(1 / 70001))] * 2]


@pytest.mark.usefixtures("tile")
def test_rows_do_not_influence_each_other():
    logits = np.random.default_rng(1).standard_normal((5, 40)) * np.array(
        [[1], [1e3], [1e-3], [50], [0]]
    )
    together = softmax_topk(logits, 6)
    for row in range(5):
        alone = softmax_topk(logits[row : row + 1], 6)
        assert all(np.array_equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_indices_beyond_16_bits():
    logits = np.zeros((1, 70001), np.float32)
    logits[0, 70000] = 9.0
    assert softmax_topk(logits, 2)[1].tolist() == [[70000, 0]]


@pytest.mark.usefixtures("tile")
def test_views_and_untouched_inputs():
    wide = np.random.default_rng(2).standard_normal((8, 60))
    before = wide.copy()
    for view in (
        wide[::3],
        wide[:, ::2],
        wide[::-1, ::-1],
        wide.T,
        np.broadcast_to(wide[:1], (3, 60)),
    ):
        check(view, 5)
    assert np.array_equal(wide, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype):
    probs, indices = softmax_topk(np.zeros((0, 7), dtype), 3)
    assert probs.shape == indices.shape == (0, 3)
    assert (probs.dtype, indices.dtype) == (dtype, np.int64)


@pytest.mark.parametrize("k", [0, -1, 8])
@pytest.mark.parametrize("rows", [0, 2])
def test_k_out_of_range(k, rows):
    with pytest.raises(ValueError, match="k must be"):
        softmax_topk(np.zeros((rows, 7)), k)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 33, 69])
def test_nan_and_infinity_are_refused(bad, place):
    logits = np.zeros((2, 70), np.float32)
    logits[1, place] = bad
    with pytest.raises(ValueError, match="NaN"):
        softmax_topk(logits, 2)


@pytest.mark.usefixtures("tile")
def test_a_row_of_minus_infinity_is_refused():
    logits = np.zeros((2, 70))
    logits[1] = -np.inf
    with pytest.raises(ValueError, match="all -inf"):
        softmax_topk(logits, 2)


@pytest.mark.parametrize(
    "logits",
    [np.zeros(5), np.zeros((1, 2, 5)), np.zeros((2, 5), int), np.zeros((2, 5), complex)],
)
def test_bad_arrays_are_refused(logits):
    with pytest.raises((ValueError, TypeError)):
        softmax_topk(logits, 2)
