"""Batched beam search with frozen frames, one per prompt, and a pure function that folds a step in.

The generated tokens of the live beams are the rows of an integer matrix, the pool is a sorted tuple.
"""

import math
import operator
from numbers import Real
from typing import NamedTuple

import numpy as np


class Rules(NamedTuple):
    width: int
    steps: int
    eos: int
    penalty: float


class Frame(NamedTuple):
    prompt: tuple
    paths: np.ndarray  # (live beams, tokens so far)
    sums: np.ndarray  # (live beams,), float64, best first
    pool: tuple  # of (tokens, score), best first


def _check(prompts, beam_width, max_new_tokens, eos_id, length_penalty):
    width, steps, eos = (operator.index(n) for n in (beam_width, max_new_tokens, eos_id))
    if width < 1 or steps < 1 or eos < 0:
        raise ValueError("beam_width and max_new_tokens must be at least 1, eos_id at least 0")
    if not isinstance(length_penalty, Real) or not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be a finite number")
    if not isinstance(prompts, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in prompts):
        raise TypeError("prompts must be a list of lists of ints")
    starts = [tuple(operator.index(token) for token in prompt) for prompt in prompts]
    return starts, Rules(width, steps, eos, float(length_penalty))


def _ask(lm, prefixes, eos):
    answer = np.asarray(lm.log_probs(prefixes))
    if answer.ndim != 2 or len(answer) != len(prefixes) or answer.dtype.kind != "f":
        raise ValueError("the model must answer with a float array (n, V)")
    if eos >= answer.shape[1]:
        raise ValueError("eos_id is outside the vocabulary")
    if not answer.max() < np.inf:
        raise ValueError("the model answered with NaN or +inf")
    return answer


def _best(sums, count):
    """The places of the `count` largest finite sums, best first, lower places first among equals."""
    if count < len(sums):
        bar = np.partition(sums, len(sums) - count)[len(sums) - count]
        above = np.flatnonzero(sums > bar)
        level = np.flatnonzero(sums == bar)[: count - len(above)]
        places = np.concatenate([above, level])
    else:
        places = np.arange(len(sums))
    places = places[np.lexsort((places, -sums[places]))]
    return places[sums[places] > -np.inf]


def _enter(pool, paths, sums, rules):
    """The pool after these hypotheses came to it, in their order."""
    scores = sums / float(paths.shape[1]) ** rules.penalty
    comers = [(tokens, score) for tokens, score in zip(paths.tolist(), scores.tolist())]
    return tuple(sorted([*pool, *comers], key=lambda pair: -pair[1])[: rules.width])


def _advance(frame, rows, step, rules):
    """The frame after step number `step` (from 1), given the model's rows for its live beams."""
    sums = frame.sums[:, None] + rows.astype(np.float64)
    ends = sums[:, rules.eos].copy()
    sums[:, rules.eos] = -np.inf

    done = np.flatnonzero(ends > -np.inf)
    stops = np.full((len(done), 1), rules.eos)
    pool = _enter(frame.pool, np.hstack([frame.paths[done], stops]), ends[done], rules)

    places = _best(sums.ravel(), rules.width)
    parent, token = np.divmod(places, sums.shape[1])
    paths = np.hstack([frame.paths[parent], token[:, None]])
    live = sums.ravel()[places]
    if step == rules.steps:
        pool = _enter(pool, paths, live, rules)
    return Frame(frame.prompt, paths, live, pool)


def _hopeful(frame, step, rules):
    """Whether a descendant of a live beam could still enter the pool after step number `step`."""
    if len(frame.sums) == 0 or step == rules.steps:
        return False
    if len(frame.pool) < rules.width:
        return True
    length = rules.steps if rules.penalty >= 0 else step + 1
    return frame.sums[0] / float(length) ** rules.penalty > frame.pool[-1][1]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt, as pairs (tokens, score)."""
    starts, rules = _check(prompts, beam_width, max_new_tokens, eos_id, length_penalty)

    frames = [Frame(start, np.empty((1, 0), np.int64), np.zeros(1), ()) for start in starts]
    running, step = list(range(len(frames))), 0
    while running:
        step += 1
        prefixes = [[*frames[i].prompt, *path] for i in running for path in frames[i].paths.tolist()]
        answer = _ask(lm, prefixes, rules.eos)
        cuts = np.cumsum([len(frames[i].sums) for i in running])[:-1]
        for i, rows in zip(running, np.split(answer, cuts)):
            frames[i] = _advance(frames[i], rows, step, rules)
        running = [i for i in running if _hopeful(frames[i], step, rules)]
    return [list(frame.pool) for frame in frames]
