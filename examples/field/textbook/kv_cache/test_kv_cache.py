import numpy as np
import pytest
from solution import chunked_prefill, make_cache, max_context

RNG = np.random.default_rng(0)
ALL = [("dense", None), ("paged", None), ("quantized", 8), ("paged_quantized", 4)]


def build(kind, bits=None, pages=8):
    return make_cache(kind, num_layers=2, num_kv_heads=2, head_dim=4, block_size=4,
                      num_blocks=pages, bits=bits)


def rows(n, heads=2):
    return RNG.standard_normal((n, heads, 4))


def fill(cache, seq, n):
    kept = []
    for layer in range(2):
        k, v = rows(n), rows(n)
        cache.append(seq, layer, k, v)
        kept.append((k, v))
    return kept


@pytest.mark.parametrize("kind,bits", ALL)
def test_view_gives_back_what_was_appended(kind, bits):
    cache = build(kind, bits)
    seq = cache.add()
    kept = fill(cache, seq, 6)
    assert cache.length(seq) == 6
    tolerance = 0 if bits is None else np.abs(kept[1][0]).max() / 2 ** (bits - 1)
    assert np.allclose(cache.view(seq, 1)[0], kept[1][0], atol=tolerance, rtol=0)
    assert np.allclose(cache.view(seq, 1)[1], kept[1][1], atol=3 * tolerance, rtol=0)


@pytest.mark.parametrize("kind,bits", ALL)
def test_chunked_equals_one_shot(kind, bits):
    q, k, v = rows(9, 4), rows(9), rows(9)
    whole = build(kind, bits)
    seq = whole.add()
    whole.append(seq, 0, k, v)
    want = whole.attend(seq, 0, q)
    for chunk in (1, 4, 20):
        cache = build(kind, bits)
        got = chunked_prefill(cache, cache.add(), 0, q, k, v, chunk)
        assert np.allclose(got, want, atol=1e-12)


def test_attention_by_hand():
    cache = build("dense")
    seq = cache.add()
    k, v = np.zeros((2, 2, 4)), np.zeros((2, 2, 4))
    v[0, 0], v[1, 0], v[0, 1], v[1, 1] = 1, 3, 10, 30
    cache.append(seq, 0, k, v)
    out = cache.attend(seq, 0, rows(2, 4))
    assert np.allclose(out[0, :2], 1) and np.allclose(out[1, :2], 2)
    assert np.allclose(out[0, 2:], 10) and np.allclose(out[1, 2:], 20)


@pytest.mark.parametrize("kind,bits", ALL)
def test_fork_keep_truncate(kind, bits):
    cache = build(kind, bits)
    seq = cache.add()
    fill(cache, seq, 6)
    before = cache.view(seq, 0)[0].copy()
    child = cache.fork(seq)
    fill(cache, child, 3)
    cache.keep(child, [8, 0, 4])
    assert np.array_equal(cache.view(seq, 0)[0], before)
    assert np.array_equal(cache.view(child, 0)[0][1:], before[[0, 4]])
    cache.truncate(seq, 0)
    assert cache.length(seq) == 0 and cache.length(child) == 3


@pytest.mark.parametrize("kind,bits", ALL)
def test_pool_is_limited(kind, bits):
    cache = build(kind, bits, pages=2)
    seq = cache.add()
    fill(cache, seq, 5)
    with pytest.raises(MemoryError):
        cache.append(seq, 0, rows(4), rows(4))
    assert cache.length(seq) == 5
    fill(cache, seq, 3)
    cache.free(seq)
    with pytest.raises(KeyError):
        cache.length(seq)
    fill(cache, cache.add(), 8)


def test_bad_input():
    cache = build("paged")
    seq = cache.add()
    with pytest.raises(ValueError):
        cache.append(seq, 0, rows(2), rows(3))
    with pytest.raises(TypeError):
        cache.append(seq, 0, np.ones((1, 2, 4), int), np.ones((1, 2, 4), int))
    with pytest.raises(ValueError):
        make_cache("other", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, num_blocks=1)


def test_max_context():
    spec = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "bits": 16}
    tokens, terms = max_context(spec, 1300, utilization=0.5, weight_bytes=10, reserve_bytes=0)
    assert tokens == 5 and terms["bytes_per_token"] == 128
    assert max_context(spec, 10, utilization=1, weight_bytes=99, reserve_bytes=0)[0] == 0
