"""The training text: the grammar's probabilities are what its documents follow."""

import itertools

import numpy as np
import pytest

from trapline.challenges.ternary_training.text import (
    Grammar,
    _drawn,
    _up_to,
    noise,
    prose,
    unigram_perplexity,
)

VOCAB = 40


@pytest.fixture
def grammar() -> Grammar:
    return Grammar(np.random.default_rng(5), VOCAB)


def test_true_probabilities_add_up_to_one(grammar: Grammar) -> None:
    document = grammar.document(np.random.default_rng(6), 12)
    for length in range(1, 12):
        with np.errstate(divide="ignore"):
            nexts = [grammar.log_probs([*document[:length], t])[-1] for t in range(VOCAB)]
        assert np.sum(np.exp(nexts)) == pytest.approx(1.0)


def test_documents_are_possible_and_of_all_lengths(grammar: Grammar) -> None:
    documents = grammar.documents(np.random.default_rng(7), 60, 20)
    assert {len(document) for document in documents} == set(range(10, 21))
    for document in documents:
        assert np.isfinite(grammar.log_probs(document)).all()


def test_no_token_follows_itself(grammar: Grammar) -> None:
    """What the trap for unshifted targets rests on."""
    for document in grammar.documents(np.random.default_rng(8), 60, 20):
        assert all(first != second for first, second in itertools.pairwise(document))


def test_there_is_much_to_learn_beyond_counting(grammar: Grammar) -> None:
    rng = np.random.default_rng(9)
    shown, unseen = grammar.documents(rng, 200, 33), grammar.documents(rng, 60, 33)
    truth = np.exp(-np.mean(np.concatenate([grammar.log_probs(d) for d in unseen])))
    assert truth < unigram_perplexity(shown, unseen, VOCAB) / 3


def test_two_runs_have_two_grammars() -> None:
    first, second = (Grammar(np.random.default_rng(seed), VOCAB) for seed in (1, 2))
    assert not np.array_equal(first.class_of, second.class_of)


def test_noise_is_level() -> None:
    documents = noise(np.random.default_rng(10), 8, 400, 10)
    counts = np.bincount(np.concatenate(documents), minlength=8)
    assert counts.sum() == 4000
    assert np.all(np.abs(counts - 500) < 6 * np.sqrt(500))


def test_prose_starts_at_the_given_token_id() -> None:
    documents, letters = prose(first=VOCAB)
    found = np.concatenate(documents)
    assert found.min() == VOCAB
    assert found.max() == VOCAB + letters - 1
    assert len({tuple(document) for document in documents}) == len(documents)


@pytest.mark.parametrize("shares", [[1.0], [0.7, 0.3], [0.0, 0.2, 0.0, 0.8, 0.0], [1 / 3] * 3])
def test_words_are_drawn_as_by_the_generator(shares: list[float]) -> None:
    ours, theirs = np.random.default_rng(9), np.random.default_rng(9)
    places = _up_to(np.array(shares))
    for _ in range(500):
        assert _drawn(ours, places) == theirs.choice(len(shares), p=shares)
