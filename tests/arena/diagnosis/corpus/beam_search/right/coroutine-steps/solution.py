"""Batched beam search: every prompt is a coroutine that asks for rows, one driver answers them all.

A coroutine knows nothing of its neighbours, so the prompts of a batch are independent by construction.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

CHUNK = 64  # entries that share one maximum in the sieve of `best_continuations`

Hypothesis = tuple[list[int], float]
Search = Generator[list[list[int]], np.ndarray, list[Hypothesis]]


@dataclass(frozen=True)
class Rules:
    """The options of one call, checked."""

    beam_width: int
    max_new_tokens: int
    eos_id: int
    length_penalty: float

    def score(self, total: float, length: int) -> float:
        """The score of `length` generated tokens whose log-probabilities add up to `total`."""
        return total / length**self.length_penalty

    def best_after(self, total: float, length: int) -> float:
        """The best score that a live beam of this total and length can still reach.

        No token adds more than 0, and total / n ** penalty is monotonic in n: an end of the range is best.
        """
        nearest = min(length + 1, self.max_new_tokens)
        return max(self.score(total, nearest), self.score(total, self.max_new_tokens))


@dataclass(frozen=True)
class Beam:
    """A live hypothesis: its generated tokens and the sum of their log-probabilities."""

    tokens: list[int]
    total: float


class Pool:
    """The best finished hypotheses of one prompt, best first; of equal ones the earlier is first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[Hypothesis] = []

    def admits(self, score: float) -> bool:
        """Whether a hypothesis of this score would get in."""
        return len(self.entries) < self.capacity or score > self.entries[-1][1]

    def offer(self, tokens: list[int], score: float) -> None:
        """Let a hypothesis in if it is good enough, and the worst one out if there is no room."""
        if not self.admits(score):
            return
        place = bisect_right(self.entries, -score, key=lambda entry: -entry[1])
        self.entries.insert(place, (tokens, score))
        del self.entries[self.capacity :]


class Oracle:
    """The language model, its answers checked."""

    def __init__(self, lm, eos_id: int) -> None:
        self.lm = lm
        self.eos_id = eos_id
        self.vocabulary: int | None = None

    def ask(self, prefixes: list[list[int]]) -> np.ndarray:
        """One row of log-probabilities for every prefix."""
        count = len(prefixes)
        rows = np.asarray(self.lm.log_probs(prefixes))
        if rows.ndim != 2 or rows.shape[0] != count:
            raise ValueError(f"the model answered {count} prefixes with an array of shape {rows.shape}")
        if rows.dtype.kind != "f":
            raise TypeError(f"the model answered with {rows.dtype}, not with floats")
        if self.vocabulary is None:
            self.vocabulary = rows.shape[1]
        if rows.shape[1] != self.vocabulary:
            raise ValueError(f"the vocabulary changed from {self.vocabulary} to {rows.shape[1]} tokens")
        if self.eos_id >= self.vocabulary:
            raise ValueError(f"eos_id {self.eos_id} is outside a vocabulary of {self.vocabulary}")
        if not rows.max() < np.inf:  # a NaN makes the maximum NaN, which is not less than anything
            raise ValueError("the model answered with NaN or +inf")
        return rows


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    rules = checked_rules(beam_width, max_new_tokens, eos_id, length_penalty)
    searches = [search(prompt, rules) for prompt in checked_prompts(prompts)]
    oracle = Oracle(lm, rules.eos_id)
    answers: list[list[Hypothesis]] = [[] for _ in searches]
    questions = {number: next(one) for number, one in enumerate(searches)}
    while questions:
        rows = oracle.ask([prefix for question in questions.values() for prefix in question])
        start = 0
        follow_ups = {}
        for number, question in questions.items():
            stop = start + len(question)
            try:
                follow_ups[number] = searches[number].send(rows[start:stop])
            except StopIteration as finished:
                answers[number] = finished.value
            start = stop
        questions = follow_ups
    return answers


def search(prompt: list[int], rules: Rules) -> Search:
    """Search one prompt: yield the prefixes of the live beams, be sent their rows, return the pool."""
    pool = Pool(rules.beam_width)
    live = [Beam([], 0.0)]
    for length in range(1, rules.max_new_tokens + 1):
        rows = yield [prompt + beam.tokens for beam in live]
        totals = rows + np.array([beam.total for beam in live], dtype=np.float64)[:, None]
        endings = zip(live, rows[:, rules.eos_id].tolist(), totals[:, rules.eos_id].tolist(), strict=True)
        for beam, log_prob, total in endings:
            if log_prob > -math.inf:
                pool.offer([*beam.tokens, rules.eos_id], rules.score(total, length))
        live = best_continuations(live, rows, totals, rules)
        if not live or not pool.admits(rules.best_after(live[0].total, length)):
            return pool.entries
    for beam in live:
        pool.offer(beam.tokens, rules.score(beam.total, rules.max_new_tokens))
    return pool.entries


def best_continuations(live: list[Beam], rows: np.ndarray, totals: np.ndarray, rules: Rules) -> list[Beam]:
    """The next live beams, best first; of equal totals the lower parent, then the lower token.

    `totals` is overwritten. A sieve saves sorting the vocabulary: where W chunks of the entries have a
    maximum of at least `floor`, the W best entries are not below it.
    """
    totals[:, rules.eos_id] = -np.inf
    flat = totals.ravel()
    peaks = np.maximum.reduceat(flat, np.arange(0, flat.size, CHUNK))
    floor = -np.inf
    if peaks.size >= rules.beam_width:
        rank = peaks.size - rules.beam_width
        floor = np.partition(peaks, rank)[rank]
    survivors = np.flatnonzero(flat >= floor)
    parents, tokens = np.divmod(survivors, rows.shape[1])
    possible = (rows[parents, tokens] > -np.inf) & (tokens != rules.eos_id)
    survivors, parents, tokens = survivors[possible], parents[possible], tokens[possible]
    order = np.argsort(-flat[survivors], kind="stable")[: rules.beam_width]
    chosen = zip(parents[order].tolist(), tokens[order].tolist(), flat[survivors[order]].tolist(), strict=True)
    return [Beam([*live[parent].tokens, token], total) for parent, token, total in chosen]


def checked_rules(beam_width, max_new_tokens, eos_id, length_penalty) -> Rules:
    """The options as numbers, or ValueError or TypeError."""
    rules = Rules(
        beam_width=operator.index(beam_width),
        max_new_tokens=operator.index(max_new_tokens),
        eos_id=operator.index(eos_id),
        length_penalty=checked_penalty(length_penalty),
    )
    if rules.beam_width < 1 or rules.max_new_tokens < 1:
        raise ValueError("beam_width and max_new_tokens must be at least 1")
    if rules.eos_id < 0:
        raise ValueError(f"eos_id {rules.eos_id} is outside every vocabulary")
    return rules


def checked_penalty(length_penalty) -> float:
    """The length penalty as a finite float."""
    if isinstance(length_penalty, str) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty must be a finite number, not {length_penalty!r}")
    return float(length_penalty)


def checked_prompts(prompts) -> list[list[int]]:
    """Copies of the prompts, every one a list of ints."""
    if not isinstance(prompts, list | tuple):
        raise TypeError("prompts must be a list of lists of ints")
    for prompt in prompts:
        if not isinstance(prompt, list | tuple):
            raise TypeError(f"a prompt must be a list of ints, not {type(prompt).__name__}")
        for token in prompt:
            if not isinstance(token, int | np.integer):
                raise TypeError(f"a prompt must be a list of ints, but holds {token!r}")
    return [list(prompt) for prompt in prompts]
