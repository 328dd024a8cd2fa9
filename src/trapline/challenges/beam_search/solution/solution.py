"""Batched beam search over any language model that answers log-probabilities."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rules:
    """What a search may do, and how it rates what it found."""

    beam_width: int
    max_new_tokens: int
    eos_id: int
    length_penalty: float

    def score(self, total: float, length: int) -> float:
        """Rates `length` generated tokens whose log-probabilities sum to `total`."""
        return total / length**self.length_penalty

    def best_possible(self, total: float, length: int) -> float:
        """The highest score a descendant of a live beam can reach.

        Its sum is at most `total` <= 0, so its score is monotone in its length: one of the two
        possible extremes, one more token or the maximum, is the best.
        """
        return max(self.score(total, length + 1), self.score(total, self.max_new_tokens))


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation of a prompt."""

    tokens: list[int]
    score: float


class Search:
    """The live beams and the finished hypotheses of one prompt."""

    def __init__(self, prompt: list[int], rules: Rules) -> None:
        """Starts with one live beam: the prompt itself."""
        self.prompt = prompt
        self.rules = rules
        self.length = 0
        self.beams = [[]]
        self.sums = np.zeros(1)
        self.pool = []

    def prefixes(self) -> list[list[int]]:
        """What the language model must continue next: nothing once the search is over."""
        return [self.prompt + tokens for tokens in self.beams]

    def advance(self, log_probs: np.ndarray) -> None:
        """Takes one step with the log-probabilities (live beams, V) of all continuations."""
        self.length += 1
        totals = self.sums[:, None] + log_probs
        self._finish(totals[:, self.rules.eos_id])
        totals[:, self.rules.eos_id] = -np.inf
        self._expand(totals)
        if self.length == self.rules.max_new_tokens:
            self._enter(self.beams, self.sums)
            self.beams = []
        elif self._is_settled():
            self.beams = []

    def results(self) -> list[tuple[list[int], float]]:
        """The finished hypotheses, best first."""
        return [(hypothesis.tokens, hypothesis.score) for hypothesis in self.pool]

    def _finish(self, totals: np.ndarray) -> None:
        """Every possible end of a live beam enters the pool; `totals` (beams,) are their sums."""
        ended = [[*tokens, self.rules.eos_id] for tokens in self.beams]
        possible = np.flatnonzero(totals > -np.inf)
        self._enter([ended[beam] for beam in possible], totals[possible])

    def _enter(self, candidates: list[list[int]], totals: np.ndarray) -> None:
        """Keeps the pool sorted, best first; the sort is stable, so the earlier one wins a tie."""
        for tokens, total in zip(candidates, totals, strict=True):
            score = self.rules.score(float(total), self.length)
            self.pool.append(Hypothesis(tokens, score))
        self.pool.sort(key=lambda hypothesis: -hypothesis.score)
        del self.pool[self.rules.beam_width :]

    def _expand(self, totals: np.ndarray) -> None:
        """The best continuations live on. Flat order is (parent, token): the order of ties."""
        chosen = largest(totals.ravel(), self.rules.beam_width)
        parents, tokens = np.divmod(chosen, totals.shape[1])
        self.beams = [
            self.beams[parent] + [token]
            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]
        self.sums = totals.ravel()[chosen]

    def _is_settled(self) -> bool:
        """Whether no live beam can still enter the pool; one that only ties comes too late."""
        if len(self.pool) < self.rules.beam_width or not self.beams:
            return False
        bound = self.rules.best_possible(float(self.sums[0]), self.length)
        return bound <= self.pool[-1].score


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values above -inf, in falling order, ties by lower index."""
    if values.size > count:
        cut = np.partition(values, values.size - count)[values.size - count]
        candidates = np.flatnonzero(values >= cut)
    else:
        candidates = np.arange(values.size)
    candidates = candidates[values[candidates] > -np.inf]
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def beam_search(
    lm: Any,
    prompts: Iterable[Sequence[int]],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int,
    length_penalty: float = 1.0,
) -> list[list[tuple[list[int], float]]]:
    """The up to `beam_width` best continuations (tokens, score) of every prompt, best first."""
    rules = Rules(
        whole(beam_width, "beam_width", least=1),
        whole(max_new_tokens, "max_new_tokens", least=1),
        whole(eos_id, "eos_id", least=0),
        finite(length_penalty, "length_penalty"),
    )
    searches = [Search(token_list(prompt), rules) for prompt in prompts]
    while any(search.beams for search in searches):
        step(lm, searches, rules.eos_id)
    return [search.results() for search in searches]


def step(lm: Any, searches: list[Search], eos_id: int) -> None:
    """One call of the language model for all live beams, then one step of every open search."""
    open_searches = [search for search in searches if search.beams]
    prefixes = [prefix for search in open_searches for prefix in search.prefixes()]
    log_probs = checked(lm.log_probs(prefixes), len(prefixes), eos_id)
    first = 0
    for search in open_searches:
        last = first + len(search.beams)
        search.advance(log_probs[first:last])
        first = last


def checked(answer: Any, rows: int, eos_id: int) -> np.ndarray:
    """The model's answer as float64, or a ValueError that says what is wrong with it."""
    log_probs = np.asarray(answer, dtype=np.float64)
    if log_probs.ndim != 2 or log_probs.shape[0] != rows:
        raise ValueError(f"log_probs answered shape {log_probs.shape} for {rows} prefixes")
    if eos_id >= log_probs.shape[1]:
        raise ValueError(f"eos_id {eos_id} is outside a vocabulary of {log_probs.shape[1]}")
    if np.isnan(log_probs).any() or np.isposinf(log_probs).any():
        raise ValueError("log_probs answered NaN or +inf")
    return log_probs


def whole(value: Any, name: str, *, least: int) -> int:
    """The value as an int, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return int(value)


def finite(value: Any, name: str) -> float:
    """The value as a float, or an error that names it."""
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)


def token_list(prompt: Sequence[int]) -> list[int]:
    """A copy of the prompt, of which every token is a whole number."""
    return [whole(token, "a prompt's token", least=0) for token in prompt]
