"""`Speculation`: the same answers as plain decoding, streaming, stops, and what it rejects."""

import time

import pytest
import torch

import trapline.gold
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.generate import generate as plain
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.tree_decoding import checkpoint
from trapline.gold.tree_decoding.drafter import drafter_config
from trapline.gold.tree_decoding.speculation import Speculation
from trapline.gold.tree_decoding.training import fresh

SIZES = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
PROMPTS = [[1], [4, 2, 9, 3, 0, 7], [5, 5, 8]]
ON_A_GPU = pytest.mark.needs_gpu


def random_pair(family="llama", device="cpu", **changes):
    generator = torch.Generator().manual_seed(3)
    config = from_dict({**SIZES, "model_type": family, **changes})
    target = Decoder(config).eval().requires_grad_(False)
    for parameter in target.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model = fresh(drafter_config(config, layers=2, block=5, mask_id=11), 0).eval()
    return target.to(device), model.requires_grad_(False).to(device)


def answers(speculation, target, prompts, **options):
    found = [[] for _ in prompts]
    for burst in speculation.stream(target, prompts, **options):
        assert burst.error is None
        found[burst.prompt] += burst.tokens
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize(
    ("family", "drafter", "mode", "budget"),
    [
        ("llama", "dflash", "chain", 4),
        ("llama", "dflash", "tree", 9),
        ("llama", "lookup", "chain", 3),
        ("qwen3", "dflash", "chain", 2),
        ("qwen3", "dflash", "tree", 5),
    ],
)
def test_greedy_answers_equal_plain_decoding(family, drafter, mode, budget, device):
    """Twice with one object, and with more prompts than rows."""
    changes = {"hidden_size": 64} if device == "cuda" else {}
    target, model = random_pair(family, device, **changes)
    speculation = Speculation("lookup" if drafter == "lookup" else model, mode=mode, budget=budget)
    options = {"max_new_tokens": 14, "stop_ids": [10]}
    for prompts, batch in ((PROMPTS, 3), (PROMPTS[::-1], 2)):
        found = answers(speculation, target, prompts, batch=batch, **options)
        assert found == plain(target, prompts, **options)
        served = "fast rounds" if device == "cuda" else "readable loop"
        assert speculation.statistics.served_by == served
        assert (speculation.statistics.reason is None) == (device == "cuda")


def test_sampled_text_is_that_of_plain_decoding_on_a_cpu():
    target, model = random_pair()
    ways = [Sampling(temperature=1.3, top_p=0.9, seed=seed) for seed in (5, 6, 7)]
    found = answers(Speculation(model, budget=8), target, PROMPTS, max_new_tokens=15, sampling=ways)
    assert found == plain(target, PROMPTS, max_new_tokens=15, sampling=ways)


def test_finished_ends_one_prompt_and_no_other():
    target, model = random_pair()
    wanted, said = plain(target, PROMPTS, max_new_tokens=14), [[], [], []]
    bursts = Speculation(model, budget=4).stream(
        target, PROMPTS, max_new_tokens=14, finished=lambda i: i == 1 and len(said[1]) >= 3
    )
    for burst in bursts:
        said[burst.prompt] += burst.tokens
    assert (said[0], said[2]) == (wanted[0], wanted[2])
    assert 3 <= len(said[1]) < 14
    assert said[1] == wanted[1][: len(said[1])]


def test_undefined_logits_end_their_prompt_only():
    target, _ = random_pair()
    target.embedding.weight[3] = torch.nan  # token 3 is in the second prompt
    bursts = list(Speculation("lookup").stream(target, PROMPTS, max_new_tokens=4))
    assert [burst.prompt for burst in bursts if burst.error] == [1]
    assert {burst.prompt for burst in bursts if burst.last} == {0, 1, 2}


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("budget", [4, 11])
def test_a_drafter_of_nan_ends_no_other_prompt(mode, budget):
    """Features of NaN give drafts of NaN; a drafted token of NaN is one that no other node sees."""
    target, model = random_pair()
    prompts = [[1], [4, 2, 9, 3, 0, 7], [5, 5, 8], [6, 3]]
    expected = plain(target, [[1], [5, 5, 8]], max_new_tokens=9)
    target.embedding.weight[3] = torch.nan
    assert not any(3 in row for row in expected)
    found = target.generate(
        prompts,
        max_new_tokens=9,
        stop_ids=[],
        speculate=Speculation(model, mode=mode, budget=budget),
    )
    assert [answer.finish_reason for answer in found] == ["length", "error", "length", "error"]
    assert [found[0].tokens, found[2].tokens] == expected


