# ruff: noqa: B905
"""Beam search from pure functions over immutable states; beams are merged from sorted streams."""

import math
from heapq import merge
from itertools import accumulate, islice, pairwise
from operator import index
from typing import NamedTuple

import numpy as np


class Rules(NamedTuple):
    width: int
    limit: int
    eos: int
    penalty: float


class Hypothesis(NamedTuple):
    tokens: tuple
    value: float  # a sum while it lives, a score in the pool


class State(NamedTuple):
    prompt: tuple
    beams: tuple
    pool: tuple


def score(total, n, rules):
    return total / n**rules.penalty


def enter(pool, newcomers, rules):
    """Merge already ordered pool and newcomers; merge() prefers the first stream on ties."""
    arriving = sorted(newcomers, key=lambda h: -h.value)
    return tuple(islice(merge(pool, arriving, key=lambda h: -h.value), rules.width))


def continuations(parent, beam, row, eos):
    """Live continuations of one beam as a stream of (-sum, parent, token), ascending."""
    sums = beam.value + row
    sums[eos] = -np.inf
    for token in np.argsort(-sums, kind="stable").tolist():
        if sums[token] == -np.inf:
            return
        yield -float(sums[token]), parent, token


def extend(beams, rows, rules):
    streams = [continuations(p, b, row, rules.eos) for p, (b, row) in enumerate(zip(beams, rows))]
    return tuple(
        Hypothesis((*beams[parent].tokens, token), -negated)
        for negated, parent, token in islice(merge(*streams), rules.width)
    )


def endings(beams, rows, n, rules):
    sums = ((b, b.value + float(row[rules.eos])) for b, row in zip(beams, rows))
    return [
        Hypothesis((*b.tokens, rules.eos), score(total, n, rules))
        for b, total in sums
        if total != -math.inf
    ]


def can_enter(beams, pool, n, rules):
    if not beams:
        return False
    if len(pool) < rules.width:
        return True
    top = beams[0].value
    return max(score(top, n + 1, rules), score(top, rules.limit, rules)) > pool[-1].value


def step(state, rows, n, rules):
    pool = enter(state.pool, endings(state.beams, rows, n, rules), rules)
    beams = extend(state.beams, rows, rules)
    if n == rules.limit:
        last = [Hypothesis(b.tokens, score(b.value, n, rules)) for b in beams]
        return State(state.prompt, (), enter(pool, last, rules))
    return State(state.prompt, beams if can_enter(beams, pool, n, rules) else (), pool)


def advance(lm, states, n, rules):
    """One step of every state that still has beams, with one call of the model."""
    prefixes = [[*s.prompt, *b.tokens] for s in states for b in s.beams]
    rows = checked(lm.log_probs(prefixes), len(prefixes), rules.eos)
    edges = accumulate((len(s.beams) for s in states), initial=0)
    return [
        step(s, rows[a:b], n, rules) if s.beams else s for s, (a, b) in zip(states, pairwise(edges))
    ]


def checked(answer, n, eos):
    rows = np.asarray(answer, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[0] != n:
        raise ValueError("the model's answer is not (n, V)")
    if eos >= rows.shape[1]:
        raise ValueError("eos_id is outside the vocabulary")
    if np.isnan(rows).any() or np.isposinf(rows).any():
        raise ValueError("the model's answer holds NaN or +inf")
    return rows


def make_rules(beam_width, max_new_tokens, eos_id, length_penalty):
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be finite")
    rules = Rules(index(beam_width), index(max_new_tokens), index(eos_id), float(length_penalty))
    if rules.width < 1 or rules.limit < 1:
        raise ValueError("beam_width and max_new_tokens must be at least 1")
    if rules.eos < 0:
        raise ValueError("eos_id is outside the vocabulary")
    return rules


def initial(prompt):
    if not isinstance(prompt, list):
        raise TypeError("a prompt must be a list of ints")
    return State(tuple(map(index, prompt)), (Hypothesis((), 0.0),), ())


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """Per prompt the best continuations as (tokens, score)."""
    rules = make_rules(beam_width, max_new_tokens, eos_id, length_penalty)
    states = [initial(prompt) for prompt in prompts]
    n = 0
    while any(s.beams for s in states):
        n += 1
        states = advance(lm, states, n, rules)
    return [[(list(h.tokens), h.value) for h in s.pool] for s in states]
