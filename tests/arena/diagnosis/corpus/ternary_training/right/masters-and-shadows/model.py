"""The language model, forwards and backwards. Weights are a dict of float32 matrices, tokens are (B, T)."""

from math import isqrt
from typing import NamedTuple

import numpy as np

EPSILON = 1e-6
LATER = np.float32(-1e30)
SERIAL = 1 << 18  # multiplications that no BLAS spreads over threads
SMALLEST_TILE = 8


class Size(NamedTuple):
    vocab: int
    dim: int
    heads: int
    layers: int


def shapes(size):
    """Name and shape of every tensor."""
    vocab, dim = size.vocab, size.dim
    table = {"embedding": (vocab, dim)}
    for i in range(size.layers):
        table |= {f"layers.{i}.{name}": (dim, dim) for name in "qkvo"}
        table[f"layers.{i}.up"] = (4 * dim, dim)
        table[f"layers.{i}.down"] = (dim, 4 * dim)
    table["head"] = (vocab, dim)
    return table


def _product(a, b):
    """a @ b, in tiles that are small enough for one thread each: threads that share a busy core only wait."""
    if a.shape[0] * b.size <= SERIAL:
        return a @ b
    side = max(SMALLEST_TILE, isqrt(SERIAL // max(a.shape[1], 1)))
    product = np.empty((a.shape[0], b.shape[1]), dtype=a.dtype)
    for top in range(0, a.shape[0], side):
        rows = a[top : top + side]
        for left in range(0, b.shape[1], side):
            product[top : top + side, left : left + side] = rows @ b[:, left : left + side]
    return product


def _stacked(a, b):
    """a @ b for (B, H, ...)."""
    if a.shape[2] * a.shape[3] * b.shape[3] <= SERIAL:
        return a @ b
    return np.array([[_product(*pair) for pair in zip(*heads, strict=True)] for heads in zip(a, b, strict=True)])


def _norm(x):
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPSILON))
    return x * inverse, inverse


def _norm_back(grad, normed, inverse):
    return inverse * (grad - normed * np.mean(grad * normed, axis=-1, keepdims=True))


def distance_bias(length, heads):
    """(heads, T, T): minus slope times distance, and a huge negative number for later tokens."""
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    bias = -slopes[:, None, None] * distance
    return np.where(distance >= 0, bias, LATER).astype(np.float32)


def _softmax(scores):
    scores = scores - scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


class Network:
    """One forward pass and what its backward pass needs."""

    def __init__(self, weights, size, tokens):
        self.weights, self.size = weights, size
        self.tokens = tokens
        self.batch, self.length = tokens.shape
        self.root_width = np.float32(np.sqrt(size.dim // size.heads))
        self.bias = distance_bias(self.length, size.heads)
        self.saved = []
        x = weights["embedding"][tokens.ravel()]
        for i in range(size.layers):
            x = x + self._attend(i, x)
            x = x + self._feed(i, x)
        self.normed, self.inverse = _norm(x)
        self.logits = _product(self.normed, weights["head"].T)

    def _split(self, x):
        return x.reshape(self.batch, self.length, self.size.heads, -1).swapaxes(1, 2)

    def _join(self, x):
        return x.swapaxes(1, 2).reshape(self.batch * self.length, self.size.dim)

    def _attend(self, i, x):
        w = self.weights
        a, inverse = _norm(x)
        q, k, v = (self._split(_product(a, w[f"layers.{i}.{name}"].T)) for name in "qkv")
        law = _softmax(_stacked(q, k.swapaxes(2, 3)) / self.root_width + self.bias)
        mixed = self._join(_stacked(law, v))
        self.saved.append((a, inverse, q, k, v, law, mixed))
        return _product(mixed, w[f"layers.{i}.o"].T)

    def _attend_back(self, i, grad, grads):
        w = self.weights
        a, inverse, q, k, v, law, mixed = self.saved.pop()
        grads[f"layers.{i}.o"] = _product(grad.T, mixed)
        d_mixed = self._split(_product(grad, w[f"layers.{i}.o"]))
        d_v = _stacked(law.swapaxes(2, 3), d_mixed)
        d_law = _stacked(d_mixed, v.swapaxes(2, 3))
        d_scores = law * (d_law - (d_law * law).sum(axis=-1, keepdims=True)) / self.root_width
        d_q, d_k = _stacked(d_scores, k), _stacked(d_scores.swapaxes(2, 3), q)
        d_a = np.zeros_like(a)
        for name, d_heads in zip("qkv", (d_q, d_k, d_v), strict=True):
            d_columns = self._join(d_heads)
            grads[f"layers.{i}.{name}"] = _product(d_columns.T, a)
            d_a += _product(d_columns, w[f"layers.{i}.{name}"])
        return _norm_back(d_a, a, inverse)

    def _feed(self, i, x):
        a, inverse = _norm(x)
        hidden = np.maximum(_product(a, self.weights[f"layers.{i}.up"].T), 0)
        self.saved.append((a, inverse, hidden))
        return _product(hidden, self.weights[f"layers.{i}.down"].T)

    def _feed_back(self, i, grad, grads):
        a, inverse, hidden = self.saved.pop()
        grads[f"layers.{i}.down"] = _product(grad.T, hidden)
        d_hidden = _product(grad, self.weights[f"layers.{i}.down"]) * (hidden > 0)
        grads[f"layers.{i}.up"] = _product(d_hidden.T, a)
        return _norm_back(_product(d_hidden, self.weights[f"layers.{i}.up"]), a, inverse)

    def backward(self, d_logits):
        """The gradient of every weight, given that of the logits."""
        grads = {"head": _product(d_logits.T, self.normed)}
        grad = _norm_back(_product(d_logits, self.weights["head"]), self.normed, self.inverse)
        for i in reversed(range(self.size.layers)):
            grad = grad + self._feed_back(i, grad, grads)
            grad = grad + self._attend_back(i, grad, grads)
        grads["embedding"] = np.zeros_like(self.weights["embedding"])
        np.add.at(grads["embedding"], self.tokens.ravel(), grad)
        return grads


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
