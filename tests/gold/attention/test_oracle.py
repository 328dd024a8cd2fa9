"""The untiled oracle against the definition and small steps; the tiled one against the untiled."""

import math

import numpy as np
import pytest

from trapline.gold import testing
from trapline.gold.attention import oracle


def by_hand(q, k, v, causal, window, softcap):
    """One query and one key at a time, in plain Python numbers."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, h, t in np.ndindex(B, H, T):
        g, here = h // (H // G), t + S - T
        terms = []
        for s in range(S):
            if (causal and s > here) or (window is not None and abs(s - here) >= window):
                continue
            score = sum(float(x) * float(y) for x, y in zip(q[b, h, t], k[b, g, s], strict=True))
            score /= math.sqrt(D)
            if softcap:
                score = softcap * math.tanh(score / softcap)
            terms.append((math.exp(score), v[b, g, s]))
        if terms:
            total = sum(weight for weight, _ in terms)
            lse[b, h, t] = math.log(total)
            out[b, h, t] = sum(weight / total * value for weight, value in terms)
    return out, lse


def test_untiled_forward_agrees_with_the_definition(problem, rules):
    q, k, v, _ = problem
    out, lse = oracle.attention(q, k, v, **rules)
    want_out, want_lse = by_hand(q, k, v, *rules.values())
    np.testing.assert_allclose(out, want_out, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, atol=1e-13)


@pytest.mark.parametrize("tile", [1, 4, 64])
def test_tiled_forward_agrees(problem, rules, tile):
    q, k, v, _ = problem
    pairs = zip(
        oracle.attention_tiled(q, k, v, tile=tile, **rules),
        oracle.attention(q, k, v, **rules),
        strict=True,
    )
    for tiled, whole in pairs:
        np.testing.assert_allclose(tiled, whole, atol=1e-13)


@pytest.mark.parametrize("tile", [1, 4, 64])
def test_tiled_backward_agrees(problem, rules, tile):
    q, k, v, dout = problem
    saved = oracle.attention(q, k, v, **rules)
    dlse = np.random.default_rng(7).standard_normal(q.shape[:3])
    pairs = zip(
        oracle.attention_backward_tiled(dout, q, k, v, *saved, dlse=dlse, tile=tile, **rules),
        oracle.attention_backward(dout, q, k, v, dlse=dlse, **rules),
        strict=True,
    )
    for tiled, whole in pairs:
        np.testing.assert_allclose(tiled, whole, atol=1e-12)


def test_backward_agrees_with_finite_differences(rules):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 1, 4, 6, 3))
    k, v = rng.standard_normal((2, 1, 2, 5, 3))
    grads = oracle.attention_backward(dout, q, k, v, **rules)
    errors = testing.gradient_errors(
        lambda *inputs: oracle.attention(*inputs, **rules)[0], grads, (q, k, v), dout
    )
    assert max(errors) < 1e-8


def test_gradients_through_the_log_sum_exp_agree_with_finite_differences(rules):
    rng = np.random.default_rng(6)
    q, dout = rng.standard_normal((2, 1, 4, 6, 3))
    # As many keys as queries: no row is empty, so every lse is finite.
    k, v = rng.standard_normal((2, 1, 2, 6, 3))
    dlse = rng.standard_normal((1, 4, 6))

    def both(*inputs):
        out, lse = oracle.attention(*inputs, **rules)
        return np.concatenate([out, lse[..., None]], axis=-1)

    grads = oracle.attention_backward(dout, q, k, v, dlse=dlse, **rules)
    upstream = np.concatenate([dout, dlse[..., None]], axis=-1)
    assert max(testing.gradient_errors(both, grads, (q, k, v), upstream)) < 1e-8


def test_scale_replaces_the_default():
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 1, 1, 4, 9))
    for name, function, inputs in (
        ("forward", oracle.attention, (q, k, v)),
        ("tiled", oracle.attention_tiled, (q, k, v)),
        ("backward", oracle.attention_backward, (dout, q, k, v)),
    ):
        default, same = function(*inputs), function(*inputs, scale=1 / 3)
        other = function(*inputs, scale=1.0)
        for a, b in zip(default, same, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-14, err_msg=name)
        assert np.abs(default[0] - other[0]).max() > 1e-3, name


def test_rows_without_keys_give_zeros():
    rng = np.random.default_rng(2)
    q, dout = rng.standard_normal((2, 1, 1, 5, 3))
    k, v = rng.standard_normal((2, 1, 1, 2, 3))
    out, lse = oracle.attention(q, k, v, causal=True)
    assert not out[:, :, :3].any()
    assert np.all(lse[:, :, :3] == -np.inf)
    dq, dk, dv = oracle.attention_backward(dout, q, k, v, causal=True)
    assert not dq[:, :, :3].any()
    tail = oracle.attention_backward(dout[:, :, 3:], q[:, :, 3:], k, v, causal=True)
    np.testing.assert_allclose(dk, tail[1], atol=1e-14)
    np.testing.assert_allclose(dv, tail[2], atol=1e-14)


def test_scores_in_the_thousands():
    q = np.full((1, 1, 2, 4), 2.0)
    k = np.zeros((1, 1, 3, 4))
    k[0, 0, :, 0] = [5000.0, -5000.0, 5000.0]
    v = np.arange(12.0).reshape(1, 1, 3, 4)
    for function in (oracle.attention, lambda *a: oracle.attention_tiled(*a, tile=2)):
        out, lse = function(q, k, v)
        np.testing.assert_allclose(out[0, 0, 0], [4.0, 5.0, 6.0, 7.0])
        np.testing.assert_allclose(lse, 5000.0 + np.log(2.0))


def test_float32_inputs_are_computed_in_float64():
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 1, 1, 6, 4)).astype(np.float32)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    for function in (oracle.attention, oracle.attention_tiled):
        for a, b in zip(function(q, k, v), function(*wide), strict=True):
            np.testing.assert_array_equal(a, b)
