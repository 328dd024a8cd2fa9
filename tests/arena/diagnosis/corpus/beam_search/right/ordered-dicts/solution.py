"""Batched beam search on dicts that keep their order.

The whole state of a prompt is two dicts from token tuples to numbers: the live beams with
their sums and the pool with its scores, both best first. The order of a dict is the order of
ties, so a stable sort is all that ranking takes. Steps make new dicts and change none.
"""

from math import isfinite
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np


class Rules(NamedTuple):
    """What stays the same during a search."""

    width: int
    steps: int
    eos: int
    penalty: float


class Search(NamedTuple):
    """Live beams {tokens: sum} and finished hypotheses {tokens: score} of one prompt."""

    live: dict
    pool: dict


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    rules = Rules(
        _whole("beam_width", beam_width, 1),
        _whole("max_new_tokens", max_new_tokens, 1),
        _whole("eos_id", eos_id, 0),
        _finite("length_penalty", length_penalty),
    )
    starts = _checked_prompts(prompts)
    searches = [Search({(): 0.0}, {}) for _ in starts]
    for step in range(1, rules.steps + 1):
        running = [i for i, search in enumerate(searches) if search.live]
        if not running:
            break
        prefixes = [[*starts[i], *tokens] for i in running for tokens in searches[i].live]
        answer = _ask(lm, prefixes, rules.eos)
        row = 0
        for i in running:
            rows = answer[row : row + len(searches[i].live)]
            row += len(rows)
            searches[i] = _advance(searches[i], rows, step, rules)
    return [[(list(tokens), score) for tokens, score in s.pool.items()] for s in searches]


def _advance(search, rows, step, rules):
    """The search after one step, given the log-probabilities of its live beams."""
    parents = list(search.live)
    sums = np.array(list(search.live.values()))[:, None] + rows.astype(np.float64)
    endings = {
        (*tokens, rules.eos): total
        for tokens, total in zip(parents, sums[:, rules.eos].tolist())
        if total > -np.inf
    }
    sums[:, rules.eos] = -np.inf
    live = _best_others(parents, sums, rules.width)
    pool = _enter(search.pool, endings, rules)
    if step == rules.steps:
        return Search({}, _enter(pool, live, rules))
    return Search(live if _can_improve(live, pool, step, rules) else {}, pool)


def _best_others(parents, sums, width):
    """The `width` best continuations {tokens: sum}; flat order is parent, then token."""
    flat = sums.ravel()
    if width < flat.size:
        floor = np.partition(flat, flat.size - width)[flat.size - width]
        places = np.flatnonzero((flat >= floor) & (flat > -np.inf))
    else:
        places = np.flatnonzero(flat > -np.inf)
    ranked = places[np.argsort(-flat[places], kind="stable")][:width]
    parent_of, token_of = np.divmod(ranked, sums.shape[1])
    return {
        (*parents[parent], token): total
        for parent, token, total in zip(parent_of.tolist(), token_of.tolist(), flat[ranked].tolist())
    }


def _enter(pool, arrivals, rules):
    """The pool after the hypotheses {tokens: sum} arrived in their order."""
    scored = [(tokens, _score(total, len(tokens), rules)) for tokens, total in arrivals.items()]
    ranked = sorted([*pool.items(), *scored], key=lambda entry: -entry[1])
    return dict(ranked[: rules.width])


def _can_improve(live, pool, step, rules):
    """Whether a descendant of a live beam could still get into the pool.

    At best it adds nothing to the sum, and the score is monotone in the length, so one of
    the two extreme lengths bounds it.
    """
    if not live or len(pool) < rules.width:
        return bool(live)
    best = max(live.values())
    worst = min(pool.values())
    return max(_score(best, n, rules) for n in (step + 1, rules.steps)) > worst


def _score(total, count, rules):
    return total / float(count) ** rules.penalty


def _ask(lm, prefixes, eos):
    """The answer of the model, checked."""
    count = len(prefixes)
    answer = np.asarray(lm.log_probs(prefixes))
    if answer.dtype.kind not in "fiu":
        raise TypeError(f"log_probs must be real numbers, not {answer.dtype}")
    if answer.ndim != 2 or len(answer) != count:
        raise ValueError(f"log_probs has the shape {answer.shape} for {count} prefixes")
    if eos >= answer.shape[1]:
        raise ValueError("eos_id is outside the vocabulary")
    if not (answer < np.inf).all():
        raise ValueError("log_probs holds NaN or +inf")
    return answer


def _checked_prompts(prompts):
    """Copies of the prompts, as tuples."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list")
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError("a prompt must be a list of ints")
        if not all(_is_int(token) for token in prompt):
            raise TypeError("a prompt must hold ints only")
    return [tuple(int(token) for token in prompt) for prompt in prompts]


def _is_int(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def _whole(name, value, low):
    if not _is_int(value):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")
    return int(value)


def _finite(name, value):
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)
