"""The search itself: one prompt's beams as arrays, tokens in a trie that only grows."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from trapline.gold.beam_search.policy import Rules


class Hypothesis(NamedTuple):
    """A finished continuation: tokens without the prompt, and their score."""

    tokens: list[int]
    score: float


class Trie:
    """Continuations as (parent node, token); node 0 is the empty one. Appending copies nothing."""

    def __init__(self) -> None:
        self._parents = [0]
        self._tokens = [-1]

    def add(self, parent: int, token: int) -> int:
        self._parents.append(parent)
        self._tokens.append(token)
        return len(self._parents) - 1

    def read(self, node: int) -> list[int]:
        """The tokens on the way to a node."""
        tokens: list[int] = []
        while node:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]


class Search:
    """The live beams and the finished hypotheses of one prompt."""

    def __init__(self, prompt: list[int], rules: Rules) -> None:
        self.prompt, self.rules = prompt, rules
        self.length = 0
        self.nodes = [0]  # trie nodes of the live beams, best first
        self.sums = np.zeros(1)
        self._trie = Trie()
        self._pool: list[tuple[float, int]] = []  # (score, trie node), best first

    @property
    def is_over(self) -> bool:
        return not self.nodes

    def prefixes(self) -> list[list[int]]:
        """What the language model must continue next."""
        return [self.prompt + self._trie.read(node) for node in self.nodes]

    def advance(self, log_probs: np.ndarray) -> None:
        """One step with the log-probabilities (live beams, V) of all continuations."""
        self.length += 1
        totals = self.sums[:, None] + log_probs
        self._finish(totals)
        totals[:, self.rules.eos_id] = -np.inf
        self._expand(totals)
        if self.length == self.rules.max_new_tokens:
            self._enter(zip(self.sums.tolist(), self.nodes, strict=True))
            self.nodes = []
        elif self._is_settled():
            self.nodes = []

    def hypotheses(self) -> list[Hypothesis]:
        return [Hypothesis(self._trie.read(node), score) for score, node in self._pool]

    def _finish(self, totals: np.ndarray) -> None:
        """The ends of live beams, in the beams' order, enter the pool."""
        eos, width = self.rules.eos_id, self.rules.beam_width
        if self.rules.policy.finish == "ranked":
            parents, tokens = np.divmod(largest(totals.ravel(), width), totals.shape[1])
            parents = np.sort(parents[tokens == eos])
        else:
            parents = np.flatnonzero(totals[:, eos] > -np.inf)
        self._enter(
            (float(totals[parent, eos]), self._trie.add(self.nodes[parent], eos))
            for parent in parents.tolist()
        )

    def _enter(self, finished: Iterable[tuple[float, int]]) -> None:
        """The sort is stable, so between equal scores the earlier hypothesis stays in front."""
        rated = [(self.rules.score(total, self.length), node) for total, node in finished]
        self._pool = sorted(self._pool + rated, key=lambda entry: -entry[0])
        del self._pool[self.rules.beam_width :]

    def _expand(self, totals: np.ndarray) -> None:
        """The best continuations live on; flat order is (parent, token), the order of ties."""
        flat = totals.ravel()
        chosen = largest(flat, self.rules.beam_width)
        parents, tokens = np.divmod(chosen, totals.shape[1])
        self.nodes = [
            self._trie.add(self.nodes[parent], token)
            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]
        self.sums = flat[chosen]

    def _is_settled(self) -> bool:
        """Whether the search may stop; one that could only tie with the worst comes too late."""
        if not self.nodes or len(self._pool) < self.rules.beam_width:
            return False
        if self.rules.policy.stop == "full":
            return True
        return self.rules.bound(float(self.sums[0]), self.length) <= self._pool[-1][0]


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values above −inf, falling, ties by lower index."""
    candidates = np.arange(values.size)
    if values.size > count:
        cut = np.partition(values, values.size - count)[values.size - count]
        candidates = np.flatnonzero(values >= cut)
    candidates = candidates[values[candidates] > -np.inf]
    order = np.argsort(-values[candidates], kind="stable")
    return np.asarray(candidates[order[:count]])
