"""Batched beam search on one table for the whole batch.

The live beams of all prompts are the rows of one table, sorted by prompt and then by rank. A step adds
the model's answer to the rows' sums, takes the EOS column out into the pools, and sorts what is left
into the next table.
"""

import math
import operator
from bisect import bisect_right
from typing import NamedTuple

import numpy as np


class Hypothesis(NamedTuple):
    tokens: list
    score: float


class Beams(NamedTuple):
    """Live beams: the prompt each belongs to, the sum of its log-probabilities, its tokens."""

    owner: np.ndarray
    total: np.ndarray
    tokens: np.ndarray

    def take(self, rows):
        return Beams(self.owner[rows], self.total[rows], self.tokens[rows])


class Pool:
    """The finished hypotheses of one prompt: at most `width`, best first, earlier ones first in a tie."""

    def __init__(self, width):
        self.width = width
        self.hypotheses = []

    def admits(self, score):
        return len(self.hypotheses) < self.width or score > self.hypotheses[-1].score

    def enter(self, tokens, score):
        if self.admits(score):
            place = bisect_right(self.hypotheses, -score, key=lambda hypothesis: -hypothesis.score)
            self.hypotheses.insert(place, Hypothesis(tokens.tolist(), score))
            del self.hypotheses[self.width :]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    width = _count("beam_width", beam_width)
    last_step = _count("max_new_tokens", max_new_tokens)
    eos = operator.index(eos_id)
    penalty = _finite("length_penalty", length_penalty)
    prompts = _token_lists(prompts)

    pools = [Pool(width) for _ in prompts]
    beams = Beams(
        owner=np.arange(len(prompts)),
        total=np.zeros(len(prompts)),
        tokens=np.zeros((len(prompts), 0), dtype=np.int64),
    )
    for step in range(1, last_step + 1):
        if not len(beams.owner):
            break
        totals = _continue(lm, prompts, beams, eos)
        divisor = float(step) ** penalty
        _finish(pools, _eos_continuations(beams, totals, eos), divisor)
        totals[:, eos] = -np.inf
        beams = _best_continuations(beams, totals, width)
        if step == last_step:
            _finish(pools, beams, divisor)
        else:
            divisors = (float(step + 1) ** penalty, float(last_step) ** penalty)
            beams = _drop_stopped(pools, beams, divisors)
    return [[tuple(hypothesis) for hypothesis in pool.hypotheses] for pool in pools]


def _continue(lm, prompts, beams, eos):
    """The sums of all continuations, (n, V) in float64, from one call of the model."""
    prefixes = [
        prompts[owner] + tokens
        for owner, tokens in zip(beams.owner.tolist(), beams.tokens.tolist(), strict=True)
    ]
    count = len(prefixes)
    answer = np.asarray(lm.log_probs(prefixes))
    if answer.ndim != 2 or len(answer) != count:
        raise ValueError(f"the model answered {answer.shape} for {count} prefixes")
    if answer.dtype.kind != "f":
        raise TypeError(f"the model answered with {answer.dtype}")
    if not 0 <= eos < answer.shape[1]:
        raise ValueError(f"eos_id {eos} is outside the vocabulary of {answer.shape[1]}")
    if not answer.max() < np.inf:
        raise ValueError("the model answered with NaN or +inf")
    return np.add(answer, beams.total[:, None], dtype=np.float64)


def _eos_continuations(beams, totals, eos):
    """The beams that end here with EOS, in the order of their parents."""
    rows = np.flatnonzero(totals[:, eos] > -np.inf)
    return _extend(beams, rows, np.full(len(rows), eos), totals[rows, eos])


def _extend(beams, rows, tokens, sums):
    grown = np.column_stack((beams.tokens[rows], tokens))
    return Beams(beams.owner[rows], sums, grown)


def _finish(pools, ended, divisor):
    """Enter hypotheses into the pools of their prompts, in the order of the table."""
    for owner, total, tokens in zip(ended.owner.tolist(), ended.total.tolist(), ended.tokens, strict=True):
        pools[owner].enter(tokens, total / divisor)


def _best_continuations(beams, totals, width):
    """The `width` best continuations of each prompt; ties go to the lower parent, then the lower token."""
    floor = _floors(beams.owner, totals, width)
    chosen = totals >= floor[:, None]
    chosen &= totals > -np.inf
    rows, tokens = np.nonzero(chosen)
    sums = totals[rows, tokens]
    owner = beams.owner[rows]
    order = np.lexsort((-sums, owner))
    first = np.searchsorted(owner, owner)
    order = order[np.arange(len(order)) - first < width]
    return _extend(beams, rows[order], tokens[order], sums[order])


def _floors(owner, totals, width):
    """Per row, a sum below which no continuation of its prompt is among the `width` best.

    One row alone offers `width` continuations at or above its own width-th best, so the highest of
    these among the rows of a prompt is a floor for all of them.
    """
    vocabulary = totals.shape[1]
    if vocabulary < width:
        return np.full(len(totals), -np.inf)
    row_floor = np.partition(totals, vocabulary - width, axis=1)[:, vocabulary - width]
    _, starts, group = np.unique(owner, return_index=True, return_inverse=True)
    return np.maximum.reduceat(row_floor, starts)[group]


def _drop_stopped(pools, beams, divisors):
    """Without the beams of prompts whose pool can no longer change.

    A sum only falls, so the best descendant of a beam keeps its sum; its score is then monotone in the
    length, and the best one has the shortest or the longest length that is still allowed. The best
    beam of a prompt comes first in the table and speaks for the others.
    """
    owners, starts = np.unique(beams.owner, return_index=True)
    open_owners = [
        owner
        for owner, total in zip(owners.tolist(), beams.total[starts].tolist(), strict=True)
        if pools[owner].admits(max(total / divisor for divisor in divisors))
    ]
    return beams.take(np.isin(beams.owner, open_owners))


def _count(name, value):
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1")
    return number


def _finite(name, value):
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite")
    return number


def _token_lists(prompts):
    """The prompts, copied into lists of Python ints."""
    if not isinstance(prompts, list | tuple):
        raise TypeError("prompts must be a list")
    for prompt in prompts:
        if not isinstance(prompt, list | tuple):
            raise TypeError("every prompt must be a list of ints")
    return [[operator.index(token) for token in prompt] for prompt in prompts]
