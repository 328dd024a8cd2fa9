"""The decoder in plain steps: cached equals uncached in any cut, rows of any length together."""

import pytest
import torch

from trapline.gold.errors import DTypeError, RangeError, ShapeError


def ids(count, seed=2):
    return torch.randint(0, 23, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("cut", [[20], [1] * 20, [7, 1, 12], [19, 1]])
def test_cached_equals_uncached_in_any_cut(decoder, cut):
    tokens = ids(20)
    whole = decoder(torch.tensor([tokens]))[0, -1]
    cache, at = decoder.new_cache(), 0
    for count in cut:
        logits = decoder.step([tokens[at : at + count]], [cache])
        at += count
    assert relative(logits[0], whole) <= 1e-5


def test_rows_of_different_lengths_are_independent(decoder):
    rows = [ids(9, 1), ids(1, 2), ids(14, 3)]
    together = decoder.step(rows, [decoder.new_cache() for _ in rows])
    for row, logits in zip(rows, together, strict=True):
        alone = decoder.step([row], [decoder.new_cache()])
        assert relative(logits, alone[0]) <= 1e-5


def test_forks_are_independent(make):
    decoder = make("llama")
    cache = decoder.new_cache()
    decoder.step([ids(5)], [cache])
    twin = cache.fork()
    decoder.step([[1]], [twin])
    cache.truncate(4)
    expected = decoder(torch.tensor([[*ids(5)[:4], 7]]))[0, -1]
    assert relative(decoder.step([[7]], [cache])[0], expected) <= 1e-5
    assert twin.length == 6


def test_bad_tokens_and_lengths_are_refused(make):
    decoder = make("llama")
    with pytest.raises(ShapeError, match=r"shape \(B, T\), got \(3,\)"):
        decoder(torch.tensor([1, 2, 3]))
    with pytest.raises(RangeError, match="at least one new token"):
        decoder.step([[]], [decoder.new_cache()])
    with pytest.raises(RangeError, match="below the vocabulary of 23"):
        decoder.step([[23]], [decoder.new_cache()])
    with pytest.raises(RangeError, match="the model has 64 positions, got 65"):
        decoder.step([[1] * 65], [decoder.new_cache()])
    with pytest.raises(DTypeError, match="token ids must be integers, got float32"):
        decoder(torch.tensor([[1.7, 2.0]]))
    with pytest.raises(DTypeError, match="token ids must be integers, got float32"):
        decoder.step([[1.7]], [decoder.new_cache()])
    with pytest.raises(DTypeError, match="ids must be an array, got list"):
        decoder([[1, 2]])
