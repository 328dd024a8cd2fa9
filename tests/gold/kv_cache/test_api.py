"""What `KVCache` accepts and refuses, dtypes, and what it says about its bytes."""

import numpy as np
import pytest

import trapline.gold
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.kv_cache.api import KVCache, chunked_prefill, make_cache
from trapline.gold.kv_cache.oracle import attention

KINDS = [
    ("dense", None),
    ("paged", None),
    ("quantized", 8),
    ("quantized", 4),
    ("paged_quantized", 8),
    ("paged_quantized", 4),
]


def build(kind="paged", bits=None, **changed):
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "block_size": 4, "num_blocks": 4}
    return make_cache(kind, bits=bits, **{**sizes, **changed})


def test_cache_is_public():
    assert trapline.gold.KVCache is KVCache


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_prefill_keeps_dtype_and_matches_the_oracle(rng, kind, bits, dtype):
    for chunk in (1, 3, 99):
        cache = build(kind, bits)
        seq = cache.add()
        q, k, v = (rng.standard_normal((9, heads, 4)).astype(dtype) for heads in (6, 2, 2))
        cache.append(seq, 0, k[:2], v[:2])
        out = chunked_prefill(cache, seq, 0, q, k, v, chunk)
        keys, values = cache.view(seq, 0)
        assert out.dtype == keys.dtype == values.dtype == dtype
        want = attention(q, keys, values)
        np.testing.assert_allclose(out, want, atol=2e-5 if dtype == np.float32 else 1e-13)
        assert cache.length(seq) == 0


def test_failed_prefill_changes_nothing(rng):
    cache = build(num_blocks=2)
    seq = cache.add()
    q, k = rng.standard_normal((9, 2, 4)), rng.standard_normal((9, 2, 4))
    with pytest.raises(MemoryError):
        chunked_prefill(cache, seq, 0, q, k, k, 2)
    with pytest.raises(ShapeError):
        chunked_prefill(cache, seq, 0, q[:3], k[:2], k[:2], 2)
    with pytest.raises(RangeError):
        chunked_prefill(cache, seq, 0, q[:2], k[:2], k[:2], 0)
    assert len(cache.view(seq, 0)[0]) == 0
    cache.append(seq, 0, k[:8], k[:8])
    child = cache.fork(seq)
    assert chunked_prefill(cache, child, 0, q[:0], k[:0], k[:0], 2).shape == (0, 2, 4)


def test_forks_of_a_full_pool_allocate_no_pages(rng):
    cache = build(num_blocks=2)
    seq = cache.add()
    k = rng.standard_normal((7, 2, 4))
    cache.append(seq, 0, k, k)
    children = [cache.fork(seq) for _ in range(5)]
    with pytest.raises(MemoryError, match="1 pages needed, 0 of 2"):
        cache.append(children[0], 0, k[:1], k[:1])
    for other in (seq, *children[1:]):
        cache.free(other)
    cache.append(children[0], 0, k[:1], k[:1])


@pytest.mark.parametrize("steps", [100, pytest.param(3000, marks=pytest.mark.full)])
def test_oldest_row_never_changes_in_any_kind(rng, steps):
    for kind, bits in KINDS:
        cache = build(kind, bits, num_layers=1, num_blocks=steps)
        seq = cache.add()
        for step in range(steps):
            rows = rng.standard_normal((1, 2, 4)) * (1 + step)
            cache.append(seq, 0, rows, rows)
            if step == 9:
                early = cache.view(seq, 0)[0][0]
        np.testing.assert_array_equal(cache.view(seq, 0)[0][0], early)


def test_invalid_rows_and_queries_raise():
    cache = build()
    seq = cache.add()
    good = np.ones((2, 2, 4))
    for bad in (np.ones((2, 1, 4)), np.ones((2, 2, 1)), np.ones((2, 4)), np.ones((3, 2, 4))):
        with pytest.raises(ShapeError):
            cache.append(seq, 0, good, bad)
    with pytest.raises(ShapeError):
        cache.append(seq, 0, np.ones((2, 2, 5)), np.ones((2, 2, 5)))
    for bad in (good.astype(np.float32), good.astype(int), good.tolist()):
        with pytest.raises(DTypeError):
            cache.append(seq, 0, good, bad)
    with pytest.raises(RangeError):
        cache.append(seq, 0, good[:0], good[:0])
    cache.append(seq, 0, good, good)
    with pytest.raises(ShapeError, match="holds float64"):
        cache.append(seq, 0, good.astype(np.float32), good.astype(np.float32))
    for layer in (-1, 2):
        with pytest.raises(RangeError):
            cache.view(seq, layer)
    for queries in (np.ones((1, 3, 4)), np.ones((1, 2, 3)), np.ones((1, 0, 4))):
        with pytest.raises(ShapeError):
            cache.attend(seq, 0, queries)
    with pytest.raises(RangeError, match="3 queries for 2"):
        cache.attend(seq, 0, np.ones((3, 2, 4)))
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeError, match="the cache holds float64"):
        cache.attend(seq, 0, torch.ones(1, 2, 4))
    assert cache.length(seq) == 0


def test_unhashable_prompt_leaves_no_sequence():
    cache = build()
    before = cache.nbytes()
    for tokens, salt in ((range(9), []), ([[1]] * 9, None), (5, None)):
        with pytest.raises(TypeError):
            cache.add(tokens, salt=salt)
    assert cache.nbytes() == before
    assert not cache._storage.book.tables


def test_invalid_indices_raise():
    cache = build(num_layers=1)
    seq = cache.add()
    cache.append(seq, 0, np.ones((3, 2, 4)), np.ones((3, 2, 4)))
    for bad in ([3], [-1], [0, 0]):
        with pytest.raises(RangeError):
            cache.keep(seq, bad)
    for bad in ([0.5], [[0]]):
        with pytest.raises(ShapeError):
            cache.keep(seq, bad)
    for bad in (-1, 4):
        with pytest.raises(RangeError):
            cache.truncate(seq, bad)


def test_unknown_sequences_raise_key_error():
    cache = build()
    rows = np.ones((1, 2, 4))
    for seq in (0, -1, True):
        for call in (
            lambda s: cache.append(s, 0, rows, rows),
            lambda s: cache.attend(s, 0, rows),
            lambda s: cache.view(s, 0),
            cache.fork,
            lambda s: cache.keep(s, []),
            lambda s: cache.truncate(s, 0),
            cache.free,
            cache.length,
        ):
            with pytest.raises(KeyError):
                call(seq)


def test_invalid_options_raise():
    for kind, bits in (("rows", None), ("quantized", None), ("quantized", 2), ("dense", 8)):
        with pytest.raises(RangeError):
            build(kind, bits)
    with pytest.raises(RangeError):
        build(num_blocks=0)
    with pytest.raises(DTypeError):
        build(head_dim=1.5)
