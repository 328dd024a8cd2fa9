"""Batched beam search: one model call per step, exact stop bound, deterministic ties."""

import math
from bisect import insort
from operator import index

import numpy as np


class _Pool:
    """The `width` best finished hypotheses of a prompt, best first, earlier first among equals."""

    def __init__(self, width, length_penalty):
        self.width = width
        self.length_penalty = length_penalty
        self.entries = []

    def rate(self, total, length):
        """Score of a hypothesis with that sum and that many generated tokens."""
        return float(total) / float(length) ** self.length_penalty

    def offer(self, tokens, total):
        """Let a hypothesis in if it is good enough, and drop the worst if there are too many."""
        score = self.rate(total, len(tokens))
        insort(self.entries, (tokens, score), key=lambda entry: -entry[1])
        del self.entries[self.width :]

    def is_closed_to(self, total, shortest, longest):
        """Whether no descendant of `shortest` to `longest` tokens of such a beam gets in."""
        if len(self.entries) < self.width:
            return False
        ceiling = max(self.rate(total, shortest), self.rate(total, longest))
        return ceiling <= self.entries[-1][1]


class _Search:
    """One prompt: its live beams (parallel `trails` and `sums`, best first) and its pool."""

    def __init__(self, prompt, pool, max_new_tokens):
        self.prompt = prompt
        self.pool = pool
        self.max_new_tokens = max_new_tokens
        self.length = 0
        self.trails = [[]]
        self.sums = np.zeros(1)

    def prefixes(self):
        """What the model is asked about: one fresh list per live beam."""
        return [self.prompt + trail for trail in self.trails]

    def advance(self, log_probs, eos_id):
        """One step, given the (live beams, V) log-probabilities of the next token."""
        self.length += 1
        vocab = log_probs.shape[1]
        totals = np.add(log_probs, self.sums[:, None], dtype=np.float64)
        for trail, total in zip(self.trails, totals[:, eos_id].tolist(), strict=True):
            if total > -math.inf:
                self.pool.offer([*trail, eos_id], total)
        totals[:, eos_id] = -math.inf

        flat, self.sums = _best(totals, self.pool.width)
        parents, tokens = np.divmod(flat, vocab)
        self.trails = [
            [*self.trails[parent], token]
            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]
        if self.length == self.max_new_tokens:
            self._retire_live_beams()

    def has_stopped(self):
        """Whether nothing that is still live can change the pool."""
        if not self.trails:
            return True
        return self.pool.is_closed_to(self.sums[0], self.length + 1, self.max_new_tokens)

    def _retire_live_beams(self):
        for trail, total in zip(self.trails, self.sums.tolist(), strict=True):
            self.pool.offer(trail, total)
        self.trails = []


def _best(totals, width):
    """Flat indices and values of the `width` largest finite totals, largest first, ties by index.

    The best beam's own `width`-th continuation is a floor: whatever lies below it cannot be chosen.
    """
    floor = -math.inf
    if width < totals.shape[1]:
        floor = np.partition(totals[0], -width)[-width]
    flat = totals.ravel()
    index_of = np.flatnonzero((flat >= floor) & (flat > -math.inf))
    values = flat[index_of]
    if width < len(values):
        cut = np.partition(values, -width)[-width]
        above = np.flatnonzero(values > cut)
        level = np.flatnonzero(values == cut)[: width - len(above)]
        kept = np.sort(np.concatenate([above, level]))
        index_of, values = index_of[kept], values[kept]
    order = np.argsort(-values, kind="stable")
    return index_of[order], values[order]


def _ask(lm, prefixes, eos_id, vocab):
    """The model's checked answer; `vocab` is the V of earlier answers, None in the first step."""
    log_probs = np.asarray(lm.log_probs(prefixes))
    if log_probs.ndim != 2 or len(log_probs) != len(prefixes):
        raise ValueError(
            f"the model answered with shape {log_probs.shape} for {len(prefixes)} prefixes"
        )
    if log_probs.dtype.kind not in "fiu":
        raise TypeError(f"log-probabilities of dtype {log_probs.dtype}")
    if vocab is not None and log_probs.shape[1] != vocab:
        raise ValueError("the size of the vocabulary changed between two calls")
    if not 0 <= eos_id < log_probs.shape[1]:
        raise ValueError(f"eos_id {eos_id} is outside the vocabulary of {log_probs.shape[1]}")
    if not log_probs.max() < math.inf:
        raise ValueError("the model answered with NaN or +inf")
    return log_probs


def _count(value, name):
    value = index(value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1")
    return value


def _checked_prompts(prompts):
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError("a prompt must be a list of ints")
        if not all(isinstance(token, (int, np.integer)) for token in prompt):
            raise TypeError("a prompt must hold ints only")
    return [list(prompt) for prompt in prompts]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt: pairs (tokens, score), best first.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    """
    width = _count(beam_width, "beam_width")
    steps = _count(max_new_tokens, "max_new_tokens")
    eos_id = index(eos_id)
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be finite")
    penalty = float(length_penalty)

    searches = [
        _Search(prompt, _Pool(width, penalty), steps) for prompt in _checked_prompts(prompts)
    ]
    running = searches
    vocab = None
    while running:
        prefixes = [prefix for search in running for prefix in search.prefixes()]
        log_probs = _ask(lm, prefixes, eos_id, vocab)
        vocab = log_probs.shape[1]
        start = 0
        for search in running:
            stop = start + len(search.trails)
            search.advance(log_probs[start:stop], eos_id)
            start = stop
        running = [search for search in running if not search.has_stopped()]
    return [search.pool.entries for search in searches]
