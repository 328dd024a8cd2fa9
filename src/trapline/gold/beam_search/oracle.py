"""Beam search as its contract states it: one prompt, one beam, one token at a time.

Slow on purpose. Nothing is vectorised and every order is a tuple that sorts, so that each sentence
of the contract corresponds to a line.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

#: Log-probabilities (V,) of every next token after a prefix.
NextLogProbs = Callable[[tuple[int, ...]], np.ndarray]


class Hypothesis(NamedTuple):
    """A finished continuation: its tokens without the prompt, and its score."""

    tokens: list[int]
    score: float


class Search(NamedTuple):
    """The result for one prompt, and the prefixes that each step asked the model about."""

    hypotheses: list[Hypothesis]
    asked: list[list[tuple[int, ...]]]


class _Live(NamedTuple):
    tokens: tuple[int, ...]
    total: float


class _Finished(NamedTuple):
    """Sorts best first: score, then the earlier one, then lower parent beam, then lower token."""

    negative_score: float
    entered: tuple[int, int]
    parent: int
    token: int
    tokens: tuple[int, ...]


def score(total: float, length: int, length_penalty: float) -> float:
    """Sum of log-probabilities over length to the power of the penalty."""
    return float(total / length**length_penalty)


def highest_reachable(
    total: float, length: int, max_new_tokens: int, length_penalty: float
) -> float:
    """The best score that a descendant of a live beam can reach: the maximum over all lengths."""
    lengths = range(length + 1, max_new_tokens + 1)
    return max(score(total, n, length_penalty) for n in lengths)


class _Rules(NamedTuple):
    beam_width: int
    max_new_tokens: int
    eos_id: int
    length_penalty: float


def search_one(
    next_log_probs: NextLogProbs,
    prompt: Sequence[int],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int,
    length_penalty: float = 1.0,
) -> Search:
    """The whole search for one prompt."""
    rules = _Rules(beam_width, max_new_tokens, eos_id, length_penalty)
    live = [_Live((), 0.0)]
    pool: list[_Finished] = []
    asked: list[list[tuple[int, ...]]] = []
    length = 0
    while live and length < max_new_tokens and not _is_settled(live, pool, length, rules):
        prefixes = [(*prompt, *beam.tokens) for beam in live]
        asked.append(prefixes)
        length += 1
        rows = [next_log_probs(prefix) for prefix in prefixes]
        ended, live = _step(live, rows, length, rules)
        pool = sorted(pool + ended)[:beam_width]
    hypotheses = [Hypothesis(list(entry.tokens), -entry.negative_score) for entry in pool]
    return Search(hypotheses, asked)


def search_one_pooled(
    next_log_probs: NextLogProbs,
    prompt: Sequence[int],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int,
    length_penalty: float = 1.0,
) -> Search:
    """The search in which finished and live beams share the places by score, for one prompt.

    A finished beam keeps its sum and its length. The search stops when no place holds a live one.
    """
    places: list[_Place] = [_Place((), 0.0, False)]
    asked: list[list[tuple[int, ...]]] = []
    for _ in range(max_new_tokens):
        live = [place for place in places if not place.ended]
        if not live:
            break
        asked.append([(*prompt, *place.tokens) for place in live])
        contenders = [place for place in places if place.ended]
        for place in live:
            row = next_log_probs((*prompt, *place.tokens)).tolist()
            contenders += [
                _Place((*place.tokens, token), place.total + log_prob, token == eos_id)
                for token, log_prob in enumerate(row)
                if log_prob > -math.inf
            ]
        contenders.sort(key=lambda place: -place.score(length_penalty))
        places = contenders[:beam_width]
    found = [Hypothesis(list(p.tokens), p.score(length_penalty)) for p in places if p.tokens]
    return Search(found, asked)


class _Place(NamedTuple):
    """A beam that holds one of the places, finished or not."""

    tokens: tuple[int, ...]
    total: float
    ended: bool

    def score(self, length_penalty: float) -> float:
        return score(self.total, len(self.tokens), length_penalty)


def _step(
    live: list[_Live], rows: list[np.ndarray], length: int, rules: _Rules
) -> tuple[list[_Finished], list[_Live]]:
    """The hypotheses that end in this step, and the live beams. In the last step all end."""
    ended: list[_Finished] = []
    others: list[tuple[float, int, int]] = []
    for parent, (beam, row) in enumerate(zip(live, rows, strict=True)):
        for token, log_prob in enumerate(row.tolist()):
            total = beam.total + log_prob
            if total == -math.inf:
                continue
            if token == rules.eos_id:
                rated = score(total, length, rules.length_penalty)
                tokens = (*beam.tokens, token)
                ended.append(_Finished(-rated, (length, 0), parent, token, tokens))
            else:
                others.append((-total, parent, token))
    chosen = sorted(others)[: rules.beam_width]
    if length == rules.max_new_tokens:
        for negative_total, parent, token in chosen:
            rated = score(-negative_total, length, rules.length_penalty)
            tokens = (*live[parent].tokens, token)
            ended.append(_Finished(-rated, (length, 1), parent, token, tokens))
    return ended, [_Live((*live[p].tokens, t), -negative) for negative, p, t in chosen]


def _is_settled(live: list[_Live], pool: list[_Finished], length: int, rules: _Rules) -> bool:
    """Whether no live beam can still enter the pool. A tie is not enough to enter."""
    if len(pool) < rules.beam_width:
        return False
    worst = -pool[-1].negative_score
    return all(
        highest_reachable(beam.total, length, rules.max_new_tokens, rules.length_penalty) <= worst
        for beam in live
    )


def calls(searches: Sequence[Search]) -> list[list[tuple[int, ...]]]:
    """The prefixes of each call: one call a step, with the live beams of all prompts."""
    steps = max((len(search.asked) for search in searches), default=0)
    return [
        [prefix for search in searches for prefix in (search.asked[step : step + 1] or [[]])[0]]
        for step in range(steps)
    ]
