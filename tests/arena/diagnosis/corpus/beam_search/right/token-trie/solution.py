"""Batched beam search whose hypotheses are nodes of one token trie per prompt.

A live beam is a node number and a sum.  Its tokens are read off the trie by walking to the root, so a
step copies no hypothesis: it only adds the nodes that survived.
"""

import math
import operator
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

ROOT = 0


@dataclass(frozen=True)
class Rules:
    """The arguments that every prompt of the batch shares."""

    width: int
    max_new_tokens: int
    eos_id: int
    penalty: float

    def score(self, total, length):
        """The score of `length` generated tokens whose log-probabilities sum to `total`."""
        return float(total) / float(length) ** self.penalty

    def best_future_score(self, total, length):
        """The best score of any descendant of a beam of `length` tokens.

        No log-probability is above 0, so no descendant has a larger sum than its ancestor, and the
        score of a fixed sum is monotone in the length: one of the two extreme lengths is the best.
        """
        shortest = self.score(total, length + 1)
        longest = self.score(total, self.max_new_tokens)
        return max(shortest, longest)


@dataclass
class Trie:
    """Token sequences as (parent node, last token); node 0 is the empty sequence."""

    parents: list = field(default_factory=lambda: [ROOT])
    tokens: list = field(default_factory=lambda: [-1])

    def grow(self, parent, token):
        """Add the sequence of `parent` with `token` behind it; returns its node."""
        self.parents.append(parent)
        self.tokens.append(token)
        return len(self.parents) - 1

    def path(self, node):
        """The tokens from the root to `node`, as a new list."""
        backwards = []
        while node != ROOT:
            backwards.append(self.tokens[node])
            node = self.parents[node]
        return backwards[::-1]


@dataclass
class Pool:
    """The best finished nodes, best first; among equal scores the earlier entry is first."""

    width: int
    losses: list = field(default_factory=list)
    nodes: list = field(default_factory=list)

    def is_full(self):
        """Whether a newcomer has to push another one out."""
        return len(self.nodes) == self.width

    def admits(self, score):
        """Whether a hypothesis of this score would get in; a tie with the worst does not."""
        return not self.is_full() or -score < self.losses[-1]

    def enter(self, node, score):
        """Put a node behind all that are at least as good, and drop what no longer fits."""
        place = bisect_right(self.losses, -score)
        self.losses.insert(place, -score)
        self.nodes.insert(place, node)
        del self.losses[self.width:], self.nodes[self.width:]


class Search:
    """The state of one prompt: its trie, its pool and its live beams (best first)."""

    def __init__(self, prompt, rules):
        self.prompt = list(prompt)
        self.rules = rules
        self.trie = Trie()
        self.pool = Pool(rules.width)
        self.live = [ROOT]
        self.sums = np.zeros(1)

    def prefixes(self):
        """What the model is asked about: a new list for every live beam."""
        return [self.prompt + self.trie.path(node) for node in self.live]

    def advance(self, rows, length):
        """Take the step to `length` generated tokens, given one row of log-probabilities per beam."""
        totals = rows + self.sums[:, None]
        self._finish(totals[:, self.rules.eos_id], length)
        totals[:, self.rules.eos_id] = -np.inf
        self._continue(totals)
        if length == self.rules.max_new_tokens:
            self._close(length)
        elif self.live and not self._can_improve(length):
            self.live = []

    def _finish(self, eos_totals, length):
        """Step 1: the EOS continuations of all live beams enter the pool."""
        for parent, total in zip(self.live, eos_totals.tolist()):
            score = self.rules.score(total, length)
            if total > -np.inf and self.pool.admits(score):
                self.pool.enter(self.trie.grow(parent, self.rules.eos_id), score)

    def _continue(self, totals):
        """Step 2: the best other continuations become the live beams."""
        flat = totals.ravel()
        chosen = best_indices(flat, self.rules.width)
        parents, tokens = np.divmod(chosen, totals.shape[1])
        self.live = [
            self.trie.grow(self.live[parent], token)
            for parent, token in zip(parents.tolist(), tokens.tolist())
        ]
        self.sums = flat[chosen]

    def _close(self, length):
        """After the last step the live beams enter the pool, too."""
        for node, total in zip(self.live, self.sums.tolist()):
            score = self.rules.score(total, length)
            if self.pool.admits(score):
                self.pool.enter(node, score)
        self.live = []

    def _can_improve(self, length):
        """Whether a descendant of the best live beam (hence of any) could still enter the pool."""
        return self.pool.admits(self.rules.best_future_score(self.sums[0], length))

    def answer(self):
        """The pool as pairs (tokens, score), best first."""
        return [
            (self.trie.path(node), -loss)
            for node, loss in zip(self.pool.nodes, self.pool.losses)
        ]


def best_indices(values, count):
    """Indices of the `count` largest values above -inf, largest first, the lower index before its equal."""
    if values.size > count:
        cut = values.size - count
        threshold = np.partition(values, cut)[cut]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(values.size)
    candidates = candidates[values[candidates] > -np.inf]
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def ask_model(lm, searches, eos_id):
    """One call for all live beams; returns the block of float64 rows of each search."""
    prefixes = [prefix for search in searches for prefix in search.prefixes()]
    count = len(prefixes)
    answer = np.asarray(lm.log_probs(prefixes))
    if answer.ndim != 2 or answer.shape[0] != count:
        raise ValueError(f"the model must answer ({count}, V), not {answer.shape}")
    if answer.dtype.kind != "f":
        raise TypeError("the model must answer with floating-point numbers")
    if eos_id >= answer.shape[1]:
        raise ValueError("eos_id is outside the vocabulary")
    if not np.all(answer < np.inf):
        raise ValueError("a log-probability is NaN or +inf")
    rows = answer.astype(np.float64)
    ends = np.cumsum([len(search.live) for search in searches])
    return np.split(rows, ends[:-1])


def checked_rules(beam_width, max_new_tokens, eos_id, length_penalty):
    """The shared arguments, or ValueError / TypeError."""
    width = operator.index(beam_width)
    steps = operator.index(max_new_tokens)
    eos = operator.index(eos_id)
    if isinstance(length_penalty, (str, bytes)):
        raise TypeError("length_penalty must be a number")
    if width < 1 or steps < 1:
        raise ValueError("beam_width and max_new_tokens must be at least 1")
    if eos < 0:
        raise ValueError("eos_id is outside the vocabulary")
    try:
        penalty = float(length_penalty)
    except OverflowError as error:
        raise ValueError("length_penalty must be finite") from error
    if not math.isfinite(penalty):
        raise ValueError("length_penalty must be finite")
    return Rules(width, steps, eos, penalty)


def checked_prompts(prompts):
    """The prompts as lists of Python ints, or TypeError."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    if not all(isinstance(prompt, (list, tuple)) for prompt in prompts):
        raise TypeError("a prompt must be a list of ints")
    return [[operator.index(token) for token in prompt] for prompt in prompts]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt, as pairs (tokens, score), best first."""
    rules = checked_rules(beam_width, max_new_tokens, eos_id, length_penalty)
    searches = [Search(prompt, rules) for prompt in checked_prompts(prompts)]
    for length in range(1, rules.max_new_tokens + 1):
        running = [search for search in searches if search.live]
        if not running:
            break
        for search, rows in zip(running, ask_model(lm, running, rules.eos_id)):
            search.advance(rows, length)
    return [search.answer() for search in searches]
