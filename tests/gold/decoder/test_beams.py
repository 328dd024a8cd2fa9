"""Beam search on a decoder: shared pages change nothing, and wide beams find the best of all."""

from itertools import product

import pytest
import torch

from trapline.gold.beam_search.api import beam_search, checked_rules
from trapline.gold.decoder import beams, graphed_step
from trapline.gold.decoder.beams_device import LOOK, DeviceSearch
from trapline.gold.decoder.generate import generate
from trapline.gold.errors import RangeError

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [2], [7, 1, 8]]
FAMILIES = ["llama", "mistral", "qwen3", "gpt2"]


class Uncached:
    """The whole text again for every beam and step."""

    def __init__(self, decoder):
        self.decoder = decoder

    def log_probs(self, prefixes):
        rows = [self.decoder(torch.tensor([prefix]))[0, -1] for prefix in prefixes]
        return torch.log_softmax(torch.stack(rows).double(), dim=-1).numpy()


@pytest.mark.parametrize("policy", ["canonical", "hf", "vllm"])
def test_beams_are_those_of_the_uncached_model(decoder, policy, monkeypatch, same_beams):
    monkeypatch.setattr(graphed_step, "WORTH_SHARING", 1)  # the prompt's one full page is read once
    options = {"beam_width": 3, "max_new_tokens": 8, "eos_id": [4, 11], "policy": policy}
    expected = beam_search(Uncached(decoder), PROMPTS, **options)
    same_beams(beams.search(decoder, PROMPTS, **options), expected)


@pytest.mark.parametrize(
    ("family", "policy"),
    [*((family, "canonical") for family in FAMILIES), ("llama", "hf"), ("llama", "vllm")],
)
def test_a_search_on_the_device_finds_the_same_beams(make, family, policy, same_beams):
    """What a GPU captures, run on the CPU, twice: one search does not affect the next."""
    decoder = make(family)
    options = {"beam_width": 3, "max_new_tokens": 8, "eos_id": [4, 11], "policy": policy}
    expected = beams.search(decoder, PROMPTS, **options)
    rules, count = checked_rules(3, 8, [4, 11], policy=policy)
    search = DeviceSearch(decoder, [len(prompt) for prompt in PROMPTS], rules)
    other = [[(token + 1) % 23 for token in prompt] for prompt in PROMPTS]
    assert search(other, 1) != [best[:1] for best in expected]
    same_beams(search(PROMPTS, count), expected)


def test_a_search_on_the_device_stops_early(make, monkeypatch):
    decoder = make("llama")
    decoder.head.weight[4] = 40 * decoder.norm.weight.sign()  # nothing but ends
    rules, _ = checked_rules(2, 60, 4, policy="hf", early_stopping=True)
    search = DeviceSearch(decoder, [3], rules)
    steps = []
    monkeypatch.setattr(search, "_step", lambda at, step=search._step: steps.append(step(at)))
    found = search([[1, 2, 3]], 2)
    assert len(steps) <= 2 * LOOK  # a look is answered while the steps after it run
    assert found == beams.search(
        decoder, [[1, 2, 3]], beam_width=2, max_new_tokens=60, eos_id=4, policy="hf",
        early_stopping=True,
    )  # fmt: skip


def test_bad_input_of_a_search_on_the_device_is_refused(make):
    decoder = make("llama")
    rules, _ = checked_rules(2, 5, 4)
    with pytest.raises(RangeError, match="empty"):
        DeviceSearch(decoder, [0], rules)([[]], 1)
    with pytest.raises(RangeError, match="must have \\[2\\] tokens, got \\[3\\]"):
        DeviceSearch(decoder, [2], rules)([[1, 2, 3]], 1)
    with pytest.raises(RangeError, match="outside the vocabulary of 23"):
        DeviceSearch(decoder, [1], checked_rules(2, 5, 23)[0])
    decoder.embedding.weight[9] = float("nan")
    with pytest.raises(RangeError, match="NaN"):
        DeviceSearch(decoder, [1], rules)([[9]], 1)


