# ruff: noqa: E501
"""Ternary training on a tape: a very small automatic differentiation, everything else on top of it."""

import hashlib
import math
import time
from numbers import Real
from operator import index

import numpy as np

BYTE_TO_CODES = np.array(
    [[(b >> s & 3) - 1 for s in (0, 2, 4, 6)] for b in range(256)], dtype=np.int8
)


# ------------------------------------------------------------------ quantise


def _lloyd(piece):
    """Alternate between threshold = scale / 2 and scale = mean of what is above; piece (..., m) is one group a row."""
    a = np.abs(piece)
    unit = np.max(a, axis=-1, keepdims=True)
    a = np.divide(a, unit, out=np.zeros_like(a), where=unit > 0)
    threshold = 0.7 * np.mean(a, axis=-1, keepdims=True)
    for _ in range(4):
        on = a > threshold
        scale = np.sum(a * on, axis=-1, keepdims=True) / np.maximum(
            np.sum(on, axis=-1, keepdims=True), 1
        )
        threshold = scale / 2
    half = np.clip(scale * unit, 0, 65504).astype(np.float16)
    return (np.sign(piece) * on * (half > 0)).astype(np.int8), half[..., 0]


def _positive(group_size):
    g = index(group_size)
    if g < 1:
        raise ValueError("group size below 1")
    return g


