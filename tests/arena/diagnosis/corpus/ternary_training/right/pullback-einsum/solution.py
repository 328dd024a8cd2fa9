# ruff: noqa: B905, E501, RUF005
"""Ternary training in a functional style: every operation returns its value and a pullback; einsum does the sums."""

import hashlib
import itertools
import math
import operator
import time
from functools import partial
from numbers import Real

import numpy as np

einsum = partial(np.einsum, optimize=True)
f32 = np.float32


# -- quantiser: try a grid of thresholds, keep the one that explains most of the group


def at_least_one(group_size):
    if operator.index(group_size) < 1:
        raise ValueError("group size must be at least 1")
    return operator.index(group_size)


def spans(n, size):
    """(first group, last group, first weight, last weight) of the full groups and of the short one."""
    full = n // size
    if full:
        yield 0, full, 0, full * size
    if n % size:
        yield full, full + 1, full * size, n


def explained(a, threshold):
    on = a > threshold
    total, count = np.where(on, a, 0.0).sum(-1), np.maximum(on.sum(-1), 1)
    return total * total / count, total / count


def best_of_grid(a):
    """a (..., m) between 0 and 1 -> (threshold, level), each (..., 1)."""
    average = a.mean(-1, keepdims=True)
    best = None
    for factor in (0.55, 0.65, 0.75, 0.85, 0.95):
        gain, level = explained(a, factor * average)
        found = (gain, level, factor * average[..., 0])
        best = (
            found
            if best is None
            else tuple(np.where(gain > best[0], new, old) for new, old in zip(found, best))
        )
    return best[2][..., None], best[1][..., None]


def quantise(piece):
    piece = np.array(piece, dtype=np.float64, order="C")
    peak = np.abs(piece).max(-1, keepdims=True)
    a = np.abs(piece) / np.where(peak > 0.0, peak, 1.0)
    threshold, level = best_of_grid(a)
    scale = np.minimum(peak * level, np.finfo(np.float16).max).astype(np.float16)
    return np.where((a > threshold) & (scale > 0), np.sign(piece), 0.0).astype(np.int8), scale[
        ..., 0
    ]