@pytest.mark.parametrize(
    ("change", "way", "why"),
    [
        ({}, {}, "CUDA device"),
        ({}, {"temperature": 1.0, "top_p": 0.5}, "temperature only"),
        ({"model_type": "mistral", "sliding_window": 4}, {}, "sliding window"),
        ({"attention_bias": True}, {}, "biases"),
        ({"max_position_embeddings": 20}, {}, "the model has 20"),
    ],
)
def test_supports_names_the_reason(change, way, why, monkeypatch):
    pytest.importorskip("triton")
    target, model = random_pair(change.pop("model_type", "llama"), hidden_size=64, **change)
    if why != "CUDA device":
        monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    speculation = Speculation(model, budget=4)
    given = {"max_new_tokens": 10, "sampling": [Sampling(**way)]}
    assert why in speculation.supports(target, [[1, 2]], **given)


def test_from_pretrained_reads_a_drafter(tmp_path):
    target, model = random_pair()
    checkpoint.save(model, tmp_path)
    speculation = trapline.gold.Speculation.from_pretrained(tmp_path, target, budget=4)
    found = answers(speculation, target, PROMPTS, max_new_tokens=6)
    assert found == plain(target, PROMPTS, max_new_tokens=6)
    other, _ = random_pair(vocab_size=13)
    with pytest.raises(ShapeError, match="vocabulary"):
        Speculation.from_pretrained(tmp_path, other)


def test_bad_input_is_rejected_before_anything_runs():
    target, model = random_pair()
    speculation = Speculation(model, budget=4)
    for given, why in (
        ({"drafter": "ngram"}, "DFlash model or 'lookup'"),
        ({"drafter": "lookup", "mode": "graph"}, "'chain' or 'tree'"),
        ({"drafter": "lookup", "budget": 0}, "budget"),
    ):
        with pytest.raises(RangeError, match=why):
            Speculation(**given)
    for prompts, change, why in (
        ([[]], {}, "empty"),
        ([[11]], {}, "mask id"),
        ([[12]], {}, "vocabulary"),
        ([[1]], {"max_new_tokens": 96}, "97 positions"),
        ([[1]], {"sampling": []}, "samplings"),
        ([[1]], {"batch": 0}, "batch"),
    ):
        with pytest.raises(RangeError, match=why):
            speculation.stream(target, prompts, **{"max_new_tokens": 2, **change})
    assert list(speculation.stream(target, [], max_new_tokens=2)) == []


@pytest.mark.needs_gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_generate_reaches_the_speed_of_the_rounds(batch):
    """Through `Decoder.generate` within 5 % of the generator alone; the second call is steady."""
    shape = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024}
    sizes = {"vocab_size": 2048, "num_hidden_layers": 12, "max_position_embeddings": 512}
    target, _ = random_pair("qwen3", num_key_value_heads=3, head_dim=64, **shape, **sizes)
    model = fresh(drafter_config(target.config, layers=2, block=8, mask_id=2047), 0).eval()
    target, model = (
        one.to("cuda", torch.bfloat16).requires_grad_(False) for one in (target, model)
    )
    prompts = [[7 + number] * 64 for number in range(8 * batch)]
    speculation = Speculation(model, budget=15)

    def through_the_api():
        target.generate(
            prompts, max_new_tokens=128, speculate=speculation, batch=batch, stop_ids=[]
        )

    def by_rounds():
        (generator,) = speculation.captured.values()
        for _ in generator.stream(prompts, max_new_tokens=128):
            pass

    def seconds(work):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    through_the_api()
    # By turns, so that both meet the same clocks and neighbours.
    turns = [(seconds(through_the_api), seconds(by_rounds)) for _ in range(9)]
    api, rounds = map(min, zip(*turns, strict=True))
    assert speculation.statistics.served_by == "fast rounds"
    assert len(speculation.captured) == 1
    assert api < 1.05 * rounds
