"""Batched beam search over a trellis.

A search keeps, for every step, two arrays: the token that each live beam took and the beam it came
from.  Hypotheses are read back along these pointers only when they are needed.
"""

import math
from numbers import Real
from typing import NamedTuple

import numpy as np


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    rules = Rules(
        width=whole_number(beam_width, "beam_width", 1),
        steps=whole_number(max_new_tokens, "max_new_tokens", 1),
        eos=whole_number(eos_id, "eos_id", 0),
        penalty=finite_number(length_penalty, "length_penalty"),
    )
    searches = [Search(prompt, rules) for prompt in checked_prompts(prompts)]
    vocabulary = None
    running = searches
    while running:
        prefixes = [prefix for search in running for prefix in search.prefixes()]
        answer = checked_answer(lm.log_probs(prefixes), len(prefixes), rules.eos, vocabulary)
        vocabulary = answer.shape[1]
        row = 0
        for search in running:
            rows = slice(row, row + search.sums.size)
            row = rows.stop
            search.step(answer[rows])
        running = [search for search in running if search.can_improve()]
    return [search.answer() for search in searches]


class Rules(NamedTuple):
    """The parameters of one call, checked."""

    width: int
    steps: int
    eos: int
    penalty: float

    def score(self, total, length):
        return total / float(length) ** self.penalty


class Finished(NamedTuple):
    """A member of a pool: its score and its last live beam; `end` is the EOS token, if there is one."""

    score: float
    step: int
    beam: int
    end: tuple


class Search:
    """The beam search of one prompt."""

    def __init__(self, prompt, rules):
        self.prompt = prompt
        self.rules = rules
        self.sums = np.zeros(1)  # sums of log-probabilities of the live beams, best first
        self.tokens = []  # per step: the token that each live beam took
        self.parents = []  # per step: the live beam of the step before
        self.pool = []  # Finished, best first

    # -- the trellis

    def trace(self, step, beams):
        """The generated tokens (len(beams), step) of live beams `beams` after `step` steps."""
        paths = np.empty((len(beams), step), dtype=np.int64)
        for column in reversed(range(step)):
            paths[:, column] = self.tokens[column][beams]
            beams = self.parents[column][beams]
        return paths.tolist()

    def prefixes(self):
        paths = self.trace(len(self.tokens), np.arange(self.sums.size))
        return [self.prompt + path for path in paths]

    # -- one step

    def step(self, log_probs):
        """Take the model's answer (live beams, V) for the live beams."""
        totals = self.sums[:, None] + log_probs.astype(np.float64)
        length = len(self.tokens) + 1
        self.finish(totals[:, self.rules.eos], length, length - 1, (self.rules.eos,))
        totals[:, self.rules.eos] = -np.inf
        self.advance(totals)
        if length == self.rules.steps:
            self.finish(self.sums, length, length, ())

    def advance(self, totals):
        """The best continuations become the live beams: by sum, then parent, then token."""
        flat = totals.ravel()
        alive = np.flatnonzero(flat > -np.inf)
        if alive.size > self.rules.width:
            place = alive.size - self.rules.width
            threshold = np.partition(flat[alive], place)[place]
            alive = alive[flat[alive] >= threshold]
        order = np.argsort(-flat[alive], kind="stable")[: self.rules.width]
        best = alive[order]
        self.sums = flat[best]
        self.parents.append(best // totals.shape[1])
        self.tokens.append(best % totals.shape[1])

    def finish(self, sums, length, step, end):
        """Let hypotheses of `length` tokens, one a beam, into the pool, which stays sorted."""
        for beam, total in enumerate(sums.tolist()):
            if total == -math.inf:
                continue
            score = self.rules.score(total, length)
            if self.full() and score <= self.pool[-1].score:
                continue
            place = sum(other.score >= score for other in self.pool)
            self.pool.insert(place, Finished(score, step, beam, end))
            del self.pool[self.rules.width :]

    # -- the end

    def full(self):
        return len(self.pool) == self.rules.width

    def can_improve(self):
        """Can a descendant of a live beam still enter the pool?

        At best all further log-probabilities are 0: the sum stays, and the length is anything from the
        next one to the last one.  sum / n ** penalty is monotone in n, so one of the two ends is best.
        """
        made = len(self.tokens)
        if made == self.rules.steps or self.sums.size == 0:
            return False
        if not self.full():
            return True
        total = float(self.sums[0])
        bound = max(self.rules.score(total, made + 1), self.rules.score(total, self.rules.steps))
        return bound > self.pool[-1].score

    def answer(self):
        result = []
        for member in self.pool:
            (path,) = self.trace(member.step, np.array([member.beam]))
            result.append((path + list(member.end), member.score))
        return result


# ---------------------------------------------------------------- checks


def whole_number(value, name, low):
    if not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")
    return int(value)


def finite_number(value, name):
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)


def checked_prompts(prompts):
    """Copies of the prompts, as lists of ints."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"a prompt must be a list of ints, not {prompt!r}")
        if not all(isinstance(token, (int, np.integer)) for token in prompt):
            raise TypeError(f"a prompt must hold ints only: {prompt!r}")
    return [[int(token) for token in prompt] for prompt in prompts]


def checked_answer(answer, count, eos, vocabulary):
    """The model's answer, if it is (count, V) and holds log-probabilities."""
    if not isinstance(answer, np.ndarray) or answer.dtype not in (np.float32, np.float64):
        raise TypeError("log_probs must return a float32 or float64 array")
    if answer.ndim != 2 or answer.shape[0] != count:
        raise ValueError(f"log_probs returned shape {answer.shape} for {count} prefixes")
    if vocabulary is not None and answer.shape[1] != vocabulary:
        raise ValueError(f"the vocabulary changed from {vocabulary} to {answer.shape[1]}")
    if eos >= answer.shape[1]:
        raise ValueError(f"eos_id {eos} is outside the vocabulary of {answer.shape[1]}")
    if np.isnan(answer).any() or np.isposinf(answer).any():
        raise ValueError("log_probs holds NaN or +inf")
    return answer