def ternarize(w, group_size=128):
    w, size = np.asarray(w), at_least_one(group_size)
    if w.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError("w must be float32 or float64")
    if w.ndim < 1 or not np.isfinite(w).all():
        raise ValueError("w must be finite and have an axis")
    lead, n = w.shape[:-1], w.shape[-1]
    codes, scales = np.zeros(w.shape, np.int8), np.zeros(lead + (-(-n // size),), np.float16)
    if w.size:
        for g0, g1, i0, i1 in spans(n, size):
            c, scales[..., g0:g1] = quantise(w[..., i0:i1].reshape(lead + (g1 - g0, -1)))
            codes[..., i0:i1] = c.reshape(lead + (i1 - i0,))
    return codes, scales


def valid_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim < 1 or (np.abs(codes.astype(np.int16)) > 1).any():
        raise ValueError("codes must be -1, 0, 1 along an axis")
    return codes


def dequantize(codes, scales, group_size=128):
    codes, scales, size = valid_codes(codes), np.asarray(scales), at_least_one(group_size)
    n = codes.shape[-1]
    if scales.shape != codes.shape[:-1] + (-(-n // size),):
        raise ValueError("scales do not fit")
    return np.multiply(codes, np.take(scales, np.arange(n) // size, axis=-1), dtype=f32)


# -- packing: base-4 digits


def pack(codes):
    codes = valid_codes(codes)
    width = -(-codes.shape[-1] // 4)
    digits = np.full(codes.shape[:-1] + (4 * width,), 1, np.uint8)
    digits[..., : codes.shape[-1]] += (
        codes.view(np.uint8) if codes.flags.c_contiguous else codes.copy().view(np.uint8)
    )
    return np.einsum(
        "...k,k->...",
        digits.reshape(codes.shape[:-1] + (width, 4)),
        np.uint8(4) ** np.arange(4, dtype=np.uint8),
    )


def unpack(packed, shape):
    packed, shape = np.asarray(packed), tuple(operator.index(n) for n in shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    if not shape or min(shape) < 0 or packed.shape != shape[:-1] + (-(-shape[-1] // 4),):
        raise ValueError("packed data does not fit the shape")
    digits = np.stack([packed // np.uint8(4**k) % np.uint8(4) for k in range(4)], axis=-1)
    digits = digits.reshape(
        packed.shape[:-1] + (-1,) if packed.size else packed.shape[:-1] + (4 * packed.shape[-1],)
    )
    digits = digits[..., : shape[-1]]
    if np.count_nonzero(digits == 3):
        raise ValueError("both bits of a place are set")
    return (digits.astype(np.int16) - 1).astype(np.int8)


# -- split


def chance(document):
    """A number in [0, 1) that depends on the tokens alone."""
    tokens = [operator.index(t) for t in document]
    if any(t < 0 for t in tokens):
        raise ValueError("negative token id")
    digest = hashlib.blake2s("/".join(map(hex, tokens)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2.0**32


def split(documents, fraction):
    if not 0.0 <= fraction <= 1.0:
        raise ValueError("fraction must be within 0 and 1")
    held = [chance(d) < fraction for d in documents]
    return [i for i, h in enumerate(held) if not h], [i for i, h in enumerate(held) if h]


# -- operations: (value, pullback)


def dense(x, w):
    return einsum("btd,ed->bte", x, w), lambda g: (
        einsum("bte,ed->btd", g, w),
        einsum("bte,btd->ed", g, x),
    )


def norm(x):
    r = 1 / np.sqrt(einsum("btd,btd->bt", x, x)[..., None] / f32(x.shape[-1]) + f32(1e-6))
    y = x * r
    return y, lambda g: r * (g - y * (einsum("btd,btd->bt", g, y)[..., None] / f32(x.shape[-1])))


def attention(q, k, v, bias):
    heads = len(bias)
    q, k, v = (m.reshape(m.shape[0], m.shape[1], heads, -1) for m in (q, k, v))
    shape, root = q.shape[:2] + (-1,), f32(q.shape[-1] ** -0.5)
    s = einsum("bshw,brhw->bhsr", q, k) * root + bias
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)

    def pullback(g):
        g = g.reshape(v.shape)
        gp = einsum("bshw,brhw->bhsr", g, v)
        gs = p * (gp - (gp * p).sum(-1, keepdims=True)) * root
        return (
            einsum("bhsr,brhw->bshw", gs, k).reshape(shape),
            einsum("bhsr,bshw->brhw", gs, q).reshape(shape),
            einsum("bhsr,bshw->brhw", p, g).reshape(shape),
        )

    return einsum("bhsr,brhw->bshw", p, v).reshape(shape), pullback


def block(x, w, bias):
    """One layer; the pullback gives the gradients of x and of the six matrices."""
    a, a_back = norm(x)
    (q, q_back), (k, k_back), (v, v_back) = (dense(a, w[m]) for m in "qkv")
    mixed, mixed_back = attention(q, k, v, bias)
    out, out_back = dense(mixed, w["o"])
    x1 = x + out
    b, b_back = norm(x1)
    hidden, up_back = dense(b, w["up"])
    active = hidden > 0
    down, down_back = dense(hidden * active, w["down"])

    def pullback(g):
        grads = {}
        gh, grads["down"] = down_back(g)
        gb, grads["up"] = up_back(gh * active)
        g = g + b_back(gb)
        gm, grads["o"] = out_back(g)
        parts = [back(part) for back, part in zip((q_back, k_back, v_back), mixed_back(gm))]
        grads.update(zip("qkv", (weight for _, weight in parts)))
        return g + a_back(sum(part for part, _ in parts)), grads

    return x1 + down, pullback


def network(w, c, tokens):
    places = np.arange(tokens.shape[1])
    back = places[:, None] - places
    slopes = 2.0 ** (-8.0 * (np.arange(c["heads"]) + 1.0) / c["heads"])
    bias = np.where(back >= 0, -einsum("h,sr->hsr", slopes, back), -np.inf).astype(f32)
    x, pullbacks = w["embedding"][tokens], []
    for i in range(c["layers"]):
        x, pull = block(
            x, {m: w[f"layers.{i}.{m}"] for m in ("q", "k", "v", "o", "up", "down")}, bias
        )
        pullbacks.append(pull)
    x, last_back = norm(x)
    logits, head_back = dense(x, w["head"])

    def pullback(g):
        g, head = head_back(g)
        grads, g = {"head": head}, last_back(g)
        for i in reversed(range(len(pullbacks))):
            g, inner = pullbacks[i](g)
            grads.update({f"layers.{i}.{m}": value for m, value in inner.items()})
        grads["embedding"] = np.zeros_like(w["embedding"])
        np.add.at(grads["embedding"], tokens, g)
        return grads

    return logits, pullback


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


# -- training


def read(documents, config):
    missing = {"vocab", "dim", "heads", "context", "layers", "seed", "seconds"} - set(config)
    if missing:
        raise ValueError(f"missing: {missing}")
    c = {
        k: operator.index(v)
        for k, v in config.items()
        if k in ("vocab", "dim", "heads", "context", "layers", "seed")
    }
    if (
        any(v < (k in ("vocab", "dim", "heads", "context")) for k, v in c.items())
        or c["dim"] % c["heads"]
    ):
        raise ValueError("config value out of range")
    c["seconds"] = config["seconds"]
    if not isinstance(c["seconds"], Real) or not 0 <= c["seconds"] < math.inf:
        raise ValueError("seconds must be a number that is not negative")
    documents = [tuple(map(operator.index, d)) for d in documents]
    if not all(0 <= t < c["vocab"] for t in itertools.chain.from_iterable(documents)):
        raise ValueError("token outside of the vocabulary")
    if all(len(d) < 2 for d in documents):
        raise ValueError("no token has a successor")
    return documents, c


def shapes(c):
    d = c["dim"]
    yield "embedding", (c["vocab"], d), 1.0
    for i in range(c["layers"]):
        yield from ((f"layers.{i}.{m}", (d, d), d**-0.5) for m in "qkvo")
        yield f"layers.{i}.up", (4 * d, d), d**-0.5
        yield f"layers.{i}.down", (d, 4 * d), 0.5 * d**-0.5
    yield "head", (c["vocab"], d), 0.5 * d**-0.5


def cut(documents, context):
    documents = dict.fromkeys(documents)
    size = max(1, min(context, sum(max(len(d) - 1, 0) for d in documents) // 8))
    return list(
        dict.fromkeys(d[i : i + size + 1] for d in documents for i in range(0, len(d) - 1, size))
    )


def table(pieces):
    rows = list(itertools.zip_longest(*pieces, fillvalue=-1))
    t = np.array(rows).T
    return np.maximum(t[:, :-1], 0), t[:, 1:]


def loss_of(tensors, c, batches, factor=1.0):
    w = {name: dequantize(*pair) for name, pair in tensors.items()}
    losses = []
    for x, y in batches:
        log_p = log_softmax(network(w, c, x)[0] * f32(factor))
        losses.append(-np.take_along_axis(log_p, np.maximum(y, 0)[..., None], -1)[..., 0][y >= 0])
    return float(np.concatenate(losses).mean(dtype=np.float64))


def adam(state, grad, step):
    m, v = state
    state = (0.9 * m + 0.1 * grad).astype(f32), (0.98 * v + 0.02 * grad * grad).astype(f32)
    return state, state[0] / f32(1 - 0.9**step) / (
        np.sqrt(state[1] / f32(1 - 0.98**step)) + f32(1e-8)
    )


def train(documents, config):
    begin = time.perf_counter()
    documents, c = read(documents, config)
    rng = np.random.default_rng(c["seed"])
    latent = {
        name: (std * rng.standard_normal(shape)).astype(f32) for name, shape, std in shapes(c)
    }
    ternary = {name: ternarize(w) for name, w in latent.items()}
    if c["seconds"] == 0:
        return ternary
    std = {name: s for name, _, s in shapes(c)}
    pieces = cut(documents, c["context"])
    pieces = [pieces[i] for i in rng.permutation(len(pieces))]
    held = min(64, max(1, len(pieces) // 10)) if len(pieces) > 3 else 0
    valid = [table(pieces[i : min(held, i + 16)]) for i in range(0, held, 16)]
    pieces = pieces[held:]
    doubt = 40.0 / (40.0 + sum(len(p) - 1 for p in pieces))
    rows = max(1, 768 // max(map(len, pieces)))
    state = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in latent.items()}
    best = (math.inf, ternary, latent["head"])
    stream = itertools.chain.from_iterable(rng.permutation(len(pieces)) for _ in itertools.count())
    looked, took = 0.0, 0.0
    for step in itertools.count(1):
        now = (time.perf_counter() - begin) / (0.9 * c["seconds"])
        stop = now + took > 1 or step > 20000
        if valid and (stop or now - looked > 0.05 or step == 1):
            looked = now
            best = min(
                best,
                (loss_of(ternary, c, valid), ternary, latent["head"]),
                key=lambda entry: entry[0],
            )
        if stop:
            break
        x, y = table([pieces[i] for i in itertools.islice(stream, rows)])
        logits, pullback = network(
            {name: dequantize(*pair) for name, pair in ternary.items()}, c, x
        )
        real = (y >= 0)[..., None]
        goal = f32(1 - doubt) * (np.arange(c["vocab"]) == y[..., None]) + f32(doubt / c["vocab"])
        grads = pullback(((np.exp(log_softmax(logits)) - goal) * real / real.sum()).astype(f32))
        rate = 0.1 * min(1.0, step / 20) * max(0.05, 1 - now)
        for name, grad in grads.items():
            state[name], move = adam(state[name], grad, step)
            latent[name] = latent[name] - f32(rate * std[name]) * move
        ternary = {name: ternarize(w) for name, w in latent.items()}
        took = (time.perf_counter() - begin) / (0.9 * c["seconds"]) - now
    if not valid:
        return ternary
    _, ternary, head = best
    factor = min(
        (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25), key=lambda f: loss_of(ternary, c, valid, f)
    )
    return {**ternary, "head": ternarize(head * f32(factor))}
