"""A tape: each operation notes how its gradient flows back; played backwards, it differentiates."""

import numpy as np


class Tape:
    """Values by number, their gradients, and the operations that made them."""

    def __init__(self):
        self.values, self.grads, self.ops = [], [], []

    def leaf(self, value):
        self.values.append(value)
        self.grads.append(None)
        return len(self.values) - 1

    def _made(self, value, back):
        number = self.leaf(value)
        self.ops.append((number, back))
        return number

    def _give(self, number, gradient):
        old = self.grads[number]
        self.grads[number] = gradient if old is None else old + gradient

    def gradients(self, leaves):
        for number, back in reversed(self.ops):
            if self.grads[number] is not None:
                back(self.grads[number])
        return {
            name: np.zeros_like(self.values[n]) if self.grads[n] is None else self.grads[n]
            for name, n in leaves.items()
        }

    def rows(self, table, indices):
        def back(gradient):
            total = np.zeros_like(self.values[table])
            np.add.at(total, indices, gradient)
            self._give(table, total)

        return self._made(self.values[table][indices], back)

    def linear(self, x, weight):
        def back(gradient):
            self._give(x, gradient @ self.values[weight])
            self._give(weight, gradient.T @ self.values[x])

        return self._made(self.values[x] @ self.values[weight].T, back)

    def add(self, a, b):
        def back(gradient):
            self._give(a, gradient)
            self._give(b, gradient)

        return self._made(self.values[a] + self.values[b], back)

    def relu(self, x):
        positive = self.values[x] > 0
        return self._made(self.values[x] * positive, lambda g: self._give(x, g * positive))

    def normalise(self, x):
        root = np.sqrt(np.square(self.values[x]).mean(axis=1, keepdims=True) + 1e-6)
        y = self.values[x] / root

        def back(gradient):
            self._give(x, (gradient - y * (gradient * y).mean(axis=1, keepdims=True)) / root)

        return self._made(y, back)

    def columns(self, x, part, parts):
        width = self.values[x].shape[1] // parts
        own = slice(part * width, (part + 1) * width)

        def back(gradient):
            total = np.zeros_like(self.values[x])
            total[:, own] = gradient
            self._give(x, total)

        return self._made(self.values[x][:, own], back)

    def join(self, parts):
        def back(gradient):
            for part, piece in zip(parts, np.split(gradient, len(parts), axis=1), strict=True):
                self._give(part, piece)

        return self._made(np.concatenate([self.values[part] for part in parts], axis=1), back)

    def attend(self, q, k, v, bias):
        width = self.values[q].shape[1] ** 0.5
        scores = self.values[q] @ self.values[k].T / width + bias
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)

        def back(gradient):
            dshare = gradient @ self.values[v].T
            dscores = share * (dshare - (dshare * share).sum(axis=1, keepdims=True)) / width
            self._give(q, dscores @ self.values[k])
            self._give(k, dscores.T @ self.values[q])
            self._give(v, share.T @ gradient)

        return self._made(share @ self.values[v], back)

    def cross_entropy(self, logits, targets):
        """The loss itself, a plain number: its gradient goes straight onto the logits."""
        table = self.values[logits]
        table = table - table.max(axis=1, keepdims=True)
        share = np.exp(table)
        share /= share.sum(axis=1, keepdims=True)
        every = np.arange(len(targets))
        loss = -float(np.log(share[every, targets] + 1e-30).mean())
        share[every, targets] -= 1.0
        self._give(logits, share / len(targets))
        return loss
