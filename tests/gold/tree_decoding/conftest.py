"""Language models that are tables: the law after a prefix is looked up by a hash of all of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

SIZE = 4099  # laws; a prime, so that every token of a prefix moves the hash


def mix(state, token):
    return (state * 31 + token * 7 + 11) % SIZE


def state_of(tokens):
    state = 17
    for token in tokens:
        state = mix(state, token)
    return state


class TableTarget:
    """`generate.Target` over a table (SIZE, V) of logits; in place of a cache it keeps a hash."""

    context = 10_000

    def __init__(self, table):
        self.table = torch.as_tensor(table)
        self.vocab = self.table.shape[1]
        self.picks = self.table.argmax(dim=-1).numpy()

    def open(self, rows):
        for row in rows:
            row.target = state_of(row.tokens[:-1])

    def verify(self, rows, trees):
        ids, seen, depths = (x.numpy() for x in (trees.ids, trees.seen, trees.depths))
        states = np.zeros(ids.shape, dtype=np.int64)
        states[:, 0] = mix(np.array([row.target for row in rows]), ids[:, 0])
        for node in range(1, ids.shape[1]):
            # The parent is the deepest of what a node continues, itself left out.
            parent = np.where(seen[:, node, :node], depths[:, :node], -1).argmax(axis=1)
            states[:, node] = mix(states[np.arange(len(rows)), parent], ids[:, node])
        self._last = {row.number: own for row, own in zip(rows, states, strict=True)}
        return self.table[torch.as_tensor(states)]

    def commit(self, rows, paths):
        for row, path in zip(rows, paths, strict=True):
            row.target = int(self._last[row.number][path[-1] + 1 if path else 0])

    def close(self, rows):
        for row in rows:
            row.target = None

    def greedy(self, prompt, most, stops=()):
        """Plain decoding, one token after the other."""
        state, made = state_of(prompt), []
        while len(made) < most and not (made and made[-1] in stops):
            made.append(int(self.picks[state]))
            state = mix(state, made[-1])
        return made


class TableDrafter:
    """A drafter that proposes one token a depth for sure, or a law a depth."""

    depth = 5

    def __init__(self, vocab):
        self.vocab = vocab

    def refuses(self, prompt):
        return None

    def draft(self, rows):
        return torch.stack([self.block(row) for row in rows])

    def certain(self, tokens):
        log_q = torch.full((len(tokens), self.vocab), -9.0)
        log_q[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)] = 0.0
        return log_q


class Right(TableDrafter):
    """Says what the target will say."""

    def __init__(self, target):
        super().__init__(target.vocab)
        self.target = target

    def block(self, row):
        return self.certain(self.target.greedy(row.tokens, self.depth))


class Wrong(Right):
    """Never says it: the target's word is impossible at every depth of the right text."""

    def block(self, row):
        right = self.target.greedy(row.tokens, self.depth)
        log_q = self.certain([(token + 1) % self.vocab for token in right])
        log_q[0, right[0]] = -torch.inf
        return log_q


class Random(TableDrafter):
    """Laws that have nothing to do with the target; some tokens are impossible."""

    def block(self, row):
        rng = np.random.default_rng(state_of(row.tokens))
        log_q = torch.as_tensor(-rng.integers(0, 12, (self.depth, self.vocab)) / 4.0)
        return log_q.masked_fill(torch.as_tensor(rng.random(log_q.shape) < 0.2), -torch.inf)


class Repeating(TableDrafter):
    """Says the last token again and again."""

    def block(self, row):
        return self.certain([row.tokens[-1]] * self.depth)


@pytest.fixture(scope="session")
def tables():
    """The table models and their drafters."""
    return SimpleNamespace(
        Target=TableTarget,
        Drafter=TableDrafter,
        drafters={"right": Right, "wrong": Wrong, "random": Random, "repeating": Repeating},
        state_of=state_of,
        size=SIZE,
    )
