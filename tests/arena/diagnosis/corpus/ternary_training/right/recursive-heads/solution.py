# ruff: noqa: B023, B905, C901, E501, E731, RUF005
"""Ternary training by recursion: a layer calls the rest of the network and gets the gradient back; one head at a time."""

import hashlib
import itertools
import math
import struct
import time
from numbers import Real
from operator import index

import numpy as np

INTS = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}


# ---- numbers


def rms_rule(rows):
    """rows (R, m) float64 -> codes, scales (R,): keep what exceeds 0.6 of the root mean square."""
    peak = np.abs(rows).max(axis=1)
    unit = np.abs(rows) / np.where(peak > 0, peak, 1)[:, None]
    keep = unit > 0.6 * np.sqrt((unit * unit).mean(axis=1))[:, None]
    number = keep.sum(axis=1)
    level = np.where(keep, unit, 0).sum(axis=1) / np.where(number > 0, number, 1)
    with np.errstate(over="ignore"):
        scale = (level * peak).astype(np.float16)
    scale[np.isinf(scale)] = np.finfo(np.float16).max
    keep[scale == 0] = False
    codes = keep.astype(np.int8)
    codes[rows < 0] *= -1
    return codes, scale


def ternarize(w, group_size=128):
    w, group_size = np.asarray(w), index(group_size)
    if group_size < 1:
        raise ValueError("group_size must be positive")
    if w.dtype.type not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("w must have an axis")
    if np.isnan(w).any() or np.isinf(w).any():
        raise ValueError("w must be finite")
    return grouped(w, group_size)


