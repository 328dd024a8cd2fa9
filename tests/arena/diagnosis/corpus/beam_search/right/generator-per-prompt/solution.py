"""Batched beam search, one coroutine per prompt.

Every prompt is searched by its own generator: it yields the prefixes that it wants to be scored, is sent
the rows that belong to them and finally returns its pool. The driver knows nothing of beams; it only
gathers the requests of all searches that still run into one call of the model and deals the rows out.
"""

import math
import operator
from collections.abc import Generator
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

Hypothesis = tuple[list[int], float]
Search = Generator[list[list[int]], np.ndarray, list[Hypothesis]]

STRIDE = 64  # how many continuations share one maximum in the first sieve of `best_positions`


@dataclass(frozen=True)
class Rules:
    """The options of one call, checked."""

    width: int
    max_length: int
    eos: int
    penalty: float

    def score(self, total: float, length: int) -> float:
        """The score of `length` generated tokens whose log-probabilities sum to `total`."""
        return total / length**self.penalty

    def bound(self, total: float, length: int) -> float:
        """The best score of any descendant of a live beam of this sum and length.

        No log-probability exceeds 0, so no descendant has a larger sum. A sum that is not positive gains
        from a long divisor: the best length is the last one, or the next one where divisors shrink.
        """
        return self.score(total, length + 1 if self.penalty < 0 else self.max_length)


@dataclass
class Pool:
    """The finished hypotheses of one prompt, best first, at most `capacity` of them."""

    capacity: int
    entries: list[Hypothesis] = field(default_factory=list)

    def admits(self, score: float) -> bool:
        """Whether a hypothesis of this score would get in now."""
        return len(self.entries) < self.capacity or score > self.entries[-1][1]

    def add(self, tokens: list[int], score: float) -> None:
        """Take a hypothesis in behind its equals, or turn it away."""
        if self.admits(score):
            self.entries.append((tokens, score))
            self.entries.sort(key=lambda entry: -entry[1])  # stable: the earlier of equals stays ahead
            del self.entries[self.capacity :]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    rules = checked_rules(beam_width, max_new_tokens, eos_id, length_penalty)
    searches = [search(prompt, rules) for prompt in checked_prompts(prompts)]
    requests = {number: next(running) for number, running in enumerate(searches)}
    answers: list[list[Hypothesis]] = [[] for _ in searches]
    vocabulary = None
    while requests:
        prefixes = [prefix for request in requests.values() for prefix in request]
        rows = checked_rows(lm.log_probs(prefixes), len(prefixes), vocabulary, rules.eos)
        vocabulary = rows.shape[1]
        following = {}
        start = 0
        for number, request in requests.items():
            stop = start + len(request)
            try:
                following[number] = searches[number].send(rows[start:stop])
            except StopIteration as finished:
                answers[number] = finished.value
            start = stop
        requests = following
    return answers


def search(prompt: list[int], rules: Rules) -> Search:
    """Search one prompt: yields prefixes, is sent their rows of log-probabilities, returns the pool."""
    pool = Pool(rules.width)
    tails = np.empty((1, 0), dtype=np.int64)  # one row of generated tokens for each live beam
    totals = np.zeros(1)
    for length in range(1, rules.max_length + 1):
        rows = yield [prompt + tail for tail in tails.tolist()]
        sums = np.add(rows, totals[:, np.newaxis], dtype=np.float64)

        for tail, total in zip(tails.tolist(), sums[:, rules.eos].tolist(), strict=True):
            if total > -math.inf:
                pool.add([*tail, rules.eos], rules.score(total, length))

        sums[:, rules.eos] = -np.inf
        positions = best_positions(sums.ravel(), rules.width)
        parents, tokens = np.divmod(positions, sums.shape[1])
        tails = np.column_stack([tails[parents], tokens])
        totals = sums[parents, tokens]
        if len(totals) == 0:
            break
        if length < rules.max_length and not pool.admits(rules.bound(totals[0], length)):
            return pool.entries

    for tail, total in zip(tails.tolist(), totals.tolist(), strict=True):
        pool.add(tail, rules.score(total, rules.max_length))
    return pool.entries


def best_positions(sums: np.ndarray, width: int) -> np.ndarray:
    """Where the `width` largest sums above -inf lie, best first, and the lower position among equals."""
    candidates = np.flatnonzero((sums >= floor_of_best(sums, width)) & (sums > -np.inf))
    values = sums[candidates]
    if len(values) > width:
        cut = np.partition(values, -width)[-width]
        above = candidates[values > cut]
        level = candidates[values == cut]
        candidates = np.concatenate([above, level[: width - len(above)]])
        values = sums[candidates]
    return candidates[np.argsort(-values, kind="stable")]


def floor_of_best(sums: np.ndarray, width: int) -> float:
    """A cheap lower bound of the `width`-th largest sum: that many disjoint groups have a maximum above it."""
    groups = len(sums) // STRIDE
    if groups < width:
        return -np.inf
    maxima = sums[: groups * STRIDE].reshape(STRIDE, groups).max(axis=0)
    return np.partition(maxima, -width)[-width]


def checked_rules(beam_width, max_new_tokens, eos_id, length_penalty) -> Rules:
    """The options as plain numbers, or an error."""
    if not isinstance(length_penalty, Real):
        raise TypeError("length_penalty must be a number")
    rules = Rules(
        width=operator.index(beam_width),
        max_length=operator.index(max_new_tokens),
        eos=operator.index(eos_id),
        penalty=float(length_penalty),
    )
    if rules.width < 1 or rules.max_length < 1:
        raise ValueError("beam_width and max_new_tokens must be at least 1")
    if rules.eos < 0:
        raise ValueError("eos_id must not be negative")
    if not math.isfinite(rules.penalty):
        raise ValueError("length_penalty must be finite")
    return rules


def checked_prompts(prompts) -> list[list[int]]:
    """Copies of the prompts, or an error."""
    if not isinstance(prompts, list | tuple):
        raise TypeError("prompts must be a list")
    for prompt in prompts:
        if not isinstance(prompt, list | tuple):
            raise TypeError("a prompt must be a list of ints")
    return [[operator.index(token) for token in prompt] for prompt in prompts]


def checked_rows(answer, count: int, vocabulary: int | None, eos: int) -> np.ndarray:
    """The model's answer for `count` prefixes, or an error."""
    rows = np.asarray(answer)
    if rows.dtype.kind != "f":
        raise TypeError("the model must answer with an array of floats")
    if rows.ndim != 2 or rows.shape[0] != count or vocabulary not in (None, rows.shape[1]):
        raise ValueError("the model must answer with one row of the vocabulary for each prefix")
    if eos >= rows.shape[1]:
        raise ValueError("eos_id lies outside the vocabulary")
    if not (rows.max(axis=1) < np.inf).all():  # a maximum over a NaN is NaN and fails, too
        raise ValueError("log-probabilities must not be NaN or +inf")
    return rows
