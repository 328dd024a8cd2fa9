# ruff: noqa: E501, RUF005, SIM300
"""Ternary training with all weights in one flat vector and batches of documents of equal length (no padding)."""

import math
import time
import zlib
from collections import defaultdict
from operator import index

import numpy as np

HALF_MAX = np.float64(65504.0)
EPS = np.float32(1e-6)


def ternarize(w, group_size=128):
    w = np.asarray(w)
    size = index(group_size)
    if size < 1:
        raise ValueError("group_size < 1")
    if w.dtype != np.float32 and w.dtype != np.float64:
        raise TypeError("dtype must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("no axis")
    if not np.isfinite(w).all():
        raise ValueError("not finite")
    count = -(-w.shape[-1] // size)
    codes = np.empty(w.shape, dtype=np.int8)
    scales = np.empty(w.shape[:-1] + (count,), dtype=np.float16)
    for j in range(count):
        here = slice(j * size, (j + 1) * size)
        codes[..., here], scales[..., j] = _one_group(w[..., here])
    return codes, scales


def _total(a):
    """The sum along the last axis from left to right."""
    return np.add.accumulate(a, axis=-1)[..., -1]


def _one_group(w):
    a = np.abs(w).astype(np.float64)
    peak = a.max(axis=-1, initial=0.0)
    a /= np.where(peak > 0, peak, 1.0)[..., None]
    cut = 0.7 * _total(a) / a.shape[-1]
    kept = a > cut[..., None]
    mean = _total(a * kept) / np.maximum(np.count_nonzero(kept, axis=-1), 1)
    scale = np.minimum(mean * peak, HALF_MAX).astype(np.float16)
    alive = kept & (scale > 0)[..., None]
    return np.copysign(alive, w).astype(np.int8), scale


def dequantize(codes, scales, group_size=128):
    codes, scales, size = np.asarray(codes), np.asarray(scales), index(group_size)
    if size < 1:
        raise ValueError("group_size < 1")
    _demand_codes(codes)
    if scales.shape != codes.shape[:-1] + (-(-codes.shape[-1] // size),):
        raise ValueError("scales have the wrong shape")
    out = np.empty(codes.shape, dtype=np.float32)
    for j in range(scales.shape[-1]):
        here = slice(j * size, (j + 1) * size)
        np.multiply(codes[..., here], scales[..., j, None].astype(np.float32), out=out[..., here])
    return out


def _demand_codes(codes):
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes have no axis")
    if not ((codes >= -1) & (codes <= 1)).all():
        raise ValueError("codes must be -1, 0 or 1")


def pack(codes):
    codes = np.asarray(codes)
    _demand_codes(codes)
    size = -(-codes.shape[-1] // 4)
    out = np.full(codes.shape[:-1] + (size,), 0b01010101, dtype=np.uint8)
    for k in range(4):
        part = codes[..., k::4]
        # adding code * 4**k to the byte of zeros turns digit 1 into digit code + 1; bytes wrap as they should
        out[..., : part.shape[-1]] += part.astype(np.uint8) << np.uint8(2 * k)
    return out


def unpack(packed, shape):
    packed = np.asarray(packed)
    shape = tuple(index(s) for s in shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed must be uint8")
    if len(shape) < 1 or any(s < 0 for s in shape):
        raise ValueError("not a shape")
    if packed.shape != shape[:-1] + (-(-shape[-1] // 4),):
        raise ValueError("packed does not fit the shape")
    codes = np.empty(shape, dtype=np.int8)
    for k in range(4):
        target = codes[..., k::4]
        digit = packed[..., : target.shape[-1]] >> np.uint8(2 * k) & np.uint8(3)
        if (digit == 3).any():
            raise ValueError("both bits set")
        target[...] = digit.astype(np.int8) - 1
    return codes


def _mix(number):
    """A 64-bit finaliser: every bit of the answer depends on every bit of the number."""
    mask = 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31


def split(documents, fraction):
    if not (0 <= fraction <= 1):
        raise ValueError("fraction must lie in 0 ... 1")
    sides = {False: [], True: []}
    for i, document in enumerate(documents):
        state = _mix(len(document) + 0x9E3779B97F4A7C15)
        for token in document:
            token = index(token)
            if token < 0:
                raise ValueError("negative token")
            raw = token.to_bytes(token.bit_length() // 8 + 1, "little")
            state = _mix(state ^ zlib.crc32(raw) ^ len(raw) << 40 ^ (token & 0xFFFFFFFF) << 32)
            state = _mix(state + 0x9E3779B97F4A7C15 & 2**64 - 1)
        sides[bool((state >> 11) / 2**53 < fraction)].append(i)
    return sides[False], sides[True]


# ------------------------------------------------------------------------- model


class Layout:
    """Where each matrix lies in the flat vector."""

    def __init__(self, c):
        v, d = c["vocab"], c["dim"]
        self.entries, self.size = {}, 0
        self._add("embedding", v, d, 1.0)
        for i in range(c["layers"]):
            for m in ("q", "k", "v", "o"):
                self._add(f"layers.{i}.{m}", d, d, d**-0.5)
            self._add(f"layers.{i}.up", 4 * d, d, d**-0.5)
            self._add(f"layers.{i}.down", d, 4 * d, d**-0.5 / 2)
        self._add("head", v, d, d**-0.5 / 2)

    def _add(self, name, rows, columns, std):
        self.entries[name] = (self.size, rows, columns, std)
        self.size += rows * columns

    def views(self, flat):
        return {n: flat[o : o + r * c].reshape(r, c) for n, (o, r, c, _) in self.entries.items()}

    def deviations(self):
        return np.concatenate(
            [np.full(r * c, s, np.float32) for _, r, c, s in self.entries.values()]
        )

    def ternary(self, flat):
        return {n: ternarize(m) for n, m in self.views(flat).items()}

    def dense(self, tensors):
        return {n: dequantize(*pair) for n, pair in tensors.items()}


def _unit(x):
    r = np.reciprocal(np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPS))
    return x * r, r


def _unit_grad(g, y, r):
    return (g - y * (g * y).mean(axis=-1, keepdims=True)) * r


def _softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def run(w, c, x, grad=None, goal=None):
    """Logits of x (B, T), flattened to (B * T, vocab); with grad and goal the gradient of the loss is written to grad."""
    b, t = x.shape
    h, d = c["heads"], c["dim"]
    root = np.float32((d // h) ** -0.5)
    back = np.arange(t)[:, None] - np.arange(t)[None]
    bias = (-(2.0 ** (-8.0 * np.arange(1, h + 1) / h))[:, None, None] * back).astype(np.float32)
    bias[:, back < 0] = -np.inf

    def fold(y):
        return y.reshape(b, t, h, d // h).transpose(0, 2, 1, 3)

    def unfold(y):
        return y.transpose(0, 2, 1, 3).reshape(b * t, d)

    s = w["embedding"][x.ravel()]
    saved = []
    for i in range(c["layers"]):
        n = f"layers.{i}."
        a, ra = _unit(s)
        q, k, v = fold(a @ w[n + "q"].T), fold(a @ w[n + "k"].T), fold(a @ w[n + "v"].T)
        p = _softmax(q @ k.swapaxes(-1, -2) * root + bias)
        z = unfold(p @ v)
        s = s + z @ w[n + "o"].T
        e, re = _unit(s)
        u = np.maximum(e @ w[n + "up"].T, 0)
        s = s + u @ w[n + "down"].T
        saved.append((n, a, ra, q, k, v, p, z, e, re, u))
    f, rf = _unit(s)
    logits = f @ w["head"].T
    if grad is None:
        return logits
    g = (_softmax(logits) - goal) / np.float32(b * t)
    grad["head"][:] = g.T @ f
    g = _unit_grad(g @ w["head"], f, rf)
    for n, a, ra, q, k, v, p, z, e, re, u in reversed(saved):
        grad[n + "down"][:] = g.T @ u
        gu = (g @ w[n + "down"]) * (u > 0)
        grad[n + "up"][:] = gu.T @ e
        g = g + _unit_grad(gu @ w[n + "up"], e, re)
        grad[n + "o"][:] = g.T @ z
        gz = fold(g @ w[n + "o"])
        gp = gz @ v.swapaxes(-1, -2)
        gs = (gp - (gp * p).sum(axis=-1, keepdims=True)) * p * root
        gq, gk, gv = (
            unfold(gs @ k),
            unfold(gs.swapaxes(-1, -2) @ q),
            unfold(p.swapaxes(-1, -2) @ gz),
        )
        grad[n + "q"][:], grad[n + "k"][:], grad[n + "v"][:] = gq.T @ a, gk.T @ a, gv.T @ a
        g = g + _unit_grad(gq @ w[n + "q"] + gk @ w[n + "k"] + gv @ w[n + "v"], a, ra)
    grad["embedding"][:] = 0
    np.add.at(grad["embedding"], x.ravel(), g)
    return logits


# ------------------------------------------------------------------------- training


def _arguments(documents, config):
    c = {}
    for name in ("vocab", "dim", "heads", "context", "layers", "seed"):
        try:
            c[name] = index(config[name])
        except KeyError:
            raise ValueError(f"{name} is missing") from None
        if c[name] < (0 if name in ("layers", "seed") else 1):
            raise ValueError(f"{name} is too small")
    seconds = config.get("seconds")
    if isinstance(seconds, (str, bytes)) or seconds is None:
        raise TypeError("seconds must be a number")
    c["seconds"] = float(seconds)
    if not (0 <= c["seconds"] and math.isfinite(c["seconds"])):
        raise ValueError("seconds is out of range")
    if c["dim"] % c["heads"]:
        raise ValueError("dim is no multiple of heads")
    out = []
    for document in documents:
        out.append(tuple(index(t) for t in document))
        if out[-1] and not (min(out[-1]) >= 0 and max(out[-1]) < c["vocab"]):
            raise ValueError("token id out of range")
    if not any(len(d) >= 2 for d in out):
        raise ValueError("no token has a successor")
    return out, c


def _by_length(pieces):
    buckets = defaultdict(list)
    for p in pieces:
        buckets[len(p)].append(p)
    return [np.array(b) for b in buckets.values()]


def _mean_loss(w, c, buckets, factor=1.0):
    total, count = 0.0, 0
    for b in buckets:
        p = _softmax(run(w, c, b[:, :-1]) * np.float32(factor))
        y = b[:, 1:].ravel()
        total -= np.log(np.maximum(p[np.arange(y.size), y], 1e-30)).sum(dtype=np.float64)
        count += y.size
    return total / count


def train(documents, config):
    clock = time.perf_counter
    begin = clock()
    documents, c = _arguments(documents, config)
    layout = Layout(c)
    rng = np.random.default_rng(c["seed"])
    spread = layout.deviations()
    flat = rng.standard_normal(layout.size, dtype=np.float32) * spread
    if c["seconds"] == 0:
        return layout.ternary(flat)
    different = list(dict.fromkeys(documents))
    longest = min(c["context"], max(1, sum(len(d) - 1 for d in different if d) // 8))
    pieces = list(
        dict.fromkeys(
            d[i : i + longest + 1] for d in different for i in range(0, len(d) - 1, longest)
        )
    )
    pieces = [pieces[i] for i in rng.permutation(len(pieces))]
    held = 0 if len(pieces) < 4 else min(64, 1 + len(pieces) // 10)
    valid, learn = _by_length(pieces[:held]), _by_length(pieces[held:])
    doubt = 40.0 / (40.0 + sum(b[:, 1:].size for b in learn))
    gradient = np.zeros(layout.size, np.float32)
    views = layout.views(gradient)
    first, second = np.zeros_like(flat), np.zeros_like(flat)
    best, best_loss, looked, step, lasted = None, math.inf, -1.0, 0, 0.0
    chance = np.array([b[:, 1:].size for b in learn], float)
    while True:
        now = (clock() - begin) / (0.9 * c["seconds"])
        stop = now + lasted > 1 or step >= 30000
        w = layout.dense(layout.ternary(flat))
        if valid and (stop or now - looked > 0.05):
            looked = now
            loss = _mean_loss(w, c, valid)
            if loss < best_loss:
                best, best_loss = flat.copy(), loss
        if stop:
            break
        bucket = learn[rng.choice(len(learn), p=chance / chance.sum())]
        rows = min(len(bucket), max(1, 512 // bucket.shape[1]))
        batch = bucket[rng.choice(len(bucket), rows, replace=False)]
        goal = np.full((batch[:, 1:].size, c["vocab"]), doubt / c["vocab"], np.float32)
        goal[np.arange(len(goal)), batch[:, 1:].ravel()] += np.float32(1 - doubt)
        run(w, c, batch[:, :-1], views, goal)
        step += 1
        first += (gradient - first) * np.float32(0.1)
        second += (gradient * gradient - second) * np.float32(0.02)
        rate = (
            0.08
            * min(1.0, step / 25)
            * max(0.05, 1 - now)
            * math.sqrt(1 - 0.98**step)
            / (1 - 0.9**step)
        )
        flat -= np.float32(rate) * spread * first / (np.sqrt(second) + np.float32(1e-8))
        lasted = (clock() - begin) / (0.9 * c["seconds"]) - now
    if best is not None:
        flat = best
        w = layout.dense(layout.ternary(flat))
        factors = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25]
        factor = factors[int(np.argmin([_mean_loss(w, c, valid, f) for f in factors]))]
        layout.views(flat)["head"][:] *= np.float32(factor)
    return layout.ternary(flat)
