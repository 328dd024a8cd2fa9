"""Batched beam search: one search object per prompt, all of them advanced in lockstep."""

import bisect
import math
import numbers
import operator
from dataclasses import dataclass

import numpy as np

NEG_INF = -math.inf
BLOCKS_PER_BEAM = 8  # resolution of the cheap lower bound in `_plausible`


@dataclass(frozen=True)
class _Rules:
    """The arguments that all prompts of a call share."""

    beam_width: int
    max_new_tokens: int
    eos_id: int
    length_penalty: float

    def score(self, total, length):
        """Score of a hypothesis of `length` tokens whose log-probabilities add up to `total`."""
        return float(total) / length**self.length_penalty

    def best_reachable(self, total, length):
        """Best score of any proper descendant of a live beam with `length` tokens.

        The sum never rises above `total` <= 0, so that the best length is the one with the largest
        n ** penalty: the last one for a positive penalty and the next one otherwise.
        """
        best_length = self.max_new_tokens if self.length_penalty > 0 else length + 1
        try:
            return self.score(total, best_length)
        except OverflowError:  # a last length that is out of reach in practice
            return 0.0


class _Pool:
    """The `capacity` best finished hypotheses, best first, the earlier one first among equals."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.hypotheses = []

    def admits(self, score):
        """Whether a hypothesis with this score would get in now."""
        return len(self.hypotheses) < self.capacity or score > self.hypotheses[-1][1]

    def offer(self, history, last_token, score):
        """Enter history + last_token if it is good enough."""
        if self.admits(score):
            tokens = [*history, *last_token]
            bisect.insort_right(self.hypotheses, (tokens, score), key=_badness)
            del self.hypotheses[self.capacity :]


def _badness(hypothesis):
    return -hypothesis[1]


class _Search:
    """The search for one prompt: its live beams (best first) and its pool."""

    def __init__(self, prompt, rules):
        self.rules = rules
        self.prompt = list(prompt)
        self.length = 0
        self.histories = [[]]
        self.totals = np.zeros(1)
        self.pool = _Pool(rules.beam_width)
        self.running = True

    def prefixes(self):
        """Fresh lists, one per live beam."""
        return [self.prompt + history for history in self.histories]

    def advance(self, log_probs):
        """Make one step; row i of `log_probs` belongs to live beam i."""
        self.length += 1
        self._finish(log_probs[:, self.rules.eos_id])
        self._extend(log_probs)
        if self.length == self.rules.max_new_tokens:
            self._retire_live_beams()
            self.running = False
        else:
            self.running = self._can_improve()

    def _finish(self, eos_log_probs):
        with np.errstate(over="ignore"):
            totals = self.totals + eos_log_probs
        for beam in np.flatnonzero(eos_log_probs > NEG_INF).tolist():
            score = self.rules.score(totals[beam], self.length)
            self.pool.offer(self.histories[beam], [self.rules.eos_id], score)

    def _extend(self, log_probs):
        totals = np.empty(log_probs.shape)  # C order and float64 whatever the model answers in
        with np.errstate(over="ignore"):
            np.add(log_probs, self.totals[:, np.newaxis], out=totals)
        totals[:, self.rules.eos_id] = NEG_INF
        flat = totals.ravel()
        chosen = _plausible(flat, self.rules.beam_width)
        parents, tokens = np.divmod(chosen, log_probs.shape[1])
        possible = (log_probs[parents, tokens] > NEG_INF) & (tokens != self.rules.eos_id)
        chosen = chosen[possible]
        chosen = chosen[_first_largest(flat[chosen], self.rules.beam_width)]
        parents, tokens = np.divmod(chosen, log_probs.shape[1])
        self.totals = flat[chosen]
        self.histories = [
            [*self.histories[parent], token]
            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]

    def _retire_live_beams(self):
        for history, total in zip(self.histories, self.totals.tolist(), strict=True):
            self.pool.offer(history, [], self.rules.score(total, self.length))

    def _can_improve(self):
        if not self.histories:
            return False
        return self.pool.admits(self.rules.best_reachable(self.totals[0], self.length))


def _plausible(values, count):
    """Ascending indices of a superset of the `count` largest values and of all ties with them.

    The maxima of disjoint blocks are values too: if `count` of them reach a threshold, nothing below it
    belongs to the `count` largest.
    """
    blocks = BLOCKS_PER_BEAM * count
    depth = values.size // blocks
    if depth < 2:
        return np.arange(values.size)
    maxima = values[: depth * blocks].reshape(depth, blocks).max(axis=0)
    threshold = np.partition(maxima, blocks - count)[blocks - count]
    return np.flatnonzero(values >= threshold)


def _first_largest(values, count):
    """Indices of the `count` largest values, best first, the lower index first among equals."""
    if values.size <= count:
        return np.argsort(-values, kind="stable")
    smallest = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > smallest)
    level = np.flatnonzero(values == smallest)[: count - above.size]
    above = above[np.argsort(-values[above], kind="stable")]
    return np.concatenate((above, level))


def _at_least_one(name, value):
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def _checked_rules(beam_width, max_new_tokens, eos_id, length_penalty):
    if not isinstance(length_penalty, numbers.Real):
        raise TypeError("length_penalty must be a real number")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be finite")
    eos = operator.index(eos_id)
    if eos < 0:
        raise ValueError(f"eos_id {eos} is outside the vocabulary")
    return _Rules(
        _at_least_one("beam_width", beam_width),
        _at_least_one("max_new_tokens", max_new_tokens),
        eos,
        float(length_penalty),
    )


def _check_prompts(prompts):
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError("every prompt must be a list of ints")
        if not all(isinstance(token, (int, np.integer)) for token in prompt):
            raise TypeError("every token of a prompt must be an int")


def _ask(lm, prefixes, eos_id):
    """The model's answer for `prefixes`, checked."""
    count = len(prefixes)
    log_probs = lm.log_probs(prefixes)
    if not isinstance(log_probs, np.ndarray) or log_probs.dtype.type not in (np.float32, np.float64):
        raise TypeError("log_probs must return a float32 or float64 array")
    if log_probs.ndim != 2 or log_probs.shape[0] != count:
        raise ValueError(f"log_probs must return ({count}, V), not {log_probs.shape}")
    if eos_id >= log_probs.shape[1]:
        raise ValueError(f"eos_id {eos_id} is outside the vocabulary of {log_probs.shape[1]}")
    largest = log_probs.max()
    if np.isnan(largest) or largest == math.inf:
        raise ValueError("log_probs returned NaN or +inf")
    return log_probs


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    rules = _checked_rules(beam_width, max_new_tokens, eos_id, length_penalty)
    _check_prompts(prompts)
    searches = [_Search(prompt, rules) for prompt in prompts]
    vocabulary = None
    while any(search.running for search in searches):
        active = [search for search in searches if search.running]
        log_probs = _ask(lm, [prefix for search in active for prefix in search.prefixes()], rules.eos_id)
        if vocabulary not in (None, log_probs.shape[1]):
            raise ValueError("the size of the vocabulary changed between two calls of the model")
        vocabulary = log_probs.shape[1]
        start = 0
        for search in active:
            stop = start + len(search.histories)
            search.advance(log_probs[start:stop])
            start = stop
    return [search.pool.hypotheses for search in searches]
