"""The cache inside transformers' `generate`: equal ids when paged, close logits when quantised."""

import pytest
import torch
import transformers

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.huggingface import PooledCache

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 6}),
}
PROMPTS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [0, 0, 2, 7, 1, 8, 2]])
MASK = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    kind, changed = KINDS[request.param]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **changed})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def continued(model, cache, beams):
    return model.generate(
        PROMPTS,
        attention_mask=MASK,
        past_key_values=cache,
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=14,
        do_sample=False,
        eos_token_id=[11, 12],
        pad_token_id=0,
    )


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("beams", [1, 4])
def test_paged_ids_equal_the_dynamic_cache(model, beams, block_size):
    want = continued(model, transformers.DynamicCache(config=model.config), beams)
    cache = PooledCache(model.config, positions=400, block_size=block_size)
    assert torch.equal(continued(model, cache, beams), want)


def test_beams_share_pages(model):
    cache = PooledCache(model.config, positions=400, block_size=2)
    continued(model, cache, 4)
    book = cache.storage._storage.book
    tables = list(book.tables.values())
    assert len(tables) == 8
    assert len({page for table in tables for page in table}) < 0.7 * sum(map(len, tables))


def teacher_forced(model, cache):
    """Logits of a fixed text, the second half token by token from the cache."""
    ids = torch.randint(0, 40, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        parts = [model(ids[:, :20], past_key_values=cache).logits]
        for at in range(20, 40):
            parts.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("bits", "rotate", "limit"),
    [(None, False, 1e-5), (8, False, 0.02), (8, True, 0.03), ("fp8", False, 0.08), (4, True, 0.35)],
)
def test_logits_are_close_when_quantised(model, bits, rotate, limit):
    want = teacher_forced(model, transformers.DynamicCache(config=model.config))
    got = teacher_forced(model, PooledCache(model.config, positions=96, bits=bits, rotate=rotate))
    assert float((got - want).norm() / want.norm()) <= limit


def test_recent_rows_reduce_the_logit_error(model):
    want = teacher_forced(model, transformers.DynamicCache(config=model.config))
    errors = []
    for recent in (0, 12, 40):
        cache = PooledCache(model.config, positions=96, bits=4, recent=recent)
        errors.append(float((teacher_forced(model, cache) - want).norm() / want.norm()))
    assert errors[2] < 0.3 * errors[0]
    assert errors[2] < errors[1] < errors[0]
    beams = PooledCache(model.config, positions=400, bits=4, recent=40)
    assert continued(model, beams, 3).shape[0] == 6


def test_quantised_cache_with_beams_saves_memory(model):
    small = PooledCache(model.config, positions=400, bits=8)
    whole = PooledCache(model.config, positions=400)
    for cache in (small, whole):
        assert continued(model, cache, 3).shape[0] == 6
    # Head width 8: 8 + 16/8 bits an element instead of 32, and the same bookkeeping.
    assert small.nbytes() < 0.45 * whole.nbytes()


def test_reset_cache_can_be_reused(model):
    cache = PooledCache(model.config, positions=400)
    first = continued(model, cache, 2)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(continued(model, cache, 2), first)


def test_repeat_select_and_crop(model):
    cache = PooledCache(model.config, positions=400, block_size=4)
    with torch.no_grad():
        model(PROMPTS, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        cache.crop(-3)
        assert cache.get_seq_length() == 4
        got = model(torch.tensor([[5], [6]]), past_key_values=cache).logits
        want = model(torch.cat([PROMPTS[[1, 0], :4], torch.tensor([[5], [6]])], 1)).logits
    assert torch.allclose(got, want[:, -1:], atol=1e-5)
    with pytest.raises(RangeError, match="negative"):
        cache.crop(3)


def test_small_pool_raises_memory_error(model):
    cache = PooledCache(model.config, positions=16, block_size=4)
    with pytest.raises(MemoryError, match="pages needed"):
        continued(model, cache, 1)
    with pytest.raises(RangeError, match="at least 1"):
        PooledCache(model.config, positions=0)


def test_another_batch_size_raises(model):
    cache = PooledCache(model.config, positions=64)
    with torch.no_grad():
        model(PROMPTS, past_key_values=cache)
        with pytest.raises(RangeError, match="holds 2 rows, not 1"):
            model(PROMPTS[:1], past_key_values=cache)
