"""Exact language models for beam search."""

from collections.abc import Callable

import numpy as np
import pytest


class PrefixModel:
    """A language model from a function of the prefix; remembers what it was asked."""

    def __init__(self, law: Callable[[tuple[int, ...]], np.ndarray]) -> None:
        self.law = law
        self.calls: list[list[tuple[int, ...]]] = []

    def log_probs(self, prefixes: list[list[int]]) -> np.ndarray:
        self.calls.append([tuple(prefix) for prefix in prefixes])
        return np.stack([self.law(tuple(prefix)) for prefix in prefixes])


def _random(
    seed: int, vocabulary: int, *, coarse: bool = False, sparse: float = 0.0
) -> PrefixModel:
    def law(prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        if coarse:
            values = -0.5 * rng.integers(1, 4, vocabulary)
        else:
            values = np.log(rng.dirichlet(np.ones(vocabulary)))
        return np.where(rng.random(vocabulary) < sparse, -np.inf, values)

    return PrefixModel(law)


def _table(entries: dict[tuple[int, ...], dict[int, float]], vocabulary: int = 5) -> PrefixModel:
    """Continuations of the prompt (9,); what is not mentioned is impossible."""

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        values = np.full(vocabulary, -np.inf)
        for token, value in entries[prefix[1:]].items():
            values[token] = value
        return values

    return PrefixModel(law)


@pytest.fixture
def random_model() -> Callable[..., PrefixModel]:
    return _random


@pytest.fixture
def table_model() -> Callable[..., PrefixModel]:
    return _table
