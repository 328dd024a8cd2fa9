"""The decoder against transformers: same logits, same tokens, and rows that never meet."""

import numpy as np
import pytest
import torch
import transformers

from trapline.gold.beam_search.api import beam_search
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.generate import BeamModel, generate, stream
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.sampling import Sampler, Sampling
from trapline.gold.errors import RangeError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SHAPES = {
    "llama": (transformers.LlamaConfig, {**SMALL}),
    "llama-tied-biased": (
        transformers.LlamaConfig,
        {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-stretched": (transformers.LlamaConfig, {**SMALL, "rope_parameters": LLAMA3}),
    "mistral-window": (transformers.MistralConfig, {**SMALL, "head_dim": 16, "sliding_window": 5}),
    "qwen3": (transformers.Qwen3Config, {**SMALL, "head_dim": 24, "num_key_value_heads": 1}),
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    """A random model of theirs, and ours read from its checkpoint."""
    kind, settings = SHAPES[request.param]
    torch.manual_seed(len(request.param))
    theirs = transformers.AutoModelForCausalLM.from_config(
        kind(**settings), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, Decoder.from_pretrained(folder), folder


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_logits_equal_theirs(pair):
    theirs, ours, _ = pair
    ids = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(ours(ids), theirs(ids).logits) <= 1e-5


def test_cached_equals_uncached_in_any_cut(pair):
    _, ours, _ = pair
    ids = torch.randint(0, 61, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        whole = ours(torch.tensor([ids]))[0, -1]
        for cut in ([20], [1] * 20, [7, 1, 12], [19, 1]):
            cache, at = ours.new_cache(), 0
            for count in cut:
                logits = ours.step([ids[at : at + count]], [cache])
                at += count
            assert relative(logits[0], whole) <= 1e-5


def test_greedy_tokens_equal_theirs(pair):
    theirs, ours, _ = pair
    prompt = [3, 1, 4, 1, 5]
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert generate(ours, [prompt], max_new_tokens=12) == [expected[0, 5:].tolist()]


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8], [1, 1, 2, 3, 5, 8, 13]]


@pytest.mark.parametrize("way", [Sampling(), Sampling(1.3, 20, 0.9, 0.01, seed=5)])
def test_rows_never_meet(pair, way):
    """A batch of ragged prompts gives each row what it gets alone, however many run at once."""
    _, ours, _ = pair
    alone = [generate(ours, [p], max_new_tokens=9, sampling=way)[0] for p in PROMPTS]
    for batch in (1, 2, 4):
        assert generate(ours, PROMPTS, max_new_tokens=9, sampling=way, batch=batch) == alone


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = from_dict({**SMALL, "model_type": "llama", "vocab_size": 5})
    return Decoder(config).eval()


class WithoutEnd(BeamModel):
    """A model that never ends: token 0 has no probability."""

    def log_probs(self, prefixes):
        table = super().log_probs(prefixes)
        table[:, 0] = -np.inf
        return table


def test_one_beam_is_greedy_while_nothing_ends(tiny):
    """An end would enter the pool of finished hypotheses, whatever greedy would choose."""
    greedy = generate(tiny, [[1, 2]], max_new_tokens=6)[0]
    assert 0 not in greedy
    ((best, *_),) = beam_search(
        WithoutEnd(tiny), [[1, 2]], beam_width=1, max_new_tokens=6, eos_id=0
    )
    assert list(best.tokens) == greedy


def test_wide_beams_find_the_best_of_all(tiny):
    """Every continuation of three tokens, scored one by one, against a beam as wide as the tree."""
    from itertools import product

    scored = {}
    for tokens in product(range(5), repeat=3):
        cut = tokens[: tokens.index(4) + 1] if 4 in tokens else tokens
        with torch.no_grad():
            logits = tiny(torch.tensor([[1, 2, *cut]]))[0].double()
        steps = torch.log_softmax(logits, -1)
        scored[cut] = sum(float(steps[1 + i, t]) for i, t in enumerate(cut)) / len(cut)
    ((best, *_),) = beam_search(
        BeamModel(tiny), [[1, 2]], beam_width=125, max_new_tokens=3, eos_id=4
    )
    winner = max(scored, key=scored.get)
    assert tuple(best.tokens) == winner
    assert best.score == pytest.approx(scored[winner], rel=1e-5)


def test_stop_tokens_end_a_row_and_are_included(tiny):
    answer = generate(tiny, [[1, 2, 3]], max_new_tokens=8)[0]
    stopped = generate(tiny, [[1, 2, 3]], max_new_tokens=8, stop_ids=[answer[2]])[0]
    assert stopped == answer[: answer.index(answer[2]) + 1]
    tokens = list(stream(tiny, [[1, 2, 3]], max_new_tokens=8, stop_ids=[answer[2]]))
    assert [token.last for token in tokens] == [False] * (len(stopped) - 1) + [True]


def test_sampling_follows_the_law():
    """20 000 draws against the exact law; a false alarm has odds below one in a million."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -float("inf")])
    sampler = Sampler(Sampling(temperature=0.7, top_k=3, seed=1))
    draws = 20_000
    counts = np.bincount([sampler.choose(logits) for _ in range(draws)], minlength=5)
    weights = torch.exp(logits[[3, 0, 1]] / 0.7)
    law = np.zeros(5)
    law[[3, 0, 1]] = (weights / weights.sum()).numpy()
    assert counts[2] == counts[4] == 0
    assert np.abs(counts / draws - law).max() < 5.5 * 0.5 / np.sqrt(draws)


def test_top_p_and_min_p_cut_the_tail():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for way, allowed in (
        (Sampling(1.0, top_p=0.8), {0, 1}),
        (Sampling(1.0, top_p=0.81), {0, 1, 2}),
        (Sampling(1.0, min_p=0.5), {0, 1}),
    ):
        sampler = Sampler(way)
        assert {sampler.choose(logits) for _ in range(400)} == allowed


BAD = [
    ({"prompts": [[]]}, "prompt 0 is empty"),
    ({"prompts": [[1] * 127]}, "needs 135 positions"),
    ({"prompts": [[99]]}, "outside the vocabulary"),
    ({"prompts": [[1]], "stop_ids": [77]}, "stop token 77"),
    ({"prompts": [[1]], "max_new_tokens": 0}, "at least 1"),
    ({"prompts": [[1], [2]], "sampling": [Sampling()]}, "1 samplings for 2"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD)
def test_bad_input_is_refused_with_a_sentence(tiny, arguments, sentence):
    with pytest.raises(RangeError, match=sentence):
        generate(tiny, **{"max_new_tokens": 8, **arguments})


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"min_p": 2.0}]
)
def test_bad_sampling_is_refused(wrong):
    with pytest.raises(RangeError):
        Sampling(**wrong)


def test_nan_logits_are_refused():
    with pytest.raises(RangeError, match="NaN"):
        Sampler(Sampling()).choose(torch.tensor([0.0, float("nan")]))
