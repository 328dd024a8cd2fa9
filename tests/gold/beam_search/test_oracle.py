"""The oracle against exhaustive enumeration, and its stop bound against never stopping."""

import itertools

import numpy as np
import pytest

from trapline.gold.beam_search import oracle


def every_hypothesis(law, prompt, vocabulary, longest, eos, penalty):
    """All continuations that end with EOS or at the maximum length, with their scores."""
    found = []
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(vocabulary), repeat=length):
            if eos in tokens[:-1] or (tokens[-1] != eos and length < longest):
                continue
            values = [law((*prompt, *tokens[:n]))[t] for n, t in enumerate(tokens)]
            if np.isfinite(values).all():
                found.append((sum(values) / length**penalty, list(tokens)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, -0.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_the_space_is_exhaustive(random_model, seed, penalty):
    law = random_model(seed, 3, sparse=0.2).law
    want = every_hypothesis(law, (1,), 3, 4, 2, penalty)
    got = oracle.search_one(
        law, (1,), beam_width=3**4, max_new_tokens=4, eos_id=2, length_penalty=penalty
    )
    assert [tokens for tokens, _ in got.hypotheses] == [tokens for _, tokens in want]
    np.testing.assert_allclose([s for _, s in got.hypotheses], [s for s, _ in want], rtol=1e-12)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, -0.5, -1.0])
def test_stopping_at_the_bound_loses_nothing_and_saves_calls(random_model, penalty, monkeypatch):
    settings = {"beam_width": 2, "max_new_tokens": 7, "eos_id": 0, "length_penalty": penalty}
    laws = [random_model(seed, 4).law for seed in range(12)]
    early = [oracle.search_one(law, (3,), **settings) for law in laws]
    monkeypatch.setattr(oracle, "_is_settled", lambda *args: False)
    late = [oracle.search_one(law, (3,), **settings) for law in laws]
    assert [s.hypotheses for s in early] == [s.hypotheses for s in late]
    assert sum(len(s.asked) for s in early) < sum(len(s.asked) for s in late)


def test_the_numbers_of_the_classic_example(table_model):
    law = table_model({(): {0: -3.0, 1: -1.0}, (1,): {2: -4.0}}).law
    settings = {"beam_width": 2, "max_new_tokens": 2, "eos_id": 0, "length_penalty": 0.0}
    found = oracle.search_one(law, (9,), **settings)
    assert found.hypotheses == [([0], -3.0), ([1, 2], -5.0)]
    assert found.asked == [[(9,)], [(9, 1)]]


def test_calls_hold_the_live_beams_of_all_prompts(random_model):
    law = random_model(1, 4).law
    settings = {"beam_width": 2, "max_new_tokens": 3, "eos_id": 0}
    searches = [oracle.search_one(law, prompt, **settings) for prompt in [(1,), (2, 2)]]
    calls = oracle.calls(searches)
    assert len(calls) == max(len(s.asked) for s in searches)
    assert calls[0] == [(1,), (2, 2)]
    assert oracle.calls([]) == []
