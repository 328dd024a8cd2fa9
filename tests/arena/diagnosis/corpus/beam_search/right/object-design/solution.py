# ruff: noqa: B905, RUF005
"""Beam search as a handful of cooperating objects."""

from __future__ import annotations

import bisect
import math
import operator
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Beam:
    """A live beam: what it has generated so far and the sum of its log-probabilities."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0

    def extended(self, token: int, total: float) -> Beam:
        return Beam(self.tokens + (token,), total)


@dataclass(frozen=True)
class Scoring:
    penalty: float
    limit: int

    def score(self, total: float, length: int) -> float:
        return total / length**self.penalty

    def best_imaginable(self, total: float, length: int) -> float:
        """Best score a descendant of a beam of `length` tokens can have if all it adds is free."""
        favourite = self.limit if self.penalty > 0 else length + 1
        return self.score(total, favourite)


@dataclass
class Pool:
    """The best `capacity` finished hypotheses; the earlier one wins a tie."""

    capacity: int
    _keys: list[float] = field(default_factory=list)  # negated scores, ascending
    _tokens: list[tuple[int, ...]] = field(default_factory=list)

    def admits(self, score: float) -> bool:
        return len(self._keys) < self.capacity or -score < self._keys[-1]

    def add(self, tokens: tuple[int, ...], score: float) -> None:
        if not self.admits(score):
            return
        place = bisect.bisect_right(self._keys, -score)
        self._keys.insert(place, -score)
        self._tokens.insert(place, tokens)
        del self._keys[self.capacity :], self._tokens[self.capacity :]

    def answer(self) -> list[tuple[list[int], float]]:
        return [(list(tokens), -key) for key, tokens in zip(self._keys, self._tokens)]


class PromptSearch:
    """The search of one prompt; knows nothing of the others."""

    def __init__(self, prompt: list[int], width: int, eos: int, scoring: Scoring) -> None:
        self.prompt, self.width, self.eos, self.scoring = tuple(prompt), width, eos, scoring
        self.pool = Pool(width)
        self.beams = [Beam()]
        self.length = 0

    def prefixes(self) -> list[list[int]]:
        return [[*self.prompt, *beam.tokens] for beam in self.beams]

    def advance(self, rows: np.ndarray) -> None:
        self.length += 1
        totals = rows + np.array([[beam.total] for beam in self.beams])
        self._collect_finished(totals[:, self.eos])
        totals[:, self.eos] = -np.inf
        self.beams = self._select(totals)
        if self.length == self.scoring.limit:
            for beam in self.beams:
                self.pool.add(beam.tokens, self.scoring.score(beam.total, self.length))
            self.beams = []
        elif self.beams:
            hope = self.scoring.best_imaginable(self.beams[0].total, self.length)
            if not self.pool.admits(hope):
                self.beams = []

    def _collect_finished(self, column: np.ndarray) -> None:
        for beam, total in zip(self.beams, column.tolist()):
            if total > -math.inf:
                done = beam.extended(self.eos, total)
                self.pool.add(done.tokens, self.scoring.score(total, self.length))

    def _select(self, totals: np.ndarray) -> list[Beam]:
        parents, tokens = np.nonzero(totals > -np.inf)
        values = totals[parents, tokens]
        order = np.argsort(-values, kind="stable")[: self.width]
        picks = zip(parents[order].tolist(), tokens[order].tolist(), values[order].tolist())
        return [self.beams[parent].extended(token, total) for parent, token, total in picks]


class Oracle:
    """The language model behind a check of what it answers."""

    def __init__(self, lm, eos: int) -> None:
        self.lm, self.eos = lm, eos

    def ask(self, prefixes: list[list[int]]) -> np.ndarray:
        rows = np.array(self.lm.log_probs(prefixes), dtype=np.float64)
        if rows.ndim != 2 or len(rows) != len(prefixes):
            raise ValueError("the model's answer has a wrong shape")
        if not self.eos < rows.shape[1]:
            raise ValueError("eos_id lies outside the vocabulary")
        if not (rows < np.inf).all():  # false for NaN as well
            raise ValueError("the model's answer holds NaN or +inf")
        return rows


def positive(value, name: str) -> int:
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def checked_prompt(prompt) -> list[int]:
    if not isinstance(prompt, list):
        raise TypeError("a prompt must be a list")
    return [operator.index(token) for token in prompt]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """Up to `beam_width` continuations (tokens, score) of every prompt, best first."""
    width = positive(beam_width, "beam_width")
    limit = positive(max_new_tokens, "max_new_tokens")
    eos = operator.index(eos_id)
    if eos < 0:
        raise ValueError("eos_id must not be negative")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be finite")
    if not isinstance(prompts, list):
        raise TypeError("prompts must be a list of lists")
    scoring = Scoring(float(length_penalty), limit)
    searches = [PromptSearch(checked_prompt(p), width, eos, scoring) for p in prompts]
    oracle = Oracle(lm, eos)
    while running := [search for search in searches if search.beams]:
        blocks = [search.prefixes() for search in running]
        rows = oracle.ask([prefix for block in blocks for prefix in block])
        start = 0
        for search, block in zip(running, blocks):
            search.advance(rows[start : start + len(block)])
            start += len(block)
    return [search.pool.answer() for search in searches]
