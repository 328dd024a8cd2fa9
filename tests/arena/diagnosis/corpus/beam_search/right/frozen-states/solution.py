"""Batched beam search: pure functions that fold the model's answers over frozen search states.

A prompt's search is one immutable `Search`: its live beams and its pool.  Every step builds new
searches from the old ones and the model's rows; nothing is changed in place.
"""

import math
import numbers
import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np


class Beam(NamedTuple):
    """A live beam: the tokens generated so far and the sum of their log-probabilities."""

    tokens: tuple
    total: float


class Hypothesis(NamedTuple):
    """A finished hypothesis with its length-normalised score."""

    tokens: tuple
    score: float


@dataclass(frozen=True)
class Rules:
    """The checked parameters of one call."""

    width: int
    max_steps: int
    eos: int
    penalty: float

    def score(self, total, count):
        """The score of `count` generated tokens whose log-probabilities sum to `total`."""
        return float(total / float(count) ** self.penalty)


@dataclass(frozen=True)
class Search:
    """The state of one prompt: live beams (best first) and pool (best first)."""

    prompt: tuple
    live: tuple = (Beam((), 0.0),)
    pool: tuple = ()


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt, as lists of (tokens, score).

    lm.log_probs(prefixes) takes a list of n prefixes and returns (n, V) log-probabilities.
    """
    rules = _checked_rules(beam_width, max_new_tokens, eos_id, length_penalty)
    searches = tuple(Search(prompt) for prompt in _checked_prompts(prompts))
    vocabulary = None
    for length in range(1, rules.max_steps + 1):
        prefixes = [
            [*search.prompt, *beam.tokens] for search in searches for beam in search.live
        ]
        if not prefixes:
            break
        rows = _checked_answer(lm.log_probs(prefixes), len(prefixes), vocabulary, rules.eos)
        vocabulary = rows.shape[1]
        searches = _step_all(searches, rows, length, rules)
    return [
        [(list(tokens), score) for tokens, score in search.pool] for search in searches
    ]


def _step_all(searches, rows, length, rules):
    """Every search after its own rows of the model's answer; stopped ones have none."""
    advanced = []
    start = 0
    for search in searches:
        stop = start + len(search.live)
        if search.live:
            search = _step(search, rows[start:stop], length, rules)
        advanced.append(search)
        start = stop
    return tuple(advanced)


def _step(search, rows, length, rules):
    """The search after one step, in which its beams grow to `length` generated tokens."""
    totals = np.array([beam.total for beam in search.live], dtype=np.float64)
    sums = totals[:, None] + rows
    pool = _merged(search.pool, _finished(search.live, sums[:, rules.eos], length, rules), rules)
    sums[:, rules.eos] = -np.inf
    live = _best_continuations(search.live, sums, rules.width)
    if length == rules.max_steps:
        survivors = [Hypothesis(b.tokens, rules.score(b.total, length)) for b in live]
        return replace(search, live=(), pool=_merged(pool, survivors, rules))
    if _is_over(live, pool, length, rules):
        live = ()
    return replace(search, live=live, pool=pool)


def _finished(live, sums, length, rules):
    """The hypotheses that end with EOS in this step, in the order of their parents."""
    return [
        Hypothesis((*beam.tokens, rules.eos), rules.score(total, length))
        for beam, total in zip(live, sums.tolist())
        if total > -math.inf
    ]


def _merged(pool, newcomers, rules):
    """The pool after `newcomers` came in this order: the W best, earlier ones first in a tie."""
    ranked = sorted((*pool, *newcomers), key=lambda hypothesis: -hypothesis.score)
    return tuple(ranked[: rules.width])


def _best_continuations(live, sums, width):
    """The `width` best possible continuations in `sums` (beams, V), best first."""
    flat = sums.ravel()
    if flat.size > width:
        threshold = np.partition(flat, flat.size - width)[flat.size - width]
        candidates = np.flatnonzero((flat >= threshold) & (flat > -np.inf))
    else:
        candidates = np.flatnonzero(flat > -np.inf)
    # Flat positions ascend by parent and token, so a stable sort settles ties as it should.
    order = np.argsort(-flat[candidates], kind="stable")[:width]
    chosen = candidates[order]
    parents, tokens = np.divmod(chosen, sums.shape[1])
    return tuple(
        Beam((*live[parent].tokens, token), total)
        for parent, token, total in zip(parents.tolist(), tokens.tolist(), flat[chosen].tolist())
    )


def _is_over(live, pool, length, rules):
    """Whether no live beam of `length` tokens can still enter the pool."""
    if not live:
        return True
    if len(pool) < rules.width:
        return False
    # A sum can only fall.  For a fixed sum the score is monotone in the length, so that the best
    # one lies at one end of the lengths that are left; the first live beam has the largest sum.
    total = live[0].total
    reachable = max(rules.score(total, length + 1), rules.score(total, rules.max_steps))
    return reachable <= pool[-1].score


def _checked_rules(beam_width, max_new_tokens, eos_id, length_penalty):
    """The parameters as `Rules`, or an error."""
    width = operator.index(beam_width)
    max_steps = operator.index(max_new_tokens)
    eos = operator.index(eos_id)
    if width < 1:
        raise ValueError("beam_width must be at least 1")
    if max_steps < 1:
        raise ValueError("max_new_tokens must be at least 1")
    if eos < 0:
        raise ValueError("eos_id must not be negative")
    if not isinstance(length_penalty, numbers.Real):
        raise TypeError("length_penalty must be a real number")
    try:
        penalty = float(length_penalty)
    except OverflowError as error:
        raise ValueError("length_penalty is too large") from error
    if not math.isfinite(penalty):
        raise ValueError("length_penalty must be finite")
    return Rules(width, max_steps, eos, penalty)


def _checked_prompts(prompts):
    """The prompts as tuples of ints, or an error."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    checked = []
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError("a prompt must be a list of ints")
        checked.append(tuple(operator.index(token) for token in prompt))
    return checked


def _checked_answer(answer, count, vocabulary, eos):
    """The model's answer as an array (count, V), or an error."""
    rows = np.asarray(answer)
    if not np.issubdtype(rows.dtype, np.floating):
        raise TypeError("the model must answer with floats")
    if rows.ndim != 2 or rows.shape[0] != count:
        raise ValueError(f"the model must answer ({count}, V), not {rows.shape}")
    if vocabulary is not None and rows.shape[1] != vocabulary:
        raise ValueError("the model changed the size of its vocabulary")
    if eos >= rows.shape[1]:
        raise ValueError("eos_id lies outside the vocabulary")
    if not np.all(rows < np.inf):
        raise ValueError("the model's answer holds NaN or +inf")
    return rows
