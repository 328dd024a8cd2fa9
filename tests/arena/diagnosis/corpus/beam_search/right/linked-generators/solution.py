"""Batched beam search: every prompt is a generator that hands out prefixes and receives rows."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class _Beam:
    """A live hypothesis: its last token, the beam it grew from, its sum of log-probabilities."""

    parent: _Beam | None
    token: int
    total: float

    def generated(self):
        """The generated tokens, oldest first."""
        tokens = []
        beam = self
        while beam.parent is not None:
            tokens.append(beam.token)
            beam = beam.parent
        tokens.reverse()
        return tokens


class _Pool:
    """The best finished hypotheses, best first; a newcomer stands behind its equals."""

    def __init__(self, capacity):
        self.capacity = capacity
        self._keys = []
        self._entries = []

    def admits(self, score):
        """Whether a hypothesis of this score would get in."""
        return len(self._keys) < self.capacity or -score < self._keys[-1]

    def offer(self, beam, score):
        """Take the hypothesis in if it is good enough."""
        if not self.admits(score):
            return
        place = bisect.bisect_right(self._keys, -score)
        self._keys.insert(place, -score)
        self._entries.insert(place, (beam, score))
        del self._keys[self.capacity :]
        del self._entries[self.capacity :]

    def answer(self):
        """The pool as pairs (tokens, score)."""
        return [(beam.generated(), score) for beam, score in self._entries]


@dataclass(frozen=True)
class _Settings:
    """The arguments of one search that all prompts share."""

    width: int
    steps: int
    eos: int
    penalty: float

    def score(self, total, length):
        """The normalised score of a hypothesis."""
        return float(total) / float(length) ** self.penalty

    def bound(self, total, length):
        """The best score that a descendant of a beam of this length can have."""
        longest = self.steps if self.penalty > 0 else length + 1
        return self.score(total, longest)


def _row_candidates(row, width):
    """The tokens of the `width` largest entries of a row; of equals the lower tokens."""
    if row.size <= width:
        tokens = np.arange(row.size)
    else:
        order = np.argpartition(row, row.size - width)
        floor = row[order[row.size - width]]
        better = np.flatnonzero(row > floor)
        equal = np.flatnonzero(row == floor)
        tokens = np.concatenate([better, equal[: width - better.size]])
    return tokens[row[tokens] != -np.inf]


def _grow(beams, rows, settings):
    """The live beams of the next step, best first. `rows` holds sums, EOS included."""
    parents, tokens, totals = [], [], []
    for number in range(len(beams)):
        row = rows[number].copy()
        row[settings.eos] = -np.inf
        found = _row_candidates(row, settings.width)
        parents.append(np.full(found.size, number))
        tokens.append(found)
        totals.append(row[found])
    parents = np.concatenate(parents)
    tokens = np.concatenate(tokens)
    totals = np.concatenate(totals)
    ranking = np.lexsort((tokens, parents, -totals))[: settings.width]
    return [_Beam(beams[parents[i]], int(tokens[i]), float(totals[i])) for i in ranking]


def _search(prompt, settings):
    """Search one prompt: yields the prefixes of a step, is sent their rows, returns the answer."""
    pool = _Pool(settings.width)
    beams = [_Beam(None, -1, 0.0)]
    for length in range(1, settings.steps + 1):
        rows = yield [prompt + beam.generated() for beam in beams]
        sums = rows.astype(np.float64) + np.array([[beam.total] for beam in beams])
        for beam, total in zip(beams, sums[:, settings.eos].tolist(), strict=False):
            if total != -math.inf:
                ended = _Beam(beam, settings.eos, total)
                pool.offer(ended, settings.score(total, length))
        beams = _grow(beams, sums, settings)
        if not beams:
            break
        bound = settings.bound(beams[0].total, length)
        if length < settings.steps and not pool.admits(bound):
            beams = []
            break
    for beam in beams:
        pool.offer(beam, settings.score(beam.total, settings.steps))
    return pool.answer()


def _is_int(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _read_settings(beam_width, max_new_tokens, eos_id, length_penalty):
    """The checked arguments."""
    if not (_is_int(beam_width) and _is_int(max_new_tokens) and _is_int(eos_id)):
        raise TypeError("beam_width, max_new_tokens and eos_id must be whole numbers")
    if beam_width < 1 or max_new_tokens < 1:
        raise ValueError("beam_width and max_new_tokens must be at least 1")
    if isinstance(length_penalty, (str, bytes)):
        raise TypeError("length_penalty must be a number")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be finite")
    return _Settings(int(beam_width), int(max_new_tokens), int(eos_id), float(length_penalty))


def _read_prompts(prompts):
    """Copies of the checked prompts."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list")
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)) or not all(map(_is_int, prompt)):
            raise TypeError("every prompt must be a list of ints")
    return [list(map(int, prompt)) for prompt in prompts]


def _checked_answer(answer, count, eos):
    """The array the model answered with, if it is one that can be used."""
    answer = np.asarray(answer)
    if answer.ndim != 2 or len(answer) != count:
        raise ValueError("the model must answer with one row for each prefix")
    if eos < 0 or eos >= answer.shape[1]:
        raise ValueError("eos_id is outside the vocabulary")
    if np.isnan(answer).any() or np.isposinf(answer).any():
        raise ValueError("log-probabilities must be neither NaN nor +inf")
    return answer


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations (tokens, score) of every prompt, best first."""
    settings = _read_settings(beam_width, max_new_tokens, eos_id, length_penalty)
    searches = [_search(prompt, settings) for prompt in _read_prompts(prompts)]
    answers = [None] * len(searches)
    waiting = {i: next(search) for i, search in enumerate(searches)}
    columns = None
    while waiting:
        batch = [prefix for prefixes in waiting.values() for prefix in prefixes]
        answer = _checked_answer(lm.log_probs(batch), len(batch), settings.eos)
        columns = columns or answer.shape[1]
        if answer.shape[1] != columns:
            raise ValueError("the vocabulary changed between two steps")
        upcoming = {}
        offset = 0
        for i, prefixes in waiting.items():
            share = answer[offset : offset + len(prefixes)]
            offset += len(prefixes)
            try:
                upcoming[i] = searches[i].send(share)
            except StopIteration as finished:
                answers[i] = finished.value
        waiting = upcoming
    return answers
