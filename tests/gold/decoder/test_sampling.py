"""Choosing tokens: the exact law, cut as asked, and rows that do not disturb each other."""

import numpy as np
import pytest
import torch

from trapline.gold.decoder import sampling
from trapline.gold.decoder.sampling import NO_TOKEN, Sampling, TokenSampler, uniforms
from trapline.gold.errors import DTypeError, RangeError

DRAWS = 20_000


def law(logits, way):
    """The probabilities that a row's tokens must follow, one rule after the other, in float64."""
    weights = np.exp((logits - logits.max()) / way.temperature)
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    kept = np.zeros_like(weights)
    total = weights[order[: way.top_k]].sum() if way.top_k else 1.0
    before = 0.0
    for rank, token in enumerate(order):
        share = weights[token] / total
        if (way.top_k and rank >= way.top_k) or before >= way.top_p:
            break
        if share >= way.min_p * weights[order[0]] / total:
            kept[token] = share
        before += share
    return kept / kept.sum()


WAYS = [
    Sampling(0.7, seed=1),
    Sampling(1.0, top_k=3, seed=2),
    Sampling(1.5, top_p=0.8, seed=3),
    Sampling(0.9, top_k=5, top_p=0.7, min_p=0.2, seed=4),
    Sampling(2.0, min_p=0.3, seed=5),
]


@pytest.mark.parametrize("way", WAYS)
def test_samples_follow_the_distribution(way, monkeypatch):
    """20 000 draws: each frequency within 5.5 standard deviations, a false alarm of 1 in 10⁷."""
    monkeypatch.setattr(sampling, "NUCLEUS", 4)
    logits = np.array([1.0, 0.0, -1.0, 2.0, -np.inf, 1.5, 0.3])
    exact = law(logits, way)
    rows = torch.tensor(logits).expand(DRAWS, -1)
    chooser = TokenSampler([way] * DRAWS, 7, torch.device("cpu"))
    tokens = chooser(rows, torch.arange(DRAWS)).numpy()
    counts = np.bincount(tokens, minlength=7)
    assert (counts[exact == 0] == 0).all()
    deviation = np.sqrt(exact * (1 - exact) * DRAWS)
    assert (np.abs(counts - exact * DRAWS) <= 5.5 * deviation + 1e-9).all()


def test_a_rows_choice_depends_on_its_own_settings_only():
    """Alone, or among rows that need all candidates, or a nucleus that does not fit."""
    torch.manual_seed(0)
    logits = torch.randn(7, 3000)
    ways = [Sampling(), *WAYS, Sampling(5.0, top_p=0.99, seed=9)]
    for made in range(20):
        numbers = torch.full((7,), made)
        together = TokenSampler(ways, 3000, logits.device)(logits, numbers).tolist()
        alone = [
            int(TokenSampler([way], 3000, logits.device)(row[None], numbers[:1]))
            for way, row in zip(ways, logits, strict=True)
        ]
        assert together == alone


def test_greedy_takes_the_lower_of_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 1.0]])
    mixed = [Sampling(), Sampling(0.0, top_k=2, seed=8)]
    assert TokenSampler(mixed, 3, logits.device)(logits, torch.zeros(2).long()).tolist() == [1, 0]


def test_rows_without_a_softmax_give_no_token():
    inf = float("inf")
    logits = torch.tensor([[0.0, float("nan")], [0.0, inf], [-inf, -inf], [0.0, -inf]])
    for way, last in ((Sampling(), 0), (Sampling(1.0, seed=3), 0)):
        tokens = TokenSampler([way] * 4, 2, logits.device)(logits, torch.zeros(4).long())
        assert tokens.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, last]


def test_random_numbers_are_those_of_the_published_generator():
    """splitmix64 in plain integers; and they fill [0, 1) evenly."""

    def mixed(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert mixed(0) == 0xE220A8397B1DCDAF  # the generator's first number for the seed 0
    for seed in (0, 1, 12345, 2**40):
        found = uniforms(torch.full((5,), seed), torch.arange(5))
        for number in range(5):
            bits = mixed((mixed(seed) + number * 0x9E3779B97F4A7C15) % 2**64)
            assert float(found[number]) == (bits >> 11) * 2.0**-53
    many = uniforms(torch.full((DRAWS,), 3), torch.arange(DRAWS)).numpy()
    counts, _ = np.histogram(many, 20, (0, 1))
    assert np.abs(counts - DRAWS / 20).max() < 5.5 * np.sqrt(DRAWS / 20)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"min_p": 2.0}]
)
def test_bad_sampling_is_refused(wrong):
    with pytest.raises(RangeError):
        Sampling(**wrong)


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 9.9e-31])
def test_tiny_temperatures_are_refused(temperature):
    with pytest.raises(RangeError, match=r"must be 0 \(greedy\) or at least"):
        Sampling(temperature)


def test_the_smallest_temperature_chooses_like_greedy():
    logits = torch.tensor([[1e7, -1e7, 1e7 + 1], [-3.0, -2.5, -50.0]])
    chooser = TokenSampler([Sampling(sampling.SMALLEST_TEMPERATURE)] * 2, 3, logits.device)
    assert chooser(logits, torch.zeros(2).long()).tolist() == [2, 1]


@pytest.mark.parametrize("wrong", [{"top_k": 2.5}, {"top_k": []}, {"seed": 1.5}, {"seed": None}])
def test_non_integer_settings_are_refused(wrong):
    with pytest.raises(DTypeError, match="must be an integer"):
        Sampling(1.0, **wrong)


def test_any_integer_is_a_seed():
    ways = [Sampling(1.0, seed=seed) for seed in (-1, 2**64 - 1, np.int64(-1), 2**200)]
    logits = torch.zeros(4, 50)
    chosen = TokenSampler(ways, 50, logits.device)(logits, torch.zeros(4).long()).tolist()
    assert len(set(chosen[:3])) == 1


def test_integers_may_be_scalar_tensors():
    assert Sampling(1.0, top_k=torch.tensor(5), seed=torch.tensor(7)).top_k == 5
    with pytest.raises(DTypeError, match="top_k must be an integer, got Tensor"):
        Sampling(1.0, top_k=torch.tensor(2.5))
