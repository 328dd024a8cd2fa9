"""Beam search as coroutines: each prompt is a generator that yields prefixes and is sent rows.

Tokens live in a trie of (parent, token) that only grows; hypotheses are read off it at the end.
"""

import heapq
import operator

import numpy as np


class Trie:
    """Append-only tokens with parent pointers; node 0 is the empty continuation."""

    def __init__(self):
        self.parent = [-1]
        self.token = [-1]

    def add(self, parent, token):
        self.parent.append(parent)
        self.token.append(token)
        return len(self.parent) - 1

    def read(self, node):
        tokens = []
        while node:
            tokens.append(self.token[node])
            node = self.parent[node]
        return tokens[::-1]


class Pool:
    """A min-heap of the best: its root is the one that the next better hypothesis replaces."""

    def __init__(self, size):
        self.size = size
        self.heap = []
        self.entered = 0

    def enter(self, score, node):
        self.entered += 1
        entry = (score, -self.entered, node)
        if len(self.heap) < self.size:
            heapq.heappush(self.heap, entry)
        elif entry > self.heap[0]:
            heapq.heapreplace(self.heap, entry)

    def worst(self):
        return self.heap[0][0] if len(self.heap) == self.size else -np.inf

    def best_first(self):
        return sorted(self.heap, reverse=True)


def search(prompt, width, longest, eos, penalty):
    trie, pool = Trie(), Pool(width)
    nodes, sums = [0], np.zeros(1)
    for length in range(1, longest + 1):
        log_probs = yield [prompt + trie.read(node) for node in nodes]
        norm = float(length) ** penalty
        totals = log_probs + sums[:, np.newaxis]
        for node, total in zip(nodes, totals[:, eos], strict=True):
            if np.isfinite(total):
                pool.enter(float(total) / norm, trie.add(node, eos))
        parents, tokens = np.nonzero(np.isfinite(totals))
        keep = tokens != eos
        parents, tokens = parents[keep], tokens[keep]
        values = totals[parents, tokens]
        order = np.lexsort((tokens, parents, -values))[:width]
        nodes = [trie.add(nodes[parents[i]], int(tokens[i])) for i in order]
        sums = values[order]
        if not nodes or _hopeless(sums[0], length, longest, penalty, pool.worst()):
            break
    if nodes and length == longest:
        for node, total in zip(nodes, sums, strict=True):
            pool.enter(float(total) / norm, node)
    return [(trie.read(node), score) for score, _, node in pool.best_first()]


def _hopeless(total, length, longest, penalty, worst):
    if length == longest:
        return False
    shift = longest if penalty > 0 else length + 1
    return worst > -np.inf and total / float(shift) ** penalty <= worst


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations (tokens, score) of every prompt, best first."""
    width, longest, eos = map(operator.index, (beam_width, max_new_tokens, eos_id))
    if min(width, longest) < 1 or eos < 0 or not np.isfinite(length_penalty):
        raise ValueError("a setting is out of range")
    runs = [
        search([operator.index(t) for t in prompt], width, longest, eos, length_penalty)
        for prompt in prompts
    ]
    waiting = {index: next(run) for index, run in enumerate(runs)}
    answers = {}
    while waiting:
        rows = iter(_ask(lm, [prefix for group in waiting.values() for prefix in group], eos))
        following = {}
        for index, group in waiting.items():
            try:
                following[index] = runs[index].send(np.stack([next(rows) for _ in group]))
            except StopIteration as end:
                answers[index] = end.value
        waiting = following
    return [answers[index] for index in range(len(runs))]


def _ask(lm, prefixes, eos):
    log_probs = np.array(lm.log_probs(prefixes), dtype=float)
    if log_probs.ndim != 2 or len(log_probs) != len(prefixes) or log_probs.shape[1] <= eos:
        raise ValueError(f"log_probs answered an array of shape {log_probs.shape}")
    if not (log_probs < np.inf).all():
        raise ValueError("log_probs answered NaN or +inf")
    return log_probs
