"""Batched beam search: one coroutine per prompt, and a driver that asks the model for all of them.

A coroutine yields the prefixes of its live beams, is sent their rows of log-probabilities, and
returns its pool of finished hypotheses.  The driver joins the prefixes of all coroutines that still
run into one call per step, so no prompt can see anything of another.
"""

import heapq
import math
import operator
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

Hypothesis = tuple[list[int], float]
Prefixes = list[list[int]]


@dataclass(frozen=True)
class Settings:
    """The checked arguments of a search."""

    width: int
    max_steps: int
    eos: int
    penalty: float

    def score(self, total: float, length: int) -> float:
        """The score of a hypothesis of `length` tokens whose log-probabilities sum to `total`."""
        return float(total) / float(length) ** self.penalty


class Pool:
    """The `width` best finished hypotheses; a heap with the first one to be evicted on top."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._heap: list[tuple[float, int, list[int]]] = []
        self._offers = 0

    def admits(self, score: float) -> bool:
        """Whether a hypothesis with this score would get in now."""
        return len(self._heap) < self._width or score > self._heap[0][0]

    def offer(self, score: float, tokens: list[int]) -> None:
        """Let a hypothesis in if it is good enough."""
        if not self.admits(score):
            return
        self._offers += 1
        entry = (score, -self._offers, tokens)
        if len(self._heap) < self._width:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)

    def ranking(self) -> list[Hypothesis]:
        """The hypotheses, best first; among equals the one that came earlier."""
        ranked = sorted(self._heap, key=lambda entry: entry[:2], reverse=True)
        return [(tokens, score) for score, _, tokens in ranked]


def _best(sums: np.ndarray, count: int) -> np.ndarray:
    """Flat indices of the `count` largest finite sums, largest first, lower index first on ties."""
    flat = sums.ravel()
    if flat.size > count:
        border = flat.size - count
        threshold = np.partition(flat, border)[border]
        candidates = np.flatnonzero(flat >= threshold)
    else:
        candidates = np.arange(flat.size)
    candidates = candidates[flat[candidates] > -np.inf]
    order = np.argsort(-flat[candidates], kind="stable")
    return candidates[order[:count]]


def _can_improve(pool: Pool, best_total: float, step: int, settings: Settings) -> bool:
    """Whether a descendant of the best live beam could still enter the pool.

    Log-probabilities are at most 0, so the sum stays `best_total` at best, and total / n ** penalty
    is monotone in n: its maximum over the lengths still allowed lies at one of the two ends.
    """
    ends = (step + 1, settings.max_steps)
    return pool.admits(max(settings.score(best_total, length) for length in ends))


def _search(
    prompt: list[int], settings: Settings
) -> Generator[Prefixes, np.ndarray, list[Hypothesis]]:
    """The search of one prompt, as a coroutine."""
    pool = Pool(settings.width)
    beams: Prefixes = [[]]
    totals = np.zeros(1)
    for step in range(1, settings.max_steps + 1):
        rows = yield [prompt + tokens for tokens in beams]
        sums = totals[:, None] + rows.astype(np.float64)

        ended = sums[:, settings.eos].tolist()
        for tokens, total in zip(beams, ended, strict=True):
            if total > -math.inf:
                pool.offer(settings.score(total, step), [*tokens, settings.eos])

        sums[:, settings.eos] = -np.inf
        chosen = _best(sums, settings.width)
        parents, nexts = np.divmod(chosen, sums.shape[1])
        beams = [
            [*beams[parent], token]
            for parent, token in zip(parents.tolist(), nexts.tolist(), strict=True)
        ]
        totals = sums.ravel()[chosen]

        if step == settings.max_steps:
            for tokens, total in zip(beams, totals.tolist(), strict=True):
                pool.offer(settings.score(total, step), tokens)
        elif not beams or not _can_improve(pool, totals[0], step, settings):
            break
    return pool.ranking()


def _ask(lm, prefixes: Prefixes, eos: int) -> np.ndarray:
    """The model's answer for these prefixes, checked."""
    count = len(prefixes)
    table = np.asarray(lm.log_probs(prefixes))
    if table.dtype.kind not in "fiu":
        raise TypeError(f"log-probabilities of dtype {table.dtype}")
    if table.ndim != 2 or table.shape[0] != count:
        raise ValueError(f"the model answered {table.shape} to {count} prefixes")
    if not 0 <= eos < table.shape[1]:
        raise ValueError(f"eos_id {eos} is outside the vocabulary of {table.shape[1]}")
    if not table.max() < np.inf:  # the maximum is NaN if anything is
        raise ValueError("the model answered NaN or +inf")
    return table


def _whole(name: str, value) -> int:
    """`value` as an int of at least 1."""
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def _finite(name: str, value) -> float:
    """`value` as a finite float."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _checked_prompts(prompts) -> Prefixes:
    """Copies of the prompts."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError("every prompt must be a list of ints")
    return [[operator.index(token) for token in prompt] for prompt in prompts]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    settings = Settings(
        width=_whole("beam_width", beam_width),
        max_steps=_whole("max_new_tokens", max_new_tokens),
        eos=operator.index(eos_id),
        penalty=_finite("length_penalty", length_penalty),
    )
    searches = [_search(prompt, settings) for prompt in _checked_prompts(prompts)]
    results: list[list[Hypothesis]] = [[] for _ in searches]
    waiting = {number: next(search) for number, search in enumerate(searches)}
    vocabulary = None
    while waiting:
        sizes = {number: len(group) for number, group in waiting.items()}
        table = _ask(lm, [prefix for group in waiting.values() for prefix in group], settings.eos)
        if vocabulary not in (None, table.shape[1]):
            raise ValueError("the model's vocabulary changed its size")
        vocabulary = table.shape[1]
        waiting = {}
        start = 0
        for number, size in sizes.items():
            rows = table[start : start + size]
            start += size
            try:
                waiting[number] = searches[number].send(rows)
            except StopIteration as stop:
                results[number] = stop.value
    return results
