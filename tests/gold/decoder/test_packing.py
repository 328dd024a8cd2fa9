"""Sequences of one pool, of another, and with caches of their own, in one pass."""

import pytest
import torch

from trapline.gold.decoder.cache import StoredSequence
from trapline.gold.decoder.pool import Pool, StoredLayer
from trapline.gold.kv_cache.api import KVCache

FIRST = [[5, 1, 7, 2], [9, 3], [4, 4, 8, 6, 1], [2]]
THEN = [[3, 8], [6], [1, 2, 3], [7, 7]]


def pool_for(decoder, bits=None, pages=16):
    return Pool(decoder.config, pages, 4, decoder.norm.weight.dtype, decoder.device, bits)


def cache_for(decoder, kind):
    """Of twelve positions."""
    config = decoder.config
    return KVCache(
        kind, num_layers=config.layers, num_kv_heads=config.kv_heads, head_dim=config.head_dim,
        block_size=4, num_blocks=3, like=decoder.norm.weight,
    )  # fmt: skip


def alone(decoder, cache, *texts):
    for text in texts:
        logits = decoder.step([text], [cache])
    return logits


@pytest.mark.parametrize("bits", [None, 8])
def test_sequences_of_several_pools_are_independent(make, bits):
    decoder = make("llama")
    one, other = pool_for(decoder, bits), pool_for(decoder, bits)
    caches = [one.open(), one.open(), other.open(), decoder.new_cache()]
    # Two with a past and two without, so that old rows and new ones lie side by side.
    decoder.step(FIRST[:2], caches[:2])
    found = decoder.step(THEN, caches)
    apart = [pool_for(decoder, bits).open() for _ in THEN]
    apart[3] = decoder.new_cache()
    texts = [(FIRST[0], THEN[0]), (FIRST[1], THEN[1]), (THEN[2],), (THEN[3],)]
    expected = [alone(decoder, cache, *text) for cache, text in zip(apart, texts, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert [cache.length for cache in caches] == [6, 3, 3, 2]


def test_prompts_of_one_pool_are_stored_together(make, monkeypatch):
    decoder, stored = make("llama"), []
    put = StoredLayer.put
    monkeypatch.setattr(StoredLayer, "put", lambda *given: (stored.append(1), put(*given))[1])
    pool = pool_for(decoder)
    decoder.step(FIRST, [pool.open() for _ in FIRST])
    assert len(stored) == decoder.config.layers


def test_a_full_pool_changes_no_sequence(make):
    decoder = make("llama")
    pool = pool_for(decoder, pages=3)
    caches = [pool.open() for _ in FIRST]
    decoder.step(FIRST[:2], caches[:2])
    with pytest.raises(MemoryError):
        decoder.step([FIRST[3], FIRST[2]], [caches[3], caches[2]])  # the first of them fits
    assert [cache.length for cache in caches] == [4, 2, 0, 0]
    assert pool.book.free_pages == 1
    found = decoder.step(THEN[1:2], caches[1:2])
    expected = alone(decoder, decoder.new_cache(), FIRST[1], THEN[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_failed_pass_leaves_nothing_in_a_cache(make):
    """The second sequence does not fit; the first has rows of one layer then, and goes on."""
    decoder = make("llama")
    cache = cache_for(decoder, "paged")
    one, other = StoredSequence(cache), StoredSequence(cache)
    with pytest.raises(MemoryError):
        decoder.step([FIRST[0], [1] * 12], [one, other])
    expected = alone(decoder, decoder.new_cache(), THEN[0])
    for sequence in (one.fork(), one):
        found = alone(decoder, sequence, THEN[0])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_pass_after_a_complete_one_keeps_everything(make, monkeypatch):
    """To cut is to copy where rows are dense: a step must not pay for all before it."""
    decoder = make("llama")
    cache = cache_for(decoder, "dense")
    cut = []
    monkeypatch.setattr(cache, "truncate", lambda *given: cut.append(given))
    alone(decoder, StoredSequence(cache), FIRST[0], THEN[0], THEN[1])
    assert not cut
