"""The search of one prompt: beams as NumPy arrays, tokens in a trie."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trapline.gold.beam_search.policy import Rules


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis; `rescore` computes its score from its tokens."""

    #: Generated tokens, without the prompt, with the end.
    tokens: tuple[int, ...]
    score: float
    #: The sum of the tokens' log-probabilities.
    total: float
    #: Whether it has an end token; otherwise it reached the maximum length.
    ended: bool


class Trie:
    """Continuations as (parent node, token); node 0 is the empty continuation."""

    def __init__(self) -> None:
        self._parents = [0]
        self._tokens = [-1]

    def add(self, parent: int, token: int) -> int:
        self._parents.append(parent)
        self._tokens.append(token)
        return len(self._parents) - 1

    def read(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        tokens: list[int] = []
        while node:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]


class _Finished(NamedTuple):
    score: float
    total: float
    node: int
    ended: bool


class Search:
    """The live beams and the finished hypotheses of one prompt."""

    def __init__(self, prompt: list[int], rules: Rules) -> None:
        self.prompt, self.rules = prompt, rules
        self.length = 0
        self.nodes = [0]  # trie nodes of the live beams, best first
        self.sums = np.zeros(1)
        #: Index in the previous step, and last token, of every live beam.
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self._trie = Trie()
        self._pool: list[_Finished] = []  # best first

    @property
    def is_over(self) -> bool:
        return not self.nodes

    def prefixes(self) -> list[list[int]]:
        """The prefixes that the language model must continue next."""
        return [self.prompt + self._trie.read(node) for node in self.nodes]

    def advance(self, log_probs: np.ndarray, columns: np.ndarray | None = None) -> None:
        """One step with the log-probabilities (live beams, V) of all continuations.

        `columns` are the tokens, ascending, of a table that omits tokens that cannot matter.
        """
        self.length += 1
        totals = self.sums[:, None] + log_probs
        columns = np.arange(totals.shape[1]) if columns is None else columns
        if self.rules.policy.finish == "pooled":
            self._share_places(totals, columns)
        else:
            ends = np.flatnonzero(np.isin(columns, self.rules.eos_ids))
            self._finish(totals, columns, ends)
            totals[:, ends] = -np.inf
            self._expand(totals, columns, largest(totals.ravel(), self.rules.beam_width))
        if self.length == self.rules.max_new_tokens:
            self._enter(zip(self.sums.tolist(), self.nodes, strict=True), ended=False)
            self.nodes = []
        elif self._is_settled():
            self.nodes = []

    def beams(self, count: int) -> list[Beam]:
        """The best `count` finished hypotheses."""
        return [
            Beam(tuple(self._trie.read(node)), score, total, ended)
            for score, total, node, ended in self._pool[:count]
        ]

    def _finish(self, totals: np.ndarray, columns: np.ndarray, ends: np.ndarray) -> None:
        """Enter the ends of live beams into the pool, ordered by parent and token."""
        candidates = np.full(totals.shape, False)
        candidates[:, ends] = True
        candidates &= totals > -np.inf
        if self.rules.policy.finish == "ranked":
            candidates &= _mask(totals.shape, largest(totals.ravel(), self.rules.beam_width))
        elif self.rules.policy.finish == "near":
            candidates &= self._near(totals)
        parents, places = np.nonzero(candidates)
        found = zip(
            totals[candidates].tolist(), parents.tolist(), columns[places].tolist(), strict=True
        )
        self._enter(
            ((total, self._trie.add(self.nodes[p], token)) for total, p, token in found),
            ended=True,
        )

    def _near(self, totals: np.ndarray) -> np.ndarray:
        """The best of each beam: enough that beam_width of them are not ends."""
        kept = (1 + len(self.rules.eos_ids)) * self.rules.beam_width
        return np.stack([_mask(row.shape, largest(row, kept)) for row in totals])

    def _enter(self, finished: Iterable[tuple[float, int]], *, ended: bool) -> None:
        """Add hypotheses to the pool. The sort is stable: ties keep the earlier one in front."""
        score, prompt = self.rules.score, len(self.prompt)
        rated = [
            _Finished(score(total, self.length, prompt, ended=ended), total, node, ended)
            for total, node in finished
        ]
        self._pool = sorted(self._pool + rated, key=lambda entry: -entry.score)
        del self._pool[self.rules.beam_width :]

    def _share_places(self, totals: np.ndarray, columns: np.ndarray) -> None:
        """Finished beams and continuations compete for the places; ties keep the earlier ones."""
        chosen = largest(totals.ravel(), self.rules.beam_width)
        found = totals.ravel()[chosen].tolist()
        scores = [self.rules.score(t, self.length, len(self.prompt), ended=False) for t in found]
        held = len(self._pool)
        rated = [*(entry.score for entry in self._pool), *scores]
        best = sorted(range(len(rated)), key=lambda place: -rated[place])[: self.rules.beam_width]
        self._pool = [self._pool[place] for place in sorted(best) if place < held]
        kept = chosen[[place - held for place in best if place >= held]]
        is_end = np.isin(columns[kept % totals.shape[1]], self.rules.eos_ids)
        parents, places = np.divmod(kept[is_end], totals.shape[1])
        ended = zip(
            totals[parents, places].tolist(),
            (
                self._trie.add(self.nodes[parent], token)
                for parent, token in zip(parents.tolist(), columns[places].tolist(), strict=True)
            ),
            strict=True,
        )
        self._enter(ended, ended=True)
        self._expand(totals, columns, kept[~is_end])

    def _expand(self, totals: np.ndarray, columns: np.ndarray, chosen: np.ndarray) -> None:
        """Keep these continuations; flat order is (parent, token), which decides ties."""
        flat = totals.ravel()
        parents, places = np.divmod(chosen, totals.shape[1])
        self.parents, self.tokens = parents.tolist(), columns[places].tolist()
        self.nodes = [
            self._trie.add(self.nodes[parent], token)
            for parent, token in zip(self.parents, self.tokens, strict=True)
        ]
        self.sums = flat[chosen]

    def _is_settled(self) -> bool:
        """Whether the search may stop; a beam that could only tie with the worst cannot enter."""
        stop = self.rules.policy.stop
        if stop == "max-length" or not self.nodes or len(self._pool) < self.rules.beam_width:
            return False
        if stop == "full":
            return True
        return self.rules.bound(float(self.sums[0]), self.length) <= self._pool[-1].score


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values above −inf, descending, ties by lower index."""
    candidates = np.arange(values.size)
    if values.size > count:
        cut = np.partition(values, values.size - count)[values.size - count]
        candidates = np.flatnonzero(values >= cut)
    candidates = candidates[values[candidates] > -np.inf]
    order = np.argsort(-values[candidates], kind="stable")
    return np.asarray(candidates[order[:count]])


def _mask(shape: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    mask = np.full(shape, False)
    mask.ravel()[indices] = True
    return mask