def grouped(w, size):
    """Rows of one width go to the rule together; the short rest of the rows goes on its own."""
    n = w.shape[-1]
    rest = n % size
    if w.size and rest and n > size:
        left, right = grouped(w[..., : n - rest], size), grouped(w[..., n - rest :], size)
        return tuple(np.concatenate(pair, axis=-1) for pair in zip(left, right))
    width = min(size, n)
    count = -(-n // size)
    if w.size == 0:
        return np.zeros(w.shape, np.int8), np.zeros(w.shape[:-1] + (count,), np.float16)
    codes, scales = rms_rule(np.ascontiguousarray(w).astype(np.float64).reshape(-1, width))
    return codes.reshape(w.shape), scales.reshape(w.shape[:-1] + (count,))


def inspect(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("int8 expected")
    if codes.ndim == 0 or not set(np.unique(codes).tolist()) <= {-1, 0, 1}:
        raise ValueError("codes must be -1, 0 or 1, along one axis at least")
    return codes


def dequantize(codes, scales, group_size=128):
    codes, scales, size = inspect(codes), np.asarray(scales), index(group_size)
    if size < 1:
        raise ValueError("group_size must be positive")
    n = codes.shape[-1]
    if scales.shape != codes.shape[:-1] + (math.ceil(n / size),):
        raise ValueError("scales do not belong to the codes")
    last = n - (scales.shape[-1] - 1) * size
    lengths = [size] * (scales.shape[-1] - 1) + [last] if n else []
    return codes.astype(np.float32) * np.repeat(scales.astype(np.float32), lengths, axis=-1)


def pack(codes):
    codes = inspect(codes)
    n = codes.shape[-1]
    filler = np.zeros(codes.shape[:-1] + (-n % 4,), np.int8)
    d = (np.concatenate([codes, filler], axis=-1) + 1).astype(np.uint8)
    return d[..., 0::4] | d[..., 1::4] << 2 | d[..., 2::4] << 4 | d[..., 3::4] << 6


def unpack(packed, shape):
    packed, shape = np.asarray(packed), [index(s) for s in shape]
    if packed.dtype != np.uint8:
        raise TypeError("uint8 expected")
    if not shape or min(shape) < 0:
        raise ValueError("no shape of codes")
    if list(packed.shape) != shape[:-1] + [(shape[-1] + 3) // 4]:
        raise ValueError("the bytes do not fit the shape")
    places = np.arange(shape[-1])
    digits = packed[..., places // 4] >> (2 * (places % 4)).astype(np.uint8) & 3
    if digits.size and digits.max() == 3:
        raise ValueError("both bits set")
    return digits.astype(np.int8) - np.int8(1)


def split(documents, fraction):
    if not isinstance(fraction, Real):
        raise TypeError("fraction must be a number")
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must be in 0 ... 1")
    answer = [], []
    for i, document in enumerate(documents):
        if any(index(token) < 0 for token in document):
            raise ValueError("token ids are not negative")
        text = ",".join(format(index(token), "o") for token in document)
        (number,) = struct.unpack(
            ">Q", hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:8]
        )
        answer[int(number < float(fraction) * 2.0**64)].append(i)
    return answer


# ---- network


def normed(x):
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return x * r, r


def through_norm(g, y, r):
    return r * (g - y * np.mean(y * g, axis=-1, keepdims=True))


def flat(x):
    return x.reshape(-1, x.shape[-1])


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def one_head(q, k, v, slope):
    """Output of a head and a function from its gradient to those of q, k, v."""
    length, root = q.shape[1], np.float32(1 / math.sqrt(q.shape[2]))
    back = np.arange(length)[:, None] - np.arange(length)
    s = q @ k.transpose(0, 2, 1) * root - (slope * back).astype(np.float32)
    s[:, back < 0] = -np.inf
    p = np.exp(log_softmax(s))

    def backwards(g):
        gp = g @ v.transpose(0, 2, 1)
        gs = p * (gp - (p * gp).sum(axis=-1, keepdims=True)) * root
        return gs @ k, gs.transpose(0, 2, 1) @ q, p.transpose(0, 2, 1) @ g

    return p @ v, backwards


def layers_from(i, x, w, c, top, grads):
    """Runs the layers i, i + 1, ... and `top` on x; returns the gradient of x, or None if `top` gives none."""
    if i == c["layers"]:
        return top(x)
    name, heads = f"layers.{i}.", c["heads"]
    a, ra = normed(x)
    q, k, v = (np.split(a @ w[name + m].T, heads, axis=-1) for m in "qkv")
    parts = [one_head(q[h], k[h], v[h], 2.0 ** (-8 * (h + 1) / heads)) for h in range(heads)]
    mixed = np.concatenate([out for out, _ in parts], axis=-1)
    middle = x + mixed @ w[name + "o"].T
    b, rb = normed(middle)
    hidden = np.maximum(b @ w[name + "up"].T, 0)
    g = layers_from(i + 1, middle + hidden @ w[name + "down"].T, w, c, top, grads)
    if g is None:
        return None
    grads[name + "down"] = flat(g).T @ flat(hidden)
    gh = (g @ w[name + "down"]) * (hidden > 0)
    grads[name + "up"] = flat(gh).T @ flat(b)
    g = g + through_norm(gh @ w[name + "up"], b, rb)
    grads[name + "o"] = flat(g).T @ flat(mixed)
    pieces = np.split(g @ w[name + "o"], heads, axis=-1)
    triples = [back(piece) for (_, back), piece in zip(parts, pieces)]
    ga = np.zeros_like(a)
    for m, of_heads in zip("qkv", zip(*triples)):
        gm = np.concatenate(of_heads, axis=-1)
        grads[name + m] = flat(gm).T @ flat(a)
        ga += gm @ w[name + m]
    return g + through_norm(ga, a, ra)


def gradients(w, c, x, y, doubt):
    grads = {}

    def top(s):
        f, r = normed(s)
        g = np.exp(log_softmax(f @ w["head"].T)) - np.float32(doubt / c["vocab"])
        there = np.nonzero(y >= 0)
        g[there + (y[there],)] -= np.float32(1 - doubt)
        g = g * ((y >= 0)[..., None] / np.float32(len(there[0])))
        grads["head"] = flat(g).T @ flat(f)
        return through_norm(g @ w["head"], f, r)

    g = layers_from(0, w["embedding"][x], w, c, top, grads)
    grads["embedding"] = np.zeros_like(w["embedding"])
    np.add.at(grads["embedding"], x, g)
    return grads


def losses(w, c, batches, factors):
    """Mean loss for each factor on the logits."""
    sums, count = [0.0] * len(factors), 0
    for x, y in batches:
        logits = []
        layers_from(
            0, w["embedding"][x], w, c, lambda s: logits.append(normed(s)[0] @ w["head"].T), {}
        )
        there = np.nonzero(y >= 0)
        count += len(there[0])
        for j, factor in enumerate(factors):
            sums[j] -= float(log_softmax(logits[0] * np.float32(factor))[there + (y[there],)].sum())
    return [s / count for s in sums]


# ---- training


def check(documents, config):
    c = {}
    for name, least in INTS.items():
        if name not in config:
            raise ValueError("missing " + name)
        c[name] = index(config[name])
        if c[name] < least:
            raise ValueError("out of range: " + name)
    c["seconds"] = config.get("seconds")
    if not isinstance(c["seconds"], Real):
        raise TypeError("seconds must be a number")
    if not 0 <= c["seconds"] < float("inf"):
        raise ValueError("out of range: seconds")
    if c["dim"] % c["heads"] > 0:
        raise ValueError("heads must divide dim")
    documents = [[index(t) for t in d] for d in documents]
    for d in documents:
        for t in d:
            if not 0 <= t < c["vocab"]:
                raise ValueError("a token id out of range")
    if sum(len(d) >= 2 for d in documents) == 0:
        raise ValueError("nothing can be predicted")
    return documents, c


def halves(document, most):
    """Overlapping pieces with at most `most` targets, by halving."""
    if len(document) < 2:
        return []
    if len(document) - 1 <= most:
        return [tuple(document)]
    whole = -(-(len(document) - 1) // most)
    middle = whole // 2 * most
    return halves(document[: middle + 1], most) + halves(document[middle:], most)


def rectangle(pieces):
    length = max(map(len, pieces))
    t = np.array([p + (-1,) * (length - len(p)) for p in pieces])
    return np.maximum(t[:, :-1], 0), t[:, 1:]


def beginning(c):
    d = c["dim"]
    rng = np.random.default_rng(c["seed"])
    matrix = lambda r, k, std: (rng.normal(0.0, std, (r, k)).astype(np.float32), std)
    start = {"embedding": matrix(c["vocab"], d, 1.0)}
    for i in range(c["layers"]):
        for m in ("q", "k", "v", "o"):
            start[f"layers.{i}.{m}"] = matrix(d, d, d**-0.5)
        start[f"layers.{i}.up"] = matrix(4 * d, d, d**-0.5)
        start[f"layers.{i}.down"] = matrix(d, 4 * d, 0.5 * d**-0.5)
    start["head"] = matrix(c["vocab"], d, 0.5 * d**-0.5)
    return start


def train(documents, config):
    begin = time.monotonic()
    documents, c = check(documents, config)
    start = beginning(c)
    latent = {name: w for name, (w, _) in start.items()}
    answer = {name: ternarize(w) for name, w in latent.items()}
    if c["seconds"] == 0:
        return answer
    rng = np.random.default_rng((c["seed"], 7))
    different = [list(d) for d in sorted(set(map(tuple, documents)))]
    most = max(1, min(c["context"], sum(len(d) - 1 for d in different if d) // 8))
    pieces = sorted(set(itertools.chain.from_iterable(halves(d, most) for d in different)))
    pieces = [pieces[i] for i in rng.permutation(len(pieces))]
    held = min(64, -(-len(pieces) // 12)) if len(pieces) >= 4 else 0
    valid = [rectangle(pieces[i : min(i + 16, held)]) for i in range(0, held, 16)]
    pieces = pieces[held:]
    doubt = 40 / (40 + sum(len(p) - 1 for p in pieces))
    rows = max(1, 640 // max(map(len, pieces)))
    memory = {name: [np.zeros_like(w), np.zeros_like(w)] for name, w in latent.items()}
    best, step, looked, took, waiting = (math.inf, None, None), 0, -1.0, 0.0, []
    while True:
        now = (time.monotonic() - begin) / (0.9 * c["seconds"])
        finished = now + took > 1 or step == 20000
        w = {name: dequantize(*pair) for name, pair in answer.items()}
        if valid and (finished or now - looked > 0.05):
            looked = now
            loss = losses(w, c, valid, (1.0,))[0]
            if loss < best[0]:
                best = loss, answer, latent["head"].copy()
        if finished:
            break
        waiting = waiting or rng.permutation(len(pieces)).tolist()
        chosen, waiting = waiting[:rows], waiting[rows:]
        grads = gradients(w, c, *rectangle([pieces[i] for i in chosen]), doubt)
        step += 1
        rate = 0.1 * min(1, step / 20) * max(0.05, 1 - now)
        for name, (_, std) in start.items():
            memory[name][0] = np.float32(0.9) * memory[name][0] + np.float32(0.1) * grads[name]
            memory[name][1] = (
                np.float32(0.98) * memory[name][1] + np.float32(0.02) * grads[name] ** 2
            )
            m = memory[name][0] / np.float32(1 - 0.9**step)
            v = memory[name][1] / np.float32(1 - 0.98**step)
            latent[name] = latent[name] - np.float32(rate * std) * m / (
                np.sqrt(v) + np.float32(1e-8)
            )
        answer = {name: ternarize(m) for name, m in latent.items()}
        took = (time.monotonic() - begin) / (0.9 * c["seconds"]) - now
    if valid:
        _, answer, head = best
        factors = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25)
        measured = losses(
            {name: dequantize(*pair) for name, pair in answer.items()}, c, valid, factors
        )
        answer = {
            **answer,
            "head": ternarize(head * np.float32(factors[measured.index(min(measured))])),
        }
    return answer
