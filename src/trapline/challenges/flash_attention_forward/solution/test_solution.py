"""Tests of flash_attention against the definition, and of the properties that tiling must keep."""

import itertools

import numpy as np
import pytest
from solution import flash_attention

RNG = np.random.default_rng(7)


def draw(B=1, H=1, G=1, T=8, S=8, D=4, dtype=np.float64):
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, D))
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def row_by_row(q, k, v, causal):
    """The definition: one query, one key at a time."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, h, t in np.ndindex(B, H, T):
        g = h // (H // G)
        keys = [j for j in range(S) if not causal or j <= t + S - T]
        if not keys:
            continue
        scores = np.array([float(q[b, h, t] @ k[b, g, j]) / D**0.5 for j in keys])
        lse[b, h, t] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        for score, j in zip(scores, keys, strict=True):
            out[b, h, t] += np.exp(score - lse[b, h, t]) * v[b, g, j]
    return out, lse


def assert_right(q, k, v, causal=False, tile=64, atol=1e-12):
    out, lse = flash_attention(q, k, v, causal=causal, tile=tile)
    want_out, want_lse = row_by_row(q, k, v, causal)
    assert out.dtype == lse.dtype == q.dtype
    assert out.shape == want_out.shape
    assert lse.shape == want_lse.shape
    np.testing.assert_allclose(out, want_out, rtol=0, atol=atol)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=atol)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "S"), [(8, 8), (3, 11), (11, 3), (1, 9), (9, 1)])
def test_lengths_and_tiles(T, S, causal):
    q, k, v = draw(T=T, S=S)
    for tile in (1, 2, 3, 4, 8, 100):
        assert_right(q, k, v, causal, tile)


@pytest.mark.parametrize(("H", "G"), [(2, 2), (6, 3), (4, 1), (8, 2)])
def test_grouped_heads_and_batches(H, G):
    assert_right(*draw(B=2, H=H, G=G, T=5, S=6, D=3), causal=True, tile=2)


def test_uneven_tiles():
    q, k, v = draw(T=60, S=60)
    for causal in (False, True):
        assert_right(q, k, v, causal, tile=19)


def test_default_is_full_attention():
    q, k, v = draw(T=4, S=4)
    np.testing.assert_array_equal(flash_attention(q, k, v)[0], flash_attention(q, k, v, tile=64)[0])
    assert_right(q, k, v)


def test_float32_stays_float32_and_is_close():
    q, k, v = draw(T=20, S=20, dtype=np.float32)
    for causal in (False, True):
        assert_right(q, k, v, causal, tile=8, atol=1e-5)


def test_first_causal_row_is_the_first_value():
    q, k, v = draw(H=2, G=2, T=6, S=6)
    out, lse = flash_attention(q, k, v, causal=True, tile=4)
    np.testing.assert_allclose(out[:, :, 0], v[:, :, 0], atol=1e-14)
    np.testing.assert_allclose(lse[0, :, 0], np.sum(q * k, axis=3)[0, :, 0] / 2, atol=1e-14)


def test_the_future_does_not_matter():
    q, k, v = draw(T=9, S=9)
    before = flash_attention(q, k, v, causal=True, tile=4)[0]
    k[:, :, 5:], v[:, :, 5:] = 3.0, -7.0
    after = flash_attention(q, k, v, causal=True, tile=4)[0]
    np.testing.assert_array_equal(after[:, :, :5], before[:, :, :5])


def test_growing_and_falling_scores():
    """The running maximum rises in every tile, or never after the first."""
    q = np.full((1, 1, 3, 4), 1.0)
    v = RNG.standard_normal((1, 1, 12, 4))
    for scores in (
        np.arange(12.0),
        -np.arange(12.0),
        np.arange(12.0) * 300,
        np.arange(12.0) * -300,
    ):
        k = np.broadcast_to(scores[None, None, :, None] / 2, (1, 1, 12, 4))
        assert_right(q, k, v, tile=3, atol=1e-11)


def test_huge_scores_of_either_sign():
    for shift in (1e4, -1e4):
        q, k, v = draw(T=5, S=7, dtype=np.float32)
        q[...], k[...] = 1.0, RNG.integers(-3, 3, k.shape)
        k[..., 0] += 2 * shift
        out, lse = flash_attention(q, k, v, causal=True, tile=2)
        want_out, want_lse = row_by_row(q, k, v, causal=True)
        np.testing.assert_allclose(out, want_out, atol=1e-2)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


def test_rows_without_keys():
    q, k, v = draw(T=9, S=4)
    for tile in (2, 3, 5, 16):
        out, lse = flash_attention(q, k, v + 5, causal=True, tile=tile)
        assert not out[:, :, :5].any()
        assert np.all(lse[:, :, :5] == -np.inf)
        assert np.isfinite(lse[:, :, 5:]).all()


@pytest.mark.parametrize("empty", [{"B": 0}, {"T": 0}, {"S": 0}, {"T": 0, "S": 0}])
def test_empty_problems(empty):
    for causal in (False, True):
        assert_right(*draw(**empty), causal=causal, tile=3)


def test_views_are_read_as_views():
    base = [RNG.standard_normal((2, 10, 4, 6)) for _ in range(3)]
    q, k, v = (x.transpose(0, 2, 1, 3)[:, :, ::-2, ::2] for x in base)
    assert_right(q, k, v, causal=True, tile=2)


def test_inputs_are_left_alone_and_nothing_is_remembered():
    first, second = draw(T=5, S=5, D=3), draw(T=5, S=5, D=3)
    copies = [x.copy() for x in first]
    for arrays in (first, second, first):
        assert_right(*arrays, causal=True, tile=2)
    for x, copy in zip(first, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_bad_input_is_refused():
    q, k, v = draw(B=2, H=4, G=2, T=5, S=6)
    bad = [
        (q[0], k, v),
        (q, k[0], v[0]),
        (q, k[..., :2], v[..., :2]),
        (q, k, v[:, :, :3]),
        (q[:1], k, v),
        (q[:, :3], k, v),
        (q.astype(int), k, v),
        (q, k.astype(int), v),
        (q, k, v.astype(int)),
        (q, k, v.astype(complex)),
        (q, k, v[..., :1]),
        (q.tolist(), k, v),
    ]
    for arrays in bad:
        with pytest.raises((ValueError, TypeError)):
            flash_attention(*arrays)
    for tile in (0, -2):
        with pytest.raises(ValueError, match="tile"):
            flash_attention(q, k, v, tile=tile)


def test_no_score_matrix_is_held():
    import tracemalloc

    peaks = []
    for n in (256, 1024):
        q, k, v = draw(T=n, S=n, dtype=np.float32)
        tracemalloc.start()
        flash_attention(q, k, v, tile=32)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 8 * peaks[0]


def test_every_combination_agrees_with_one_tile():
    for H, causal, tile in itertools.product((1, 2), (False, True), (3, 7)):
        q, k, v = draw(H=H, T=17, S=23, D=5)
        whole = flash_attention(q, k, v, causal=causal, tile=23)
        tiled = flash_attention(q, k, v, causal=causal, tile=tile)
        for a, b in zip(whole, tiled, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-13)


def test_empty_problems_are_checked_too():
    for empty in ({"B": 0}, {"T": 0}, {"S": 0}):
        with pytest.raises(ValueError, match="heads"):
            flash_attention(*draw(H=3, G=2, **empty))
        with pytest.raises(ValueError, match="tile"):
            flash_attention(*draw(**empty), tile=0)


def test_scores_below_any_sentinel():
    q, k, v = draw(T=6, S=6)
    q[...], k[...] = 0.0, 0.0
    q[..., 0], k[..., 0] = 1.0, -1e200 * np.arange(1, 7)
    out, lse = flash_attention(q, k, v, causal=True, tile=4)
    np.testing.assert_allclose(out, np.broadcast_to(v[:, :, :1], v.shape), rtol=1e-14)
    np.testing.assert_allclose(lse, np.full(lse.shape, -0.5e200), rtol=1e-14)


def test_a_maximum_that_rises_very_slowly():
    q, k, v = draw(T=3, S=12)
    q[...], k[...] = 0.5, 5e-7 * np.arange(12.0)[:, None]
    assert_right(q, k, v, tile=2)
