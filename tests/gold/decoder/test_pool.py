"""Pages of codes: what has none comes back as NaN, and nothing beside it does."""

import pytest
import torch

from trapline.gold.attention.paged.api import paged_append, paged_attention
from trapline.gold.decoder.pool import Pool

BITS = [8, 4, "fp8"]
BROKEN = [float("nan"), float("inf"), -float("inf"), 1e30]


def stored(make, bits):
    decoder = make("llama")
    return Pool(decoder.config, 3, 4, torch.float32, torch.device("cpu"), bits).layer(0)


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_stored_as_by_paged_append(make, bits):
    rows = torch.randn(2, 5, 2, 4, generator=torch.Generator().manual_seed(1))
    rows[0, 2, 1] = 0.0
    mine, other = stored(make, bits), stored(make, bits)
    slots = torch.tensor([7, 0, 3, 11, 4])
    mine.put(slots, *rows)
    paged_append(*rows, slots=slots, **other.pages())
    for ours, theirs in zip((mine.keys, mine.values), (other.keys, other.values), strict=True):
        assert torch.equal(ours, theirs)
    assert all(map(torch.equal, mine.scales, other.scales))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("bits", BITS)
def test_unquantisable_rows_are_nan_for_their_sequence_only(make, bits, value, side):
    """Row 1 of sequence 0 is broken in one head, as a key or as a value."""
    rows = torch.randn(2, 8, 2, 4, generator=torch.Generator().manual_seed(1))
    whole, broken = stored(make, bits), stored(make, bits)
    whole.put(torch.arange(8), *rows)
    rows[side, 1, 0, 2] = value
    broken.put(torch.arange(8), *rows)
    read = (one.get(torch.arange(8), torch.float32) for one in (whole, broken))
    for clean, found in zip(*read, strict=True):
        assert torch.equal(clean[2:], found[2:])
        assert torch.equal(clean[:, 1], found[:, 1])
    q, places = torch.ones(2, 4, 4), torch.tensor([[0], [1]], dtype=torch.int32)
    lengths = torch.tensor([4, 4], dtype=torch.int32)
    clean, found = (
        paged_attention(q, **x.pages(), block_table=places, seq_lens=lengths)
        for x in (whole, broken)
    )
    assert found[0, :2].isnan().all()
    assert torch.equal(found[0, 2:], clean[0, 2:])
    assert torch.equal(found[1], clean[1])
