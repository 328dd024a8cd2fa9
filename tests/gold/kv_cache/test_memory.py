"""The calculator: known answers, every term, and agreement with a cache that was really filled."""

from fractions import Fraction

import numpy as np
import pytest

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache import oracle
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.memory import (
    context_on,
    decoding_step,
    growth,
    latency,
    max_context,
    recomputation_saved,
    saved,
)
from trapline.gold.kv_cache.shapes import ModelShape, Setting, find_model, gpus, models

SPEC = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "bits": 16}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("llama-3-8b", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("llama3:8b", "llama-3-8b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("qwen2.5_14b_instruct", "qwen2.5-14b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-7b"),
        ("MIXTRAL-8X7B", "mixtral-8x7b"),
    ],
)
def test_models_are_found_under_common_spellings(given, name):
    assert find_model(given).name == name


def test_every_model_is_found_by_name_and_repository():
    for name, shape in models().items():
        assert find_model(name) is shape
        assert find_model(shape.source) is shape


def test_unknown_model_lists_similar_names():
    with pytest.raises(RangeError, match=r"'llama-4-8b'; similar names: .*llama-3-8b"):
        find_model("llama-4-8b")
    with pytest.raises(RangeError, match="there are: gpt2-xl"):
        find_model("?!")


def test_window_in_every_layer_bounds_the_cache():
    shape, gpu = find_model("mistral-7b-v0.1"), gpus()["h100-80"]
    assert context_on(shape, gpu, Setting()).tokens == shape.context
    assert shape.cache_bytes(32768, 16) == shape.cache_bytes(4096, 16)


def test_tables_are_large_and_plausible():
    assert len(models()) >= 20
    assert len(gpus()) >= 12
    for shape in models().values():
        assert shape.source
        assert shape.checked
        all_slide = shape.name == "mistral-7b-v0.1"
        assert 0 <= shape.sliding_layers < shape.layers + all_slide
        assert bool(shape.latent) != bool(shape.kv_heads * shape.head_dim)
        assert (shape.active or 0) < shape.parameters
        if shape.kv_heads:
            assert shape.query_heads % shape.kv_heads == 0
    assert any(shape.latent for shape in models().values())
    assert any(shape.sliding_layers for shape in models().values())


def test_llama_2_7b_on_an_h100_holds_121_thousand_tokens():
    answer = context_on(models()["llama-2-7b"], gpus()["h100-80"], Setting())
    assert 121_000 < answer.tokens < 122_000
    assert answer.bytes_per_token == 524_288
    assert answer.usable_bytes == 72 * 2**30
    assert answer.budget_bytes == answer.usable_bytes - answer.weight_bytes
    assert answer.tokens == answer.budget_bytes // 524_288
    assert answer.tokens_in_blocks == answer.tokens // 16 * 16


def test_terms_are_whole_bytes_and_add_up():
    setting = Setting(utilization=0.85, reserve_gib=0.3)
    for model in models().values():
        answer = context_on(model, gpus()["h100-80"], setting)
        assert answer.weight_bytes == Fraction(str(model.parameters)) * 2 * 10**9
        terms = answer.usable_bytes - answer.weight_bytes - answer.reserve_bytes
        assert answer.budget_bytes == terms


def test_decimal_gigabytes_hold_less():
    model, gpu = models()["llama-3.1-8b"], gpus()["h100-80"]
    binary, decimal = (context_on(model, gpu, Setting(unit=unit)) for unit in ("gib", "gb"))
    assert decimal.gpu_bytes == 80 * 10**9
    assert decimal.tokens < binary.tokens


@pytest.mark.parametrize("name", list(models()))
@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_answer_fits_and_one_token_more_does_not(name, kv_bits):
    model = models()[name]
    for gpu in gpus().values():
        for sequences in (1, 7):
            setting = Setting(kv_bits=kv_bits, sequences=sequences, reserve_gib=1)
            answer = context_on(model, gpu, setting)
            budget = max(0, answer.budget_bytes + 1) / sequences
            assert model.cache_bytes(answer.tokens, kv_bits) <= budget
            if model.sliding_layers == model.layers and answer.tokens == model.context:
                continue  # a cache that no longer grows is bounded by the model's context
            assert model.cache_bytes(answer.tokens + 1, kv_bits) > (budget - 1) / 1.000001


def test_sliding_layers_stop_growing():
    model = models()["gemma-3-27b"]
    step = model.cache_bytes(50_001, 16) - model.cache_bytes(50_000, 16)
    assert step == 10 * model.layer_bytes(16)
    assert model.cache_bytes(1, 16) == 62 * model.layer_bytes(16)


def test_latent_layers_store_one_vector():
    assert models()["deepseek-v3"].layer_bytes(16) == 576 * 2


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_per_token_match_a_real_cache(bits):
    shape = ModelShape(
        name="small", source="here", parameters=1, layers=2, query_heads=4, kv_heads=2,
        head_dim=16, context=64,
    )  # fmt: skip
    cache = KVCache(
        "paged_quantized", num_layers=2, num_kv_heads=2, head_dim=16, block_size=8,
        num_blocks=8, bits=bits,
    )  # fmt: skip
    seq = cache.add()
    rows = np.ones((64, 2, 16), np.float32)
    before = cache.nbytes()
    for layer in (0, 1):
        cache.append(seq, layer, rows, rows)
    tables = 8 * 8
    assert cache.nbytes() - before - tables == shape.cache_bytes(64, bits)