def test_one_beam_is_never_searched_on_the_device(make, monkeypatch):
    """Its step takes a beam's own places for all there is, and would not see the prompt."""
    decoder = make("llama")
    with pytest.raises(RangeError, match="beam_width >= 2"):
        DeviceSearch(decoder, [3], checked_rules(1, 5, 4)[0])
    made = []
    monkeypatch.setattr(beams, "DeviceSearch", lambda *given: made.append("device"))
    monkeypatch.setattr(beams, "BeamModel", lambda *given, **named: made.append("host"))
    monkeypatch.setattr(type(decoder), "device", torch.device("cuda"))
    for width in (1, 2):
        search = beams.Searcher(decoder, beam_width=width, max_new_tokens=5, eos_id=4)
        search._model([[1, 2, 3]])
    assert made == ["host", "device"]
    search._model([[1, 2, 3]], on_device=False)  # bias and penalties
    assert made == ["host", "device", "host"]


def test_one_beam_is_greedy_while_nothing_ends(make):
    """An end would enter the pool of finished hypotheses, whatever greedy would choose."""
    decoder = make("llama", vocab_size=12)
    greedy = generate(decoder, [[1, 2]], max_new_tokens=6)[0]

    class WithoutEnd(beams.BeamModel):
        def _candidates(self, logits):
            logits[:, 0] = -torch.inf
            return super()._candidates(logits)

    assert 0 not in greedy
    model = WithoutEnd(decoder, [[1, 2]], 1, 6, eos_ids=[0])
    for _ in range(2):  # a model serves one search after the other
        ((best, *_),) = beam_search(model, [[1, 2]], beam_width=1, max_new_tokens=6, eos_id=0)
        assert list(best.tokens) == greedy


def test_wide_beams_find_the_best_of_all(make):
    """Every continuation of three tokens, scored one by one, against a beam as wide as the tree."""
    decoder = make("llama", vocab_size=5)
    scored = {}
    for tokens in product(range(5), repeat=3):
        cut = tokens[: tokens.index(4) + 1] if 4 in tokens else tokens
        steps = torch.log_softmax(decoder(torch.tensor([[1, 2, *cut]]))[0].double(), -1)
        scored[cut] = sum(float(steps[1 + i, t]) for i, t in enumerate(cut)) / len(cut)
    ((best, *_),) = beams.search(decoder, [[1, 2]], beam_width=125, max_new_tokens=3, eos_id=4)
    winner = max(scored, key=scored.get)
    assert best.tokens == winner
    assert best.score == pytest.approx(scored[winner], rel=1e-5)


def test_beams_share_the_pages_of_their_prompt(make):
    decoder = make("llama")
    model = beams.BeamModel(decoder, PROMPTS[:1], 3, 8, eos_ids=[0])
    model.start(PROMPTS[:1])
    model.follow([0, 0, 0], [1, 2, 3])
    tables = [row.table for row in model._rows]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3  # the page that each writes to
    model.follow([2], [5])
    assert model.pool.book.num_pages - model.pool.book.free_pages == 2


def test_bad_input_is_refused(make):
    decoder = make("llama")
    options = {"beam_width": 2, "max_new_tokens": 5, "eos_id": 4}
    with pytest.raises(RangeError, match="65 positions"):
        beams.search(decoder, [[1] * 60], **options)
    with pytest.raises(RangeError, match="empty"):
        beams.search(decoder, [[]], **options)
    with pytest.raises(RangeError, match="beam_width"):
        beams.search(decoder, [[1]], **{**options, "beam_width": 0})
    with pytest.raises(RangeError, match="outside the vocabulary of 23"):
        beams.search(decoder, [[1]], **{**options, "eos_id": 23})
    decoder.embedding.weight[9] = float("nan")
    with pytest.raises(RangeError, match="NaN"):
        beams.search(decoder, [[9]], **options)


def test_a_searcher_serves_several_batches(make):
    decoder = make("llama")
    options = {"beam_width": 3, "max_new_tokens": 5, "eos_id": [4, 11], "n_best": 2}
    searcher = beams.Searcher(decoder, **options)
    batches = [[[1, 2, 3], [7]], [[4, 4, 9], [2]], [[5]], []]
    for batch in batches:
        assert searcher(batch) == beams.search(decoder, batch, **options)
    pages = searcher._kept[1].pool
    searcher([[6]])
    assert searcher._kept[1].pool is pages  # the lengths are those of the batch before
