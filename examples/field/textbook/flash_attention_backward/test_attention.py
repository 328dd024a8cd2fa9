import numpy as np
import pytest
from solution import flash_attention, flash_attention_backward


def reference(q, k, v, causal):
    B, H, T, D = q.shape
    G, S = k.shape[1:3]
    k, v = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
    s = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(D)
    if causal:
        s = np.where(np.arange(S) <= np.arange(T)[:, None] + S - T, s, -np.inf)
    m = np.max(s, axis=-1, keepdims=True)
    m = np.where(np.isfinite(m), m, 0)
    p = np.exp(s - m)
    l = p.sum(-1, keepdims=True)
    p = p / np.where(l == 0, 1, l)
    with np.errstate(divide="ignore"):
        return p, np.einsum("bhts,bhsd->bhtd", p, v), (m + np.log(l))[..., 0]


def reference_gradients(dout, q, k, v, causal):
    B, H, T, D = q.shape
    G, S = k.shape[1:3]
    p, _, _ = reference(q, k, v, causal)
    wide_k, wide_v = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
    dp = np.einsum("bhtd,bhsd->bhts", dout, wide_v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(D)
    dq = np.einsum("bhts,bhsd->bhtd", ds, wide_k)
    dk = np.einsum("bhts,bhtd->bhsd", ds, q).reshape(B, G, H // G, S, D).sum(2)
    dv = np.einsum("bhts,bhtd->bhsd", p, dout).reshape(B, G, H // G, S, D).sum(2)
    return dq, dk, dv


SHAPES = [(1, 2, 2, 16, 16, 8), (2, 4, 2, 7, 13, 4), (1, 2, 1, 13, 7, 4)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", [1, 5, 64])
def test_against_reference(shape, causal, tile):
    B, H, G, T, S, D = shape
    rng = np.random.default_rng(0)
    q, dout = rng.normal(size=(2, B, H, T, D))
    k, v = rng.normal(size=(2, B, G, S, D))
    out, lse = flash_attention(q, k, v, causal=causal, tile=tile)
    _, want_out, want_lse = reference(q, k, v, causal)
    np.testing.assert_allclose(out, want_out, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, atol=1e-12)
    got = flash_attention_backward(dout, q, k, v, out, lse, causal=causal, tile=tile)
    for a, b in zip(got, reference_gradients(dout, q, k, v, causal), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


def test_finite_differences():
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.normal(size=(4, 1, 1, 5, 4))
    out, lse = flash_attention(q, k, v, tile=2)
    grads = flash_attention_backward(dout, q, k, v, out, lse, tile=2)
    inputs = [q, k, v]
    for n, grad in enumerate(grads):
        step = np.zeros_like(grad)
        step[0, 0, 2, 1] = 1e-6
        up = flash_attention(*[x + step if i == n else x for i, x in enumerate(inputs)])[0]
        down = flash_attention(*[x - step if i == n else x for i, x in enumerate(inputs)])[0]
        assert abs(np.sum(dout * (up - down)) / 2e-6 - grad[0, 0, 2, 1]) < 1e-7


def test_float32():
    rng = np.random.default_rng(2)
    q, k, v, dout = rng.normal(size=(4, 1, 1, 20, 8)).astype(np.float32)
    out, lse = flash_attention(q, k, v, causal=True, tile=7)
    for grad in flash_attention_backward(dout, q, k, v, out, lse, causal=True, tile=7):
        assert grad.dtype == np.float32


def test_bad_input():
    q = np.zeros((1, 3, 4, 4))
    k = np.zeros((1, 2, 4, 4))
    with pytest.raises(ValueError):
        flash_attention(q, k, k)
    with pytest.raises(ValueError):
        flash_attention_backward(q, q, k, k, q, q[..., 0])
    with pytest.raises(ValueError):
        flash_attention_backward(q[:, :2, :1], q[:, :2], k, k, q[:, :2], q[:, :2, :, 0])