def test_max_context_matches_the_oracle():
    rng = np.random.default_rng(3)
    for bits in (4, 8, 16):
        for _ in range(20):
            layers, heads, width = (int(x) for x in rng.integers(1, 90, 3))
            spec = {"num_layers": layers, "num_kv_heads": heads, "head_dim": width, "bits": bits}
            use = int(rng.integers(1, 9)) / 8
            weights, reserve = (int(x) for x in rng.integers(0, 2**34, 2))
            tokens, terms = max_context(
                spec, 2**35, utilization=use, weight_bytes=weights, reserve_bytes=reserve
            )
            assert tokens == oracle.max_context(spec, 2**35, Fraction(use), weights, reserve)
            assert terms["budget_bytes"] == use * 2**35 - weights - reserve


def test_max_context_rejects_invalid_arguments():
    free = {"weight_bytes": 0, "reserve_bytes": 0}
    for use in (0, 1.1, -1):
        with pytest.raises(RangeError):
            max_context(SPEC, 1, utilization=use, **free)
    with pytest.raises(RangeError):
        max_context({**SPEC, "bits": 0}, 1, utilization=1, **free)
    with pytest.raises(RangeError):
        max_context(SPEC, -1, utilization=1, **free)


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_bits": 0},
        {"weight_bits": -1},
        {"utilization": 0},
        {"utilization": 2},
        {"reserve_gib": -1},
        {"unit": "kg"},
        {"block_size": 0},
        {"sequences": 0},
    ],
)
def test_invalid_settings_raise(bad):
    with pytest.raises(RangeError):
        Setting(**bad)


def test_decoding_is_memory_bound_until_the_batch_is_large():
    model, gpu = models()["llama-3.1-8b"], gpus()["h100-80"]
    one = decoding_step(model, gpu, Setting(), 128)
    many = decoding_step(model, gpu, Setting(sequences=1024), 128)
    assert one.memory_bound
    assert not many.memory_bound
    assert one.milliseconds == pytest.approx(16.06e9 / 3350e9 * 1e3, rel=0.01)


def test_compute_bound_batch_size():
    model, gpu = models()["llama-3.1-8b"], gpus()["h100-80"]
    enough = decoding_step(model, gpu, Setting(), 128).compute_bound_from
    assert enough is not None
    for sequences, bound in ((enough - 1, True), (enough, False)):
        step = decoding_step(model, gpu, Setting(sequences=sequences), 128)
        assert step.memory_bound is bound
    # A long context is read faster than it can ever be computed with: 4·H/(4·G) FLOPs a byte.
    assert decoding_step(model, gpu, Setting(), 100_000).compute_bound_from is None


def test_latency_is_the_sum_of_its_steps():
    model, gpu = models()["gemma-2-9b"], gpus()["h200"]
    setting = Setting(sequences=3)
    times = latency(model, gpu, setting, 6, 4)
    steps = [decoding_step(model, gpu, setting, context).milliseconds for context in (7, 8, 9)]
    assert times.decode_milliseconds == pytest.approx(sum(steps))
    flops = 3 * sum(model.step_flops(n) for n in range(1, 7))
    read = model.weight_bytes(16) + 3 * model.cache_bytes(6, 16)
    assert times.prefill_milliseconds == pytest.approx(1e3 * max(read / 4.8e12, flops / 989e12))
    total = times.prefill_milliseconds + times.decode_milliseconds
    assert times.tokens_per_second == pytest.approx(12e3 / total)


def test_the_often_quoted_109_times():
    save = saved(models()["llama-2-7b"], 1024, 100)
    assert save.scores_at_final_length == pytest.approx(109.3, abs=0.05)
    assert save.tokens == recomputation_saved(1024, 100)
    # Causal attention does half of the scores, in both ways of working.
    assert 91 < save.flops < save.tokens < save.scores < 101


def test_saved_flops_match_a_direct_count():
    model = models()["gemma-2-9b"]
    without = sum(model.step_flops(j) for n in range(5, 9) for j in range(1, n + 1))
    once = sum(model.step_flops(j) for j in range(1, 9))
    assert saved(model, 5, 4).flops == pytest.approx(without / once)
    scores = sum(n * n for n in range(5, 9)) / (25 + 6 + 7 + 8)
    assert saved(model, 5, 4).scores == pytest.approx(scores)
    for prompt, new in ((0, 1), (1, 0)):
        with pytest.raises(RangeError):
            saved(model, prompt, new)


def test_growth_is_linear_without_windows():
    sizes = dict(growth(models()["llama-2-7b"], 16))
    assert sizes == {1024: 2**29, 4096: 2**31}


def test_recomputation_saved():
    assert recomputation_saved(10, 1) == 1
    assert 95 < recomputation_saved(1024, 100) < 96
