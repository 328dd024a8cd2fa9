"""Comprehensive tests with a mock model that returns exact log-probabilities."""

import numpy as np
import pytest
from solution import Beam, beam_search

EOS = 0


class MockModel:
    def __init__(self, steps, vocabulary=5):
        self.steps = steps
        self.vocabulary = vocabulary
        self.calls = 0

    def log_probs(self, prefixes):
        self.calls += 1
        out = np.full((len(prefixes), self.vocabulary), -20.0)
        for row, prefix in zip(out, prefixes):
            for token, value in self.steps.get(tuple(prefix[2:]), {}).items():
                row[token] = value
        return out


def test_eos_beam_retained_with_exact_score():
    model = MockModel({(): {EOS: -3.0, 1: -1.0}, (1,): {2: -4.0}})
    result = beam_search(
        model, [[7, 7]], beam_width=2, max_new_tokens=2, eos_id=EOS, length_penalty=0.0
    )
    assert result[0][0] == ([EOS], -3.0)
    assert result[0][1] == ([1, 2], -5.0)


def test_length_penalty_with_two_eos_beams():
    model = MockModel({(): {EOS: -2.0, 1: -0.5}, (1,): {EOS: -0.5}})
    result = beam_search(
        model, [[7, 7]], beam_width=2, max_new_tokens=3, eos_id=EOS, length_penalty=0.6
    )
    tokens, score = result[0][0]
    assert tokens == [1, EOS]
    assert score == pytest.approx(-1.0 / 2**0.6)


def test_greedy_equivalence():
    model = MockModel({(): {1: -0.1}, (1,): {2: -0.1}, (1, 2): {EOS: -0.1}})
    result = beam_search(
        model, [[7, 7]], beam_width=1, max_new_tokens=5, eos_id=EOS, length_penalty=0.0
    )
    assert result[0][0][0] == [1, 2, EOS]


def test_batch_is_independent():
    steps = {(): {1: -0.1}, (1,): {EOS: -0.1}}
    one = beam_search(MockModel(steps), [[7, 7]], beam_width=2, max_new_tokens=3, eos_id=EOS)
    two = beam_search(
        MockModel(steps), [[7, 7], [8, 8]], beam_width=2, max_new_tokens=3, eos_id=EOS
    )
    assert two == [one[0], one[0]]


def test_one_call_per_step():
    model = MockModel({(): {1: -0.1}, (1,): {2: -0.1}})
    beam_search(model, [[7, 7]] * 4, beam_width=3, max_new_tokens=2, eos_id=EOS)
    assert model.calls == 2


def test_beam_score():
    assert Beam([1, 2], -4.0).score(1.0) == -2.0
    assert Beam([1, 2], -4.0).score(0.0) == -4.0


def test_invalid_width():
    with pytest.raises(ValueError):
        beam_search(MockModel({}), [[7, 7]], beam_width=0, max_new_tokens=1, eos_id=EOS)
