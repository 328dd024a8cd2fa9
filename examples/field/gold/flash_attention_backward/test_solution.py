"""Tests of both passes against the definition, small steps, and of what tiling must keep."""

import numpy as np
import pytest
from solution import flash_attention, flash_attention_backward

RNG = np.random.default_rng(11)


def draw(B=1, H=1, G=1, T=6, S=6, D=4, dtype=np.float64):
    """dout, q, k, v of standard normal values."""
    shapes = ((B, H, T, D), (B, H, T, D), (B, G, S, D), (B, G, S, D))
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def row_by_row(dout, q, k, v, causal):
    """The definition, query by query, with the softmax's Jacobian written out."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, h, t in np.ndindex(B, H, T):
        g = h // (H // G)
        n = max(0, min(S, t + S - T + 1)) if causal else S
        if n == 0:
            continue
        scores = k[b, g, :n].astype(float) @ q[b, h, t] / D**0.5
        lse[b, h, t] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        p = np.exp(scores - lse[b, h, t])
        out[b, h, t] = p @ v[b, g, :n]
        jacobian = np.diag(p) - np.outer(p, p)
        ds = jacobian @ (v[b, g, :n] @ dout[b, h, t]) / D**0.5
        dq[b, h, t] = ds @ k[b, g, :n]
        dk[b, g, :n] += np.outer(ds, q[b, h, t])
        dv[b, g, :n] += np.outer(p, dout[b, h, t])
    return (out, lse), (dq, dk, dv)


def assert_right(dout, q, k, v, causal=False, tile=64, atol=1e-11):
    saved, grads = row_by_row(dout, q, k, v, causal)
    got_saved = flash_attention(q, k, v, causal=causal, tile=tile)
    foreign = [x.astype(q.dtype) for x in saved]
    for source in (got_saved, foreign):
        got = flash_attention_backward(dout, q, k, v, *source, causal=causal, tile=tile)
        assert len(got) == 3
        for a, b in zip((*got_saved, *got), (*saved, *grads), strict=True):
            assert a.dtype == q.dtype
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "S"), [(8, 8), (3, 11), (11, 3), (1, 9), (9, 1), (8, 9)])
def test_lengths_and_tiles(T, S, causal):
    arrays = draw(T=T, S=S)
    for tile in (1, 3, 4, 100):
        assert_right(*arrays, causal, tile)


@pytest.mark.parametrize(("H", "G"), [(2, 2), (6, 3), (4, 1), (8, 2)])
def test_groups_are_summed(H, G):
    for causal in (False, True):
        assert_right(*draw(B=2, H=H, G=G, T=5, S=6, D=3), causal=causal, tile=2)


def test_uneven_tiles():
    for causal in (False, True):
        assert_right(*draw(T=30, S=30), causal=causal, tile=13)


def test_defaults_are_full_attention_in_tiles_of_64():
    dout, q, k, v = draw(T=4, S=4)
    out, lse = flash_attention(q, k, v)
    np.testing.assert_array_equal(out, flash_attention(q, k, v, causal=False, tile=64)[0])
    got = flash_attention_backward(dout, q, k, v, out, lse)
    for a, b in zip(got, row_by_row(dout, q, k, v, False)[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_float32_stays_float32_and_is_close():
    for causal in (False, True):
        assert_right(*draw(T=12, S=12, dtype=np.float32), causal=causal, tile=5, atol=1e-4)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_small_steps(which):
    dout, *inputs = draw(H=2, G=1, T=5, S=6)
    saved = flash_attention(*inputs, causal=True, tile=4)
    grad = flash_attention_backward(dout, *inputs, *saved, causal=True, tile=4)[which]
    step = RNG.standard_normal(grad.shape)
    step *= 1e-4 / np.linalg.norm(step)
    values = []
    for sign in (1, -1):
        moved = [x + sign * step if i == which else x for i, x in enumerate(inputs)]
        values.append(np.sum(dout * flash_attention(*moved, causal=True, tile=4)[0]))
    np.testing.assert_allclose(
        np.sum(grad * step), (values[0] - values[1]) / 2, rtol=1e-5, atol=1e-11
    )


def test_growing_and_falling_scores():
    """The running maximum rises in every tile, or never after the first; weights stay finite."""
    for slope in (1.0, -1.0, 300.0, -300.0):
        dout, q, k, v = draw(T=3, S=12)
        q[...] = 1.0
        k[...] = slope / 2 * np.arange(12.0)[:, None]
        assert_right(dout, q, k, v, tile=3, atol=1e-9)


def test_rows_of_different_size_share_a_tile():
    dout, q, k, v = draw(T=3, S=5)
    k[..., 0] = 1.0
    q[0, 0, :, 0] = [4000.0, 0.0, -4000.0]
    assert_right(dout, q, k, v, tile=2, atol=1e-6)


def test_huge_scores_below_zero_with_a_mask():
    dout, q, k, v = draw(T=6, S=6)
    q[..., 0], k[..., 0] = 1.0, -6e4
    q[..., 1:], k[..., 1:] = 1.0, 0.0
    assert_right(dout, q, k, v, causal=True, tile=4, atol=1e-6)


def test_rows_without_keys():
    dout, q, k, v = draw(H=2, G=1, T=9, S=4)
    dout[:, :, :5] *= 1000.0
    for tile in (2, 3, 5, 16):
        out, lse = flash_attention(q, k, v + 5, causal=True, tile=tile)
        assert not out[:, :, :5].any()
        assert np.all(lse[:, :, :5] == -np.inf)
        assert np.isfinite(lse[:, :, 5:]).all()
        assert_right(dout, q, k, v, causal=True, tile=tile)


@pytest.mark.parametrize("empty", [{"B": 0}, {"T": 0}, {"S": 0}, {"T": 0, "S": 0}])
def test_empty_problems(empty):
    for causal in (False, True):
        assert_right(*draw(**empty), causal=causal, tile=3)


def test_views_are_read_as_views():
    base = [RNG.standard_normal((2, 10, 4, 6)) for _ in range(4)]
    views = [x.transpose(0, 2, 1, 3)[:, :, ::-2, ::2] for x in base]
    assert_right(*views, causal=True, tile=2)
    views[0] = np.broadcast_to(1.5, views[1].shape)
    assert_right(*views, causal=True, tile=2)


def test_inputs_are_left_alone_and_nothing_is_remembered():
    first, second = draw(T=7, S=5), draw(T=7, S=5)
    for dout, q, k, v in (first, second, first):
        saved = flash_attention(q, k, v, causal=True, tile=2)
        given = [dout, q, k, v, *saved]
        copies = [x.copy() for x in given]
        flash_attention_backward(*given, causal=True, tile=2)
        for x, copy in zip(given, copies, strict=True):
            np.testing.assert_array_equal(x, copy)
        assert_right(dout, q, k, v, causal=True, tile=2)


def test_another_problem_in_between_changes_nothing():
    dout, q, k, v = draw(T=5, S=5)
    saved = flash_attention(q, k, v)
    before = flash_attention_backward(dout, q, k, v, *saved)
    flash_attention(*draw(T=5, S=5)[1:])
    after = flash_attention_backward(dout, q, k, v, *saved)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_input_is_refused():
    dout, q, k, v = draw(B=2, H=4, G=2, T=5, S=6)
    out, lse = flash_attention(q, k, v)
    bad_inputs = [
        (q[0], k, v),
        (q, k[0], v[0]),
        (q, k[..., :2], v[..., :2]),
        (q, k, v[:, :, :3]),
        (q[:1], k, v),
        (q[:, :3], k, v),
        (q.astype(int), k, v),
        (q, k.astype(int), v),
        (q, k, v.astype(complex)),
        (q.tolist(), k, v),
    ]
    for arrays in bad_inputs:
        with pytest.raises((ValueError, TypeError)):
            flash_attention(*arrays)
        with pytest.raises((ValueError, TypeError)):
            flash_attention_backward(dout, *arrays, out, lse)
    bad_saved = [
        (dout[..., :1], out, lse),
        (dout, out[:, :, :1], lse),
        (dout, out, lse[:1]),
        (dout, out, np.pad(lse, ((0, 0), (0, 0), (0, 1)))),
        (dout.astype(int), out, lse),
        (dout, out.astype(int), lse),
        (dout, out, lse.astype(int)),
    ]
    for upstream, saved_out, saved_lse in bad_saved:
        with pytest.raises((ValueError, TypeError)):
            flash_attention_backward(upstream, q, k, v, saved_out, saved_lse)
    for tile in (0, -2):
        with pytest.raises(ValueError, match="tile"):
            flash_attention_backward(dout, q, k, v, out, lse, tile=tile)


def test_no_score_matrix_is_held():
    import tracemalloc

    peaks = []
    for n in (256, 1024):
        dout, q, k, v = draw(T=n, S=n, dtype=np.float32)
        saved = flash_attention(q, k, v, tile=64)
        tracemalloc.start()
        flash_attention_backward(dout, q, k, v, *saved, tile=64)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 8 * peaks[0]


def test_huge_scores_give_finite_gradients():
    """A weight stays at most 1 although float32 scores and lse near 1e12 are rounded apart."""
    dout, q, k, v = draw(T=128, S=8, D=3, dtype=np.float32)
    q, k = q * np.float32(1e6), k * np.float32(1e6)
    out, lse = (x.astype(np.float32) for x in row_by_row(dout, q, k, v, False)[0])
    for grad in flash_attention_backward(dout, q, k, v, out, lse, tile=16):
        assert np.isfinite(grad).all()


def test_scores_below_any_sentinel():
    dout, q, k, v = draw(T=6, S=6)
    q[...], k[...] = 0.0, 0.0
    q[..., 0], k[..., 0] = 1.0, -1e200 * np.arange(1, 7)
    saved = flash_attention(q, k, v, causal=True, tile=4)
    np.testing.assert_allclose(saved[0], np.broadcast_to(v[:, :, :1], v.shape), rtol=1e-14)
    dv = flash_attention_backward(dout, q, k, v, *saved, causal=True, tile=4)[2]
    np.testing.assert_allclose(dv[:, :, 0], dout.sum(axis=2), atol=1e-12)


def test_rows_without_keys_may_hold_the_largest_numbers():
    dout, q, k, v = draw(T=7, S=4, dtype=np.float32)
    dout[:, :, :3] = 3e38
    assert_right(dout, q, k, np.abs(v) + 1, causal=True, tile=16, atol=1e-4)


def test_values_of_zero_still_get_a_gradient():
    dout, q, k, v = draw(T=6, S=6)
    assert_right(dout, q, k, 0 * v, causal=True, tile=4)
