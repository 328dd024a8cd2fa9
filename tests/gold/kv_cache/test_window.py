"""A sliding window: what is seen, and pages that come back."""

import numpy as np
import pytest

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.api import KVCache, chunked_prefill
from trapline.gold.kv_cache.oracle import attention

WINDOW, PAGE = 7, 4
KINDS = [("dense", None), ("paged", None), ("quantized", 8), ("paged_quantized", 8)]


def build(kind, bits=None, num_blocks=20):
    return KVCache(
        kind, num_layers=2, num_kv_heads=2, head_dim=4, block_size=PAGE, num_blocks=num_blocks,
        bits=bits, window=WINDOW,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_attention_sees_only_the_window(rng, kind, bits):
    whole = KVCache(
        kind, num_layers=1, num_kv_heads=2, head_dim=4, block_size=64, num_blocks=1, bits=bits
    )
    everything = whole.add()
    cache, at = build(kind, bits), 0
    seq = cache.add()
    for n in (1, 5, 1, 1, 9, 2, 1, 1, 1, 12):
        for layer in (0, 1):
            q, k, v = (rng.standard_normal((n, heads, 4)) for heads in (4, 2, 2))
            cache.append(seq, layer, k, v)
            if layer == 0:
                whole.append(everything, 0, k, v)
                got = cache.attend(seq, 0, q)
                want = attention(q, *whole.view(everything, 0), window=WINDOW)
                np.testing.assert_allclose(got, want, atol=1e-12)
        at += n
    assert cache.length(seq) == at


def test_pages_behind_the_window_are_freed(rng):
    cache = build("paged", num_blocks=4)
    seq = cache.add()
    rows = rng.standard_normal((100, 2, 4))
    for step in range(100):  # 25 pages went through a pool of 4
        for layer in (0, 1):
            cache.append(seq, layer, rows[step : step + 1], -rows[step : step + 1])
    assert cache.length(seq) == 100
    assert cache._storage.book.free_pages >= 1
    first = cache.first(seq)
    assert 100 - WINDOW - PAGE < first <= 100 - WINDOW + 1
    np.testing.assert_array_equal(cache.view(seq, 1)[0], rows[first:])


def test_forks_with_a_window_are_independent(rng):
    cache = build("paged")
    seq = cache.add()
    rows = rng.standard_normal((30, 2, 4))
    for layer in (0, 1):
        cache.append(seq, layer, rows[:20], rows[:20])
    child = cache.fork(seq)
    for layer in (0, 1):
        cache.append(seq, layer, rows[20:], rows[20:])
        cache.append(seq, layer, rows[:1], rows[:1])
    assert cache.first(seq) > cache.first(child)
    np.testing.assert_array_equal(cache.view(child, 0)[0], rows[cache.first(child) : 20])
    cache.free(seq)
    cache.free(child)
    assert cache._storage.book.free_pages == 20


def test_truncation_beyond_the_stored_window_raises(rng):
    cache = build("paged")
    seq = cache.add()
    rows = rng.standard_normal((40, 2, 4))
    for start in range(0, 40, 5):
        for layer in (0, 1):
            cache.append(seq, layer, rows[start : start + 5], rows[start : start + 5])
    cache.keep(seq, [*range(35), 38, 36])  # what a verified tree leaves
    np.testing.assert_array_equal(cache.view(seq, 0)[0][-2:], rows[[38, 36]])
    cache.truncate(seq, 36)
    with pytest.raises(RangeError, match="window of position 20 is gone"):
        cache.truncate(seq, 20)
    with pytest.raises(RangeError, match="gone and cannot be moved"):
        cache.keep(seq, [0, 2, 1])
    assert cache.length(seq) == 36


def test_failed_append_frees_no_page(rng):
    cache = build("paged", num_blocks=4)
    seq = cache.add()
    rows = rng.standard_normal((14, 2, 4))
    for layer in (0, 1):
        cache.append(seq, layer, rows, rows)
    before = cache.attend(seq, 1, rows)
    with pytest.raises(MemoryError):
        cache.append(seq, 0, rows, rows)  # needs three pages more; two would come back
    np.testing.assert_array_equal(cache.attend(seq, 1, rows), before)
    cache.append(seq, 0, rows[:6], rows[:6])  # needs one; two come back
    assert cache.first(seq) == 8


def test_failed_keep_changes_nothing(rng):
    """A page that is gone does not come back, however often the last page of the pool is held."""
    cache = KVCache(
        "paged", num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=6, window=4
    )
    rows = rng.standard_normal((15, 2, 4))
    other, seq = cache.add(), cache.add()
    cache.append(other, 0, rows[:1], rows[:1])  # takes the last page
    for row in rows[:14]:
        cache.append(seq, 0, row[None], row[None])
    cache.fork(seq)
    cache.append(other, 0, rows, rows)
    assert cache._storage.book.free_pages == 0
    before = cache.view(seq, 0)[0]
    with pytest.raises(MemoryError, match="1 pages needed, 0 of 6 available"):
        cache.keep(seq, [12, 13])
    np.testing.assert_array_equal(cache.view(seq, 0)[0], before)
    assert cache.length(seq) == 14


def test_queries_beyond_the_stored_window_raise(rng):
    cache = build("paged")
    seq = cache.add()
    rows = rng.standard_normal((30, 2, 4))
    for part in (rows[:20], rows[20:]):
        for layer in (0, 1):
            cache.append(seq, layer, part, part)
    cache.attend(seq, 0, rows[20:])
    with pytest.raises(RangeError, match="window of position 12 is gone"):
        cache.attend(seq, 0, rows[12:])


@pytest.mark.parametrize("chunk", [1, 3, 8, 50])
def test_chunked_prefill_with_a_window(rng, chunk):
    q, k, v = (rng.standard_normal((50, heads, 4)) for heads in (4, 2, 2))
    cache = build("paged")
    out = chunked_prefill(cache, cache.add(), 0, q, k, v, chunk)
    np.testing.assert_allclose(out, attention(q, k, v, window=WINDOW), atol=1e-12)


def test_window_below_one_raises():
    with pytest.raises(RangeError):
        KVCache(
            "paged", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, num_blocks=1, window=0
        )