def ternarize(w, group_size=128):
    g = _positive(group_size)
    w = np.asarray(w)
    if w.dtype.name not in ("float32", "float64"):
        raise TypeError("float32 or float64 required")
    if not w.shape:
        raise ValueError("at least one axis required")
    if not np.all(np.isfinite(w)):
        raise ValueError("NaN or infinity")
    *lead, n = w.shape
    if w.size == 0:
        return np.zeros(w.shape, np.int8), np.zeros((*lead, math.ceil(n / g)), np.float16)
    w = np.array(w, dtype=np.float64, order="C")
    cut = n // g * g
    codes, scales = [], []
    if cut:
        c, s = _lloyd(np.ascontiguousarray(w[..., :cut]).reshape(*lead, n // g, g))
        codes.append(c.reshape(*lead, cut))
        scales.append(s)
    if cut < n:
        c, s = _lloyd(np.ascontiguousarray(w[..., cut:]))
        codes.append(c)
        scales.append(s[..., None])
    return np.concatenate(codes, axis=-1), np.concatenate(scales, axis=-1)


def _codes(x):
    x = np.asarray(x)
    if x.dtype != np.int8:
        raise TypeError("int8 codes required")
    if x.ndim == 0 or np.any(x > 1) or np.any(x < -1):
        raise ValueError("codes outside -1, 0, 1 or without an axis")
    return x


def dequantize(codes, scales, group_size=128):
    g, codes, scales = _positive(group_size), _codes(codes), np.asarray(scales)
    *lead, n = codes.shape
    if scales.shape != (*lead, (n + g - 1) // g):
        raise ValueError("scales have another shape")
    out = codes.astype(np.float32)
    for j in range(scales.shape[-1]):
        out[..., j * g : (j + 1) * g] *= scales[..., j : j + 1].astype(np.float32)
    return out


def pack(codes):
    codes = _codes(codes)
    *lead, n = codes.shape
    digits = np.ones((*lead, (n + 3) // 4 * 4), dtype=np.uint8)
    digits[..., :n] = codes + np.int8(1)
    digits = digits.reshape(*lead, (n + 3) // 4, 4)
    return (digits * np.array([1, 4, 16, 64], dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def unpack(packed, shape):
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError("uint8 required")
    *lead, n = (index(s) for s in shape)
    if n < 0 or packed.shape != (*lead, (n + 3) // 4):
        raise ValueError("bytes do not fit the shape")
    codes = BYTE_TO_CODES[packed].reshape(*lead, packed.shape[-1] * 4)[..., :n]
    if (codes == 2).any():
        raise ValueError("both bits set")
    return np.ascontiguousarray(codes)


def split(documents, fraction):
    if not isinstance(fraction, Real):
        raise TypeError("fraction must be a number")
    if math.isnan(fraction) or fraction < 0 or fraction > 1:
        raise ValueError("fraction must be from 0 to 1")
    train_ids, valid_ids = [], []
    for i, document in enumerate(documents):
        h = hashlib.md5(usedforsecurity=False)
        for token in document:
            if index(token) < 0:
                raise ValueError("negative token id")
            h.update(b"%x," % index(token))
        share = int(h.hexdigest()[:13], 16) / 16**13
        if share < fraction:
            valid_ids.append(i)
        else:
            train_ids.append(i)
    return train_ids, valid_ids


# ------------------------------------------------------------------ tape


class Var:
    """A value, its gradient, and how that gradient flows to where the value came from."""

    def __init__(self, value, sources=()):
        self.value, self.sources, self.grad = value, sources, None

    def __add__(self, other):
        return Var(self.value + other.value, ((self, lambda g: g), (other, lambda g: g)))

    def linear(self, weight):
        x, w = self.value, weight.value
        return Var(
            x @ w.T,
            (
                (self, lambda g: g @ w),
                (weight, lambda g: g.reshape(-1, w.shape[0]).T @ x.reshape(-1, w.shape[1])),
            ),
        )

    def relu(self):
        return Var(np.maximum(self.value, 0), ((self, lambda g: g * (self.value > 0)),))

    def norm(self):
        r = (np.mean(self.value**2, axis=-1, keepdims=True) + np.float32(1e-6)) ** np.float32(-0.5)
        y = self.value * r
        return Var(y, ((self, lambda g: r * (g - y * np.mean(g * y, axis=-1, keepdims=True))),))

    def rows(self, tokens):
        def back(g):
            out = np.zeros_like(self.value)
            np.add.at(out, tokens, g)
            return out

        return Var(self.value[tokens], ((self, back),))

    def heads(self, n):
        b, t, d = self.value.shape
        return Var(
            self.value.reshape(b, t, n, d // n).transpose(0, 2, 1, 3),
            ((self, lambda g: g.transpose(0, 2, 1, 3).reshape(b, t, d)),),
        )

    def merge(self):
        b, n, t, w = self.value.shape
        return Var(
            self.value.transpose(0, 2, 1, 3).reshape(b, t, n * w),
            ((self, lambda g: g.reshape(b, t, n, w).transpose(0, 2, 1, 3)),),
        )

    def backward(self, grad):
        order, seen, todo = [], set(), [(self, False)]
        while todo:
            var, finished = todo.pop()
            if finished:
                order.append(var)
            elif id(var) not in seen:
                seen.add(id(var))
                todo.append((var, True))
                todo.extend((source, False) for source, _ in var.sources)
        self.grad = grad
        for var in reversed(order):
            for source, pull in var.sources:
                piece = pull(var.grad)
                source.grad = piece if source.grad is None else source.grad + piece


def attend(q, k, v, bias):
    root = np.float32(q.value.shape[-1] ** -0.5)
    s = (q.value @ k.value.transpose(0, 1, 3, 2)) * root + bias
    p = np.exp(s - np.max(s, axis=-1, keepdims=True))
    p = p / np.sum(p, axis=-1, keepdims=True)
    memo = {}

    def scores(g):
        if memo.get("for") is not g:
            gp = g @ v.value.transpose(0, 1, 3, 2)
            memo["for"], memo["gs"] = g, root * p * (gp - np.sum(gp * p, axis=-1, keepdims=True))
        return memo["gs"]

    return Var(
        p @ v.value,
        (
            (q, lambda g: scores(g) @ k.value),
            (k, lambda g: scores(g).transpose(0, 1, 3, 2) @ q.value),
            (v, lambda g: p.transpose(0, 1, 3, 2) @ g),
        ),
    )


def model(w, c, tokens):
    length = tokens.shape[1]
    back = np.subtract.outer(np.arange(length), np.arange(length))
    slopes = np.exp2(-8.0 * np.arange(1, c["heads"] + 1) / c["heads"])
    bias = np.where(back < 0, -np.inf, -slopes[:, None, None] * back).astype(np.float32)
    x = w["embedding"].rows(tokens)
    for i in range(c["layers"]):
        a = x.norm()
        q, k, v = (a.linear(w[f"layers.{i}.{m}"]).heads(c["heads"]) for m in "qkv")
        x = x + attend(q, k, v, bias).merge().linear(w[f"layers.{i}.o"])
        x = x + x.norm().linear(w[f"layers.{i}.up"]).relu().linear(w[f"layers.{i}.down"])
    return x.norm().linear(w["head"])


# ------------------------------------------------------------------ train


def _inputs(documents, config):
    c = dict(config)
    lowest = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}
    for name, low in lowest.items():
        if name not in c or index(c[name]) < low:
            raise ValueError(f"{name} is missing or out of range")
        c[name] = index(c[name])
    if not isinstance(c.get("seconds"), Real) or not 0 <= c["seconds"] <= 1e9:
        raise ValueError("seconds is missing or out of range")
    if c["dim"] % c["heads"] != 0:
        raise ValueError("dim is not divisible by heads")
    documents = [tuple(index(t) for t in d) for d in documents]
    if any(t < 0 or t >= c["vocab"] for d in documents for t in d):
        raise ValueError("token id out of range")
    if max(map(len, documents), default=0) < 2:
        raise ValueError("nothing to predict")
    return documents, c


def _latents(c):
    d = c["dim"]
    table = [("embedding", c["vocab"], d, 1.0)]
    for i in range(c["layers"]):
        table += [(f"layers.{i}.{m}", d, d, d**-0.5) for m in ("q", "k", "v", "o")]
        table += [
            (f"layers.{i}.up", 4 * d, d, d**-0.5),
            (f"layers.{i}.down", d, 4 * d, 0.5 * d**-0.5),
        ]
    table += [("head", c["vocab"], d, 0.5 * d**-0.5)]
    rng = np.random.default_rng([c["seed"], 1])
    return {
        name: np.float32(std) * rng.standard_normal((r, k), dtype=np.float32)
        for name, r, k, std in table
    }, {name: std for name, _, _, std in table}


def _quantised(latents):
    return {name: ternarize(w) for name, w in latents.items()}


def _vars(tensors):
    return {name: Var(dequantize(*pair)) for name, pair in tensors.items()}


def _grid(pieces):
    length = max(len(p) for p in pieces) - 1
    x = np.zeros((len(pieces), length), dtype=np.intp)
    y = np.full((len(pieces), length), -1, dtype=np.intp)
    for i, p in enumerate(pieces):
        x[i, : len(p) - 1] = p[:-1]
        y[i, : len(p) - 1] = p[1:]
    return x, y


def _log_p(z):
    z = z - np.max(z, axis=-1, keepdims=True)
    return z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))


def _nll(tensors, c, grid, factor=1.0):
    x, y = grid
    log_p = _log_p(model(_vars(tensors), c, x).value * np.float32(factor))
    i, j = np.nonzero(y >= 0)
    return -float(np.mean(log_p[i, j, y[i, j]], dtype=np.float64))


def train(documents, config):
    start = time.monotonic()
    documents, c = _inputs(documents, config)
    latents, std = _latents(c)
    if c["seconds"] == 0:
        return _quantised(latents)
    rng = np.random.default_rng([c["seed"], 2])
    distinct = sorted(set(documents))
    piece = min(c["context"], max(1, sum(max(0, len(d) - 1) for d in distinct) // 8))
    pieces = sorted({d[i : i + piece + 1] for d in distinct for i in range(0, len(d) - 1, piece)})
    rng.shuffle(pieces)
    pieces = [tuple(int(t) for t in p) for p in pieces]
    hold = min(48, -(-len(pieces) // 10)) if len(pieces) >= 4 else 0
    valid, pieces = (_grid(pieces[:hold]) if hold else None), pieces[hold:]
    blur = 40 / (40 + sum(len(p) - 1 for p in pieces))
    rows = max(1, 768 // max(len(p) for p in pieces))
    moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in latents.items()}
    best = (math.inf, None, None)
    order, at, step, checked, took = rng.permutation(len(pieces)), 0, 0, -1.0, 0.0
    while True:
        now = time.monotonic()
        share = (now - start) / (0.9 * c["seconds"])
        last = share + took >= 1 or step == 20000
        tensors = _quantised(latents)
        if valid is not None and (last or share - checked > 0.05):
            checked = share
            loss = _nll(tensors, c, valid)
            if loss < best[0]:
                best = (loss, tensors, latents["head"].copy())
        if last:
            break
        if at >= len(order):
            order, at = rng.permutation(len(pieces)), 0
        x, y = _grid([pieces[i] for i in order[at : at + rows]])
        at += rows
        w = _vars(tensors)
        out = model(w, c, x)
        g = np.exp(_log_p(out.value)) - np.float32(blur / c["vocab"])
        i, j = np.nonzero(y >= 0)
        g[i, j, y[i, j]] -= np.float32(1 - blur)
        g[y < 0] = 0
        out.backward(g / np.float32(len(i)))
        step += 1
        rate = 0.1 * min(1, step / 20) * max(0.05, 1 - share)
        for name, var in w.items():
            m, v = moments[name]
            m += np.float32(0.1) * (var.grad - m)
            v += np.float32(0.02) * (var.grad**2 - v)
            speed = np.float32(rate * std[name] * math.sqrt(1 - 0.98**step) / (1 - 0.9**step))
            latents[name] -= speed * m / (np.sqrt(v) + np.float32(1e-8))
        took = (time.monotonic() - now) / (0.9 * c["seconds"])
    if valid is None:
        return tensors
    _, tensors, head = best
    factor = min(
        (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25), key=lambda f: _nll(tensors, c, valid, f)
    )
    return {**tensors, "head": ternarize(head * np.float32(factor))}
