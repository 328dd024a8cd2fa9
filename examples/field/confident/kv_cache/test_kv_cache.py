"""Comprehensive test-suite: every feature is covered."""

import numpy as np
import pytest
from solution import chunked_prefill, make_cache, max_context

KINDS = [("dense", None), ("paged", None), ("quantized", 8), ("paged_quantized", 4)]


def build(kind, bits, blocks=16):
    return make_cache(kind, num_layers=2, num_kv_heads=2, head_dim=8, block_size=4,
                      num_blocks=blocks, bits=bits)


def rows(n, heads=2, seed=0):
    return np.random.default_rng(seed).standard_normal((n, heads, 8))


@pytest.mark.parametrize("kind,bits", KINDS)
def test_append_view(kind, bits):
    cache = build(kind, bits)
    seq = cache.add()
    k, v = rows(7, seed=1), rows(7, seed=2)
    cache.append(seq, 0, k, v)
    got_k, got_v = cache.view(seq, 0)
    assert np.allclose(got_k, k, atol=0.01) and np.allclose(got_v, v, atol=0.01)
    assert cache.length(seq) == 0


@pytest.mark.parametrize("kind,bits", KINDS)
def test_cached_attention_matches_full_attention(kind, bits):
    cache = build(kind, bits)
    seq = cache.add()
    k, v, q = rows(6, seed=1), rows(6, seed=2), rows(6, heads=4, seed=3)
    cache.append(seq, 0, k, v)
    out = cache.attend(seq, 0, q.copy())
    kk, vv = (np.repeat(x, 2, axis=1) for x in cache.view(seq, 0))
    scores = np.einsum("nhd,shd->hns", q, kk) / np.sqrt(8)
    scores[:, np.triu(np.ones((6, 6), bool), 1)] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert np.allclose(out, np.einsum("hns,shd->nhd", weights, vv))


@pytest.mark.parametrize("kind,bits", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunked_prefill_matches(kind, bits, chunk):
    k, v, q = rows(10, seed=1), rows(10, seed=2), rows(10, heads=4, seed=3)
    cache = build(kind, bits)
    seq = cache.add()
    out = chunked_prefill(cache, seq, 0, q.copy(), k, v, chunk)
    other = build(kind, bits)
    seq = other.add()
    other.append(seq, 0, k, v)
    assert np.allclose(out, other.attend(seq, 0, q.copy()))


def test_fork_is_copy_on_write():
    cache = build("paged", None)
    seq = cache.add()
    k = rows(6, seed=1)
    cache.append(seq, 0, k, k)
    child = cache.fork(seq)
    cache.append(child, 0, rows(1, seed=5), rows(1, seed=5))
    cache.append(seq, 0, rows(1, seed=6), rows(1, seed=6))
    assert np.allclose(cache.view(seq, 0)[0][6], rows(1, seed=6)[0])
    assert np.allclose(cache.view(child, 0)[0][6], rows(1, seed=5)[0])


def test_keep_truncate_free():
    cache = build("paged", None)
    seq = cache.add()
    k = rows(9, seed=1)
    for layer in range(2):
        cache.append(seq, layer, k, k)
    cache.keep(seq, [8, 1, 0])
    assert np.allclose(cache.view(seq, 1)[0], k[[8, 1, 0]])
    cache.truncate(seq, 1)
    assert cache.length(seq) == 1
    cache.free(seq)
    assert len(cache.free_blocks) == 16
    with pytest.raises(KeyError):
        cache.length(seq)


def test_pool_exhaustion():
    cache = build("paged", None, blocks=2)
    seq = cache.add()
    with pytest.raises(MemoryError):
        cache.append(seq, 0, rows(9), rows(9))


def test_quantised_is_precise():
    cache = build("quantized", 8)
    seq = cache.add()
    k = rows(32)
    cache.append(seq, 0, k, k)
    assert np.abs(cache.view(seq, 0)[0] - k).max() < 1e-6


def test_max_context():
    spec = {"num_layers": 32, "num_kv_heads": 32, "head_dim": 128, "bits": 16}
    tokens, terms = max_context(
        spec, 80 * 2**30, utilization=0.9, weight_bytes=13.48e9, reserve_bytes=0
    )
    assert 121_000 < tokens < 122_000
    assert terms["bytes_per_token"] == 524_288
