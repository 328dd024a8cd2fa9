import numpy as np
import pytest
from solution import flash_attention


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
    out = np.einsum("bhts,bhsd->bhtd", p, v) / np.where(l == 0, 1, l)
    with np.errstate(divide="ignore"):
        return out, (m + np.log(l))[..., 0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 2, 16, 16, 8), (2, 4, 2, 7, 13, 4), (1, 2, 1, 13, 7, 4)])
@pytest.mark.parametrize("tile", [1, 5, 64])
def test_against_reference(shape, causal, tile):
    B, H, G, T, S, D = shape
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, H, T, D))
    k, v = rng.normal(size=(2, B, G, S, D))
    out, lse = flash_attention(q, k, v, causal=causal, tile=tile)
    want_out, want_lse = reference(q, k, v, causal)
    np.testing.assert_allclose(out, want_out, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, atol=1e-12)


def test_uneven_tiles_and_float32():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 1, 1, 300, 8)).astype(np.float32)
    out, lse = flash_attention(q, k, v, causal=True, tile=97)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, reference(q, k, v, True)[0], atol=1e-5)


def test_large_scores():
    q = np.full((1, 1, 4, 4), 100.0)
    k = np.linspace(-50, 50, 32).reshape(1, 1, 8, 4)
    out, _ = flash_attention(q, k, k, tile=3)
    np.testing.assert_allclose(out, reference(q, k, k, False)[0], atol=1e-9)


def test_bad_input():
    q = np.zeros((1, 3, 4, 4))
    k = np.zeros((1, 2, 4, 4))
    with pytest.raises(ValueError):
        flash_attention(q, k, k)
    with pytest.raises(ValueError):
        flash_attention(q[:, :2], k, k, tile=0)
    with pytest.raises(TypeError):
        flash_attention(q[:, :2].astype(int), k, k)
