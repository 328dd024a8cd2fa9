"""Batched beam search over a matrix of tokens per prompt.

Every prompt has a search of its own: the live beams are an integer matrix (beams, generated tokens) with
a float64 vector of sums, sorted best first; a step gathers rows of the matrix. Only the calls of the model
are shared between the prompts.
"""

import math
import numbers
import operator

import numpy as np


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    beam_width = _whole(beam_width, "beam_width", 1)
    max_new_tokens = _whole(max_new_tokens, "max_new_tokens", 1)
    eos_id = _whole(eos_id, "eos_id", 0)
    length_penalty = _penalty(length_penalty)
    _check_prompts(prompts)

    searches = [
        _Search(prompt, beam_width, max_new_tokens, eos_id, length_penalty) for prompt in prompts
    ]
    running = list(searches)
    vocabulary = None
    while running:
        prefixes = [prefix for search in running for prefix in search.prefixes()]
        log_probs = _checked(lm.log_probs(prefixes), len(prefixes), vocabulary, eos_id)
        vocabulary = log_probs.shape[1]
        row = 0
        for search in running:
            count = len(search.sums)
            search.step(log_probs[row : row + count])
            row += count
        running = [search for search in running if not search.stopped()]
    return [search.pool for search in searches]


class _Search:
    """The beam search of one prompt."""

    def __init__(self, prompt, beam_width, max_new_tokens, eos_id, length_penalty):
        self.prompt = prompt
        self.beam_width = beam_width
        self.max_new_tokens = max_new_tokens
        self.eos_id = eos_id
        self.length_penalty = length_penalty
        self.pool = []
        self.tokens = np.zeros((1, 0), dtype=np.int64)
        self.sums = np.zeros(1)

    def prefixes(self):
        """What the model is asked: fresh lists, the prompt and the tokens of every live beam."""
        return [self.prompt + row for row in self.tokens.tolist()]

    def step(self, log_probs):
        """One step with the model's answer for the live beams, (beams, V)."""
        sums = self.sums[:, None] + log_probs
        ended = sums[:, self.eos_id].copy()
        sums[:, self.eos_id] = -np.inf
        flat = sums.ravel()
        chosen = _best(flat, self.beam_width)
        parents, tokens = np.divmod(chosen, sums.shape[1])

        parent_rows = self.tokens.tolist()
        for parent in np.flatnonzero(ended > -np.inf):
            self._enter([*parent_rows[parent], self.eos_id], ended[parent])
        self.tokens = np.concatenate([self.tokens[parents], tokens[:, None]], axis=1)
        self.sums = flat[chosen]
        if self._length() == self.max_new_tokens:
            for row, total in zip(self.tokens.tolist(), self.sums):
                self._enter(row, total)

    def stopped(self):
        """Whether no live beam can still enter the pool."""
        if len(self.sums) == 0 or self._length() == self.max_new_tokens:
            return True
        if len(self.pool) < self.beam_width:
            return False
        # Further tokens cost at least nothing: a sum of at most zero is divided by the largest number.
        longest_is_best = self.length_penalty > 0
        length = self.max_new_tokens if longest_is_best else self._length() + 1
        return self._score(self.sums[0], length) <= self.pool[-1][1]

    def _length(self):
        """The number of tokens generated so far."""
        return self.tokens.shape[1]

    def _score(self, total, length):
        return float(total) / float(length) ** self.length_penalty

    def _enter(self, tokens, total):
        """Offer a hypothesis to the pool, behind those of equal score."""
        score = self._score(total, len(tokens))
        place = len(self.pool)
        while place > 0 and self.pool[place - 1][1] < score:
            place -= 1
        self.pool.insert(place, (tokens, score))
        del self.pool[self.beam_width :]


def _best(flat, count):
    """Indices of the `count` largest possible values, largest first, equal ones in the order of indices."""
    if count < flat.size:
        cut = np.partition(flat, flat.size - count)[flat.size - count]
        above = np.flatnonzero(flat > cut)
        level = np.flatnonzero(flat == cut)[: count - above.size]
        chosen = np.sort(np.concatenate([above, level]))
    else:
        chosen = np.arange(flat.size)
    chosen = chosen[flat[chosen] > -np.inf]
    return chosen[np.argsort(-flat[chosen], kind="stable")]


def _whole(value, name, least):
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value


def _penalty(value):
    if not isinstance(value, numbers.Real):
        raise TypeError(f"length_penalty must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"length_penalty must be finite, not {value}")
    return float(value)


def _check_prompts(prompts):
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    for prompt in prompts:
        if not isinstance(prompt, list):
            raise TypeError(f"a prompt must be a list of ints, not {prompt!r}")
        for token in prompt:
            if not isinstance(token, (int, np.integer)):
                raise TypeError(f"a prompt must hold ints, not {token!r}")


def _checked(answer, rows, vocabulary, eos_id):
    """The model's answer, if it is one."""
    if not isinstance(answer, np.ndarray) or answer.dtype not in (np.float32, np.float64):
        raise TypeError("log_probs must return a float32 or float64 array")
    if answer.ndim != 2 or answer.shape[0] != rows or vocabulary not in (None, answer.shape[1]):
        raise ValueError(f"log_probs must return ({rows}, V), not {answer.shape}")
    if eos_id >= answer.shape[1]:
        raise ValueError(f"eos_id {eos_id} lies outside a vocabulary of {answer.shape[1]}")
    if not (answer < np.inf).all():
        raise ValueError("log_probs must hold neither NaN nor +inf")
    return answer
