"""Batched beam search: one coroutine per prompt, one model call per round.

Every prompt is searched by its own generator. It yields the prefixes it wants to have scored, is
sent their rows of log-probabilities, and returns its pool when it stops. `beam_search` only carries
prefixes and rows back and forth, so prompts cannot influence each other.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

Hypothesis = tuple[list[int], float]
Search = Generator[list[list[int]], np.ndarray, list[Hypothesis]]


@dataclass(frozen=True)
class Rules:
    """The settings that all prompts of a call share."""

    beam_width: int
    max_new_tokens: int
    eos_id: int
    length_penalty: float

    def score(self, total: float, length: int) -> float:
        """The score of `length` generated tokens whose log-probabilities sum to `total`."""
        try:
            divisor = float(length) ** self.length_penalty
        except OverflowError:
            divisor = math.inf
        return float(total) / divisor

    def bound(self, total: float, length: int) -> float:
        """The best score a descendant of a live beam of `length` tokens can reach.

        Its sum is at most `total` <= 0, so a positive penalty favours the greatest length that is
        still allowed and a negative one the smallest.
        """
        reach = self.max_new_tokens if self.length_penalty > 0 else length + 1
        return self.score(total, reach)


class Pool:
    """The best finished hypotheses of one prompt, best first, earlier entries first among equals."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[Hypothesis] = []

    def enter(self, tokens: list[int], score: float) -> None:
        """Add a hypothesis and drop the worst one if there are now too many."""
        self.entries.append((tokens, score))
        self.entries.sort(key=lambda entry: -entry[1])
        del self.entries[self.capacity :]

    def is_closed_to(self, score: float) -> bool:
        """Whether no hypothesis of at most this score can get in any more."""
        return len(self.entries) == self.capacity and score <= self.entries[-1][1]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    rules = Rules(
        beam_width=_whole_number("beam_width", beam_width, 1),
        max_new_tokens=_whole_number("max_new_tokens", max_new_tokens, 1),
        eos_id=_whole_number("eos_id", eos_id, 0),
        length_penalty=_finite_number("length_penalty", length_penalty),
    )
    searches = [_search(prompt, rules) for prompt in _checked_prompts(prompts)]
    results: list[list[Hypothesis]] = [[] for _ in searches]
    wanted = {index: next(search) for index, search in enumerate(searches)}
    vocabulary = None
    while wanted:
        batch = [prefix for prefixes in wanted.values() for prefix in prefixes]
        sizes = [len(prefixes) for prefixes in wanted.values()]
        rows = _checked_answer(lm.log_probs(batch), len(batch), vocabulary, rules.eos_id)
        vocabulary = rows.shape[1]
        shares = np.split(rows, np.cumsum(sizes)[:-1])
        still_wanted = {}
        for index, share in zip(wanted, shares, strict=True):
            try:
                still_wanted[index] = searches[index].send(share)
            except StopIteration as finished:
                results[index] = finished.value
        wanted = still_wanted
    return results


def _search(prompt: list[int], rules: Rules) -> Search:
    """Search one prompt: yield the live beams as prefixes, take their rows, return the pool."""
    pool = Pool(rules.beam_width)
    tails: list[list[int]] = [[]]
    sums = np.zeros(1)
    length = 0
    while True:
        rows = yield [prompt + tail for tail in tails]
        length += 1
        totals = np.add(rows, sums[:, None], dtype=np.float64)

        for tail, total in zip(tails, totals[:, rules.eos_id], strict=True):
            if total > -np.inf:
                pool.enter([*tail, rules.eos_id], rules.score(total, length))
        totals[:, rules.eos_id] = -np.inf

        parents, tokens = _best(totals, rules.beam_width)
        sums = totals[parents, tokens]
        pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
        tails = [[*tails[parent], token] for parent, token in pairs]

        if length == rules.max_new_tokens:
            for tail, total in zip(tails, sums, strict=True):
                pool.enter(tail, rules.score(total, length))
            return pool.entries
        if not tails or pool.is_closed_to(rules.bound(sums[0], length)):
            return pool.entries


def _best(totals: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the `count` greatest sums above -inf, best first.

    Equal sums keep their order in memory, which is by row and then by column.
    """
    flat = totals.ravel()
    floor = -np.inf
    if flat.size > count:
        floor = np.partition(flat, flat.size - count)[flat.size - count]
    picks = np.flatnonzero((flat >= floor) & (flat > -np.inf))
    order = np.argsort(-flat[picks], kind="stable")
    rows, columns = np.divmod(picks[order[:count]], totals.shape[1])
    return rows, columns


def _checked_answer(answer, count: int, vocabulary: int | None, eos_id: int) -> np.ndarray:
    """The model's answer, if it is `count` rows of log-probabilities over one vocabulary."""
    rows = np.asarray(answer)
    if rows.dtype.kind != "f":
        raise TypeError(f"log_probs must answer with floats, not {rows.dtype}")
    if rows.ndim != 2 or rows.shape[0] != count:
        raise ValueError(f"log_probs answered {rows.shape} for {count} prefixes")
    if vocabulary is not None and rows.shape[1] != vocabulary:
        raise ValueError(f"the vocabulary changed from {vocabulary} to {rows.shape[1]} tokens")
    if eos_id >= rows.shape[1]:
        raise ValueError(f"eos_id {eos_id} is outside the vocabulary of {rows.shape[1]} tokens")
    if not rows.max() < np.inf:  # the maximum is NaN as soon as one entry is
        raise ValueError("log_probs answered NaN or +inf")
    return rows


def _checked_prompts(prompts) -> list[list[int]]:
    """Copies of the prompts, if they are lists of ints."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    for prompt in prompts:
        if not isinstance(prompt, list):
            raise TypeError(f"a prompt must be a list of ints, not {type(prompt).__name__}")
        if not all(isinstance(token, Integral) for token in prompt):
            raise TypeError("a prompt must hold nothing but ints")
    return [list(prompt) for prompt in prompts]


def _whole_number(name: str, value, least: int) -> int:
    """`value` as an int, if it is a whole number not below `least`."""
    if not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return int(value)


def _finite_number(name: str, value) -> float:
    """`value` as a float, if it is a finite number."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value}")
    return number
