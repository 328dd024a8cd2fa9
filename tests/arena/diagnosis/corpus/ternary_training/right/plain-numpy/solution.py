# ruff: noqa: E501, RUF005
"""Ternary weights and a small ternary language model, in plain NumPy with gradients written out by hand."""

import hashlib
import math
import numbers
import operator
import time

import numpy as np

GROUP = 128
LARGEST = float(np.finfo(np.float16).max)


# ---------------------------------------------------------------- quantiser


def _group_size(group_size):
    group_size = operator.index(group_size)
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    return group_size


def _quantise_block(w):
    """w (..., m), each row one group -> codes (..., m), scales (..., 1)."""
    size = np.abs(np.ascontiguousarray(w, dtype=np.float64))
    top = size.max(axis=-1, keepdims=True)
    size = size / np.where(top > 0, top, 1.0)
    keep = size > 0.7 * size.mean(axis=-1, keepdims=True)
    count = np.maximum(keep.sum(axis=-1, keepdims=True), 1)
    level = np.where(keep, size, 0.0).sum(axis=-1, keepdims=True) / count
    scale = np.minimum(level * top, LARGEST).astype(np.float16)
    codes = np.where(keep & (scale > 0), np.sign(w), 0).astype(np.int8)
    return codes, scale


def ternarize(w, group_size=128):
    w = np.asarray(w)
    group_size = _group_size(group_size)
    if w.dtype not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("w needs an axis")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    n = w.shape[-1]
    codes = np.zeros(w.shape, np.int8)
    scales = np.zeros(w.shape[:-1] + (-(-n // group_size),), np.float16)
    if w.size == 0:
        return codes, scales
    full = n // group_size
    if full:
        body = w[..., : full * group_size].reshape(w.shape[:-1] + (full, group_size))
        c, s = _quantise_block(body)
        codes[..., : full * group_size] = c.reshape(w.shape[:-1] + (full * group_size,))
        scales[..., :full] = s[..., 0]
    if n % group_size:
        c, s = _quantise_block(w[..., full * group_size :])
        codes[..., full * group_size :] = c
        scales[..., full:] = s
    return codes, scales


def _check_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes need an axis")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=128):
    codes, scales, group_size = _check_codes(codes), np.asarray(scales), _group_size(group_size)
    n = codes.shape[-1]
    if scales.shape != codes.shape[:-1] + (-(-n // group_size),):
        raise ValueError("scales do not fit the codes")
    group = np.arange(n) // group_size
    return codes.astype(np.float32) * scales.astype(np.float32)[..., group]


# ---------------------------------------------------------------- packing


def pack(codes):
    codes = _check_codes(codes)
    n = codes.shape[-1]
    out = np.zeros(codes.shape[:-1] + (-(-n // 4),), np.uint8)
    for place in range(4):
        digit = np.ones(out.shape, np.uint8)
        here = codes[..., place::4]
        digit[..., : here.shape[-1]] = (here + 1).astype(np.uint8)
        out |= digit << np.uint8(2 * place)
    return out


def unpack(packed, shape):
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    shape = tuple(operator.index(s) for s in shape)
    if not shape or min(shape) < 0 or packed.shape != shape[:-1] + (-(-shape[-1] // 4),):
        raise ValueError("the bytes do not fit the shape")
    digits = np.empty(packed.shape + (4,), np.uint8)
    for place in range(4):
        digits[..., place] = (packed >> np.uint8(2 * place)) & np.uint8(3)
    digits = digits.reshape(packed.shape[:-1] + (4 * packed.shape[-1],))[..., : shape[-1]]
    if (digits == 3).any():
        raise ValueError("both bits set")
    return digits.astype(np.int8) - np.int8(1)


# ---------------------------------------------------------------- split


def split(documents, fraction):
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must be between 0 and 1")
    train_ids, valid_ids = [], []
    for i, document in enumerate(documents):
        document = [operator.index(token) for token in document]
        if any(token < 0 for token in document):
            raise ValueError("token ids are not negative")
        text = " ".join(map(hex, document))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        (valid_ids if number < fraction * 2**64 else train_ids).append(i)
    return train_ids, valid_ids


# ---------------------------------------------------------------- training


def _read_config(config):
    out = {}
    for name, least in (
        ("vocab", 1),
        ("dim", 1),
        ("heads", 1),
        ("context", 1),
        ("layers", 0),
        ("seed", 0),
    ):
        if name not in config:
            raise ValueError(f"config lacks {name}")
        out[name] = operator.index(config[name])
        if out[name] < least:
            raise ValueError(f"{name} is out of range")
    if "seconds" not in config:
        raise ValueError("config lacks seconds")
    if not isinstance(config["seconds"], numbers.Real):
        raise TypeError("seconds must be a number")
    out["seconds"] = float(config["seconds"])
    if not 0 <= out["seconds"] < math.inf:
        raise ValueError("seconds is out of range")
    if out["dim"] % out["heads"]:
        raise ValueError("dim must be divisible by heads")
    return out


def _read_documents(documents, vocab):
    out = [[operator.index(t) for t in document] for document in documents]
    for document in out:
        if any(t < 0 or t >= vocab for t in document):
            raise ValueError("token outside of the vocabulary")
    if all(len(document) < 2 for document in out):
        raise ValueError("no token has a successor")
    return out


def _windows(documents, context):
    """Different pieces of at most context + 1 tokens; small texts are cut finer so that some can be held out."""
    total = sum(max(len(d) - 1, 0) for d in set(map(tuple, documents)))
    step = min(context, max(total // 8, 1))
    pieces = {}
    for d in documents:
        for a in range(0, len(d) - 1, step):
            pieces[tuple(d[a : a + step + 1])] = None
    return list(pieces)


def _start(c, rng):
    dim = c["dim"]
    shapes = {"embedding": ((c["vocab"], dim), 1.0)}
    for i in range(c["layers"]):
        for name in "qkvo":
            shapes[f"layers.{i}.{name}"] = ((dim, dim), dim**-0.5)
        shapes[f"layers.{i}.up"] = ((4 * dim, dim), dim**-0.5)
        shapes[f"layers.{i}.down"] = ((dim, 4 * dim), 0.5 * dim**-0.5)
    shapes["head"] = ((c["vocab"], dim), 0.5 * dim**-0.5)
    weights = {
        name: (rng.standard_normal(shape) * std).astype(np.float32)
        for name, (shape, std) in shapes.items()
    }
    return weights, {name: std for name, (_, std) in shapes.items()}


def _norm(x):
    r = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return x * r, r


def _norm_back(g, a, r):
    return r * (g - a * np.mean(g * a, axis=-1, keepdims=True))


def _bias(heads, length):
    slope = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    back = np.arange(length)[:, None] - np.arange(length)
    return np.where(back >= 0, -slope[:, None, None] * back, -np.inf).astype(np.float32)


def _forward(w, c, t, keep=None):
    """Logits (B, T, vocab); `keep` collects what the way back needs."""
    b, length = t.shape
    heads, width = c["heads"], c["dim"] // c["heads"]
    bias = _bias(heads, length)

    def apart(y):
        return y.reshape(b, length, heads, width).transpose(0, 2, 1, 3)

    x = w["embedding"][t]
    for i in range(c["layers"]):
        name = f"layers.{i}."
        a, r = _norm(x)
        q, k, v = (apart(a @ w[name + m].T) for m in "qkv")
        s = q @ k.transpose(0, 1, 3, 2) * np.float32(width**-0.5) + bias
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        mixed = (p @ v).transpose(0, 2, 1, 3).reshape(b, length, -1)
        x = x + mixed @ w[name + "o"].T
        a2, r2 = _norm(x)
        h = np.maximum(a2 @ w[name + "up"].T, 0)
        x = x + h @ w[name + "down"].T
        if keep is not None:
            keep.append((a, r, q, k, v, p, mixed, a2, r2, h))
    a, r = _norm(x)
    if keep is not None:
        keep.append((a, r))
    return a @ w["head"].T


def _outer(g, a):
    return g.reshape(-1, g.shape[-1]).T @ a.reshape(-1, a.shape[-1])


def _backward(w, c, t, keep, g):
    """Gradients of all weights from the gradient g of the logits."""
    b, length = t.shape
    heads, width = c["heads"], c["dim"] // c["heads"]

    def together(y):
        return y.transpose(0, 2, 1, 3).reshape(b, length, -1)

    grads = {}
    a, r = keep.pop()
    grads["head"] = _outer(g, a)
    g = _norm_back(g @ w["head"], a, r)
    for i in reversed(range(c["layers"])):
        name = f"layers.{i}."
        a, r, q, k, v, p, mixed, a2, r2, h = keep.pop()
        grads[name + "down"] = _outer(g, h)
        gh = (g @ w[name + "down"]) * (h > 0)
        grads[name + "up"] = _outer(gh, a2)
        g = g + _norm_back(gh @ w[name + "up"], a2, r2)
        grads[name + "o"] = _outer(g, mixed)
        gm = (g @ w[name + "o"]).reshape(b, length, heads, width).transpose(0, 2, 1, 3)
        gv = p.transpose(0, 1, 3, 2) @ gm
        gp = gm @ v.transpose(0, 1, 3, 2)
        gs = p * (gp - (gp * p).sum(axis=-1, keepdims=True)) * np.float32(width**-0.5)
        ga = 0
        for m, part in (("q", gs @ k), ("k", gs.transpose(0, 1, 3, 2) @ q), ("v", gv)):
            part = together(part)
            grads[name + m] = _outer(part, a)
            ga = ga + part @ w[name + m]
        g = g + _norm_back(ga, a, r)
    grads["embedding"] = np.zeros_like(w["embedding"])
    np.add.at(grads["embedding"], t.ravel(), g.reshape(-1, g.shape[-1]))
    return grads


def _batch(pieces):
    length = max(map(len, pieces)) - 1
    t = np.zeros((len(pieces), length), np.int64)
    y = np.zeros((len(pieces), length), np.int64)
    mask = np.zeros((len(pieces), length), np.float32)
    for row, piece in enumerate(pieces):
        n = len(piece) - 1
        t[row, :n], y[row, :n], mask[row, :n] = piece[:-1], piece[1:], 1
    return t, y, mask


def _log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def _loss(w, c, batches, factor=1.0):
    total = count = 0.0
    for t, y, mask in batches:
        logp = np.take_along_axis(
            _log_softmax(_forward(w, c, t) * np.float32(factor)), y[..., None], -1
        )[..., 0]
        total -= float((logp * mask).sum())
        count += float(mask.sum())
    return total / count


def _ternary(weights):
    return {name: ternarize(w, GROUP) for name, w in weights.items()}


def _dense(tensors):
    return {name: dequantize(*pair, GROUP) for name, pair in tensors.items()}


def train(documents, config):
    begin = time.monotonic()
    c = _read_config(config)
    documents = _read_documents(documents, c["vocab"])
    rng = np.random.default_rng(c["seed"])
    weights, std = _start(c, rng)
    if c["seconds"] == 0:
        return _ternary(weights)
    pieces = _windows(documents, c["context"])
    pieces = [pieces[i] for i in rng.permutation(len(pieces))]
    held = min(max(len(pieces) // 10, 1), 64) if len(pieces) >= 4 else 0
    valid = [_batch(pieces[i : min(i + 16, held)]) for i in range(0, held, 16)]
    learn = pieces[held:]
    targets = sum(len(p) - 1 for p in learn)
    smooth = 40.0 / (40.0 + targets)  # little text: stay near 1 / vocab
    rows = max(1, 768 // max(len(p) for p in learn))
    mean = {n: np.zeros_like(w) for n, w in weights.items()}
    square = {n: np.zeros_like(w) for n, w in weights.items()}
    best, best_loss = None, math.inf
    deadline = begin + 0.92 * c["seconds"]
    step, last_look, queue, latest = 0, 0.0, [], 0.0
    while True:
        now = time.monotonic()
        used = (now - begin) / (0.92 * c["seconds"])
        over = now + latest > deadline or step >= 20000
        if valid and (over or used - last_look > 0.04 or step == 0):
            last_look = used
            tensors = _ternary(weights)
            loss = _loss(_dense(tensors), c, valid)
            if loss < best_loss:
                best, best_loss = {n: w.copy() for n, w in weights.items()}, loss
            if time.monotonic() - now > 0.1 * c["seconds"]:
                valid = valid[:1]
        if over:
            break
        if len(queue) < rows:
            queue = queue + list(rng.permutation(len(learn)))
        chosen, queue = queue[:rows], queue[rows:]
        t, y, mask = _batch([learn[i] for i in chosen])
        w = _dense(_ternary(weights))
        keep = []
        p = np.exp(_log_softmax(_forward(w, c, t, keep)))
        goal = np.full_like(p, smooth / c["vocab"])
        np.put_along_axis(goal, y[..., None], 1.0 - smooth + smooth / c["vocab"], -1)
        grads = _backward(w, c, t, keep, (p - goal) * (mask / mask.sum())[..., None])
        step += 1
        rate = 0.1 * min(step / 20, 1.0) * max(1.0 - used, 0.05)
        for n, g in grads.items():
            mean[n] += (g - mean[n]) * np.float32(0.1)
            square[n] += (g * g - square[n]) * np.float32(0.02)
            m = mean[n] / np.float32(1 - 0.9**step)
            v = square[n] / np.float32(1 - 0.98**step)
            weights[n] -= np.float32(rate * std[n]) * m / (np.sqrt(v) + np.float32(1e-8))
        latest = time.monotonic() - now
    if best is not None:
        weights = best
        dense = _dense(_ternary(weights))
        factors = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        factor = min(factors, key=lambda f: _loss(dense, c, valid, f))
        weights["head"] = weights["head"] * np.float32(factor)
    return _ternary(weights)
