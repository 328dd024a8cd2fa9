"""Ternary weights: quantise, pack, split documents, train.

The backward pass is written with coroutines: a layer is a generator that yields its output, is sent the
gradient of that output, puts the gradients of its weights into a dict and yields that of its input.
"""
import hashlib
import math
import time
from itertools import repeat
from operator import index

import numpy as np

GROUP = 128
LARGEST = float(np.finfo(np.float16).max)


# ---------------------------------------------------------------------------------- quantiser
def _size(value, name, least):
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer")
    number = index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}")
    return number


def _grouped(array, group_size):
    """(..., n) -> (..., groups, width), filled with zeros behind a row's end."""
    n = array.shape[-1]
    width = max(1, min(group_size, n))
    groups = -(-n // width)
    full = np.zeros((*array.shape[:-1], groups * width), array.dtype)
    full[..., :n] = array
    return full.reshape(*array.shape[:-1], groups, width)


def _best_scales(groups):
    """The scale with the smallest squared error of every group (..., width), and its smallest kept |w|."""
    sizes = np.abs(groups).astype(np.float64)
    _, exponent = np.frexp(sizes.max(axis=-1, keepdims=True))
    sizes = np.ldexp(sizes, -exponent)  # now at most 1, so that no sum overflows
    falling = -np.sort(-sizes, axis=-1)
    totals = np.cumsum(falling, axis=-1)
    counts = np.arange(1, falling.shape[-1] + 1)
    best = (totals * totals / counts).argmax(axis=-1)[..., None]
    with np.errstate(over="ignore"):
        scales = np.ldexp(np.take_along_axis(totals, best, -1) / (best + 1), exponent)
    return sizes, np.take_along_axis(falling, best, -1), scales


def _ternarize(w, group_size):
    groups = _grouped(w, group_size)
    if groups.size == 0:
        return np.zeros(w.shape, np.int8), np.zeros(groups.shape[:-1], np.float16)
    sizes, smallest, scales = _best_scales(groups)
    scales = np.minimum(scales, LARGEST).astype(np.float16)
    kept = (sizes >= smallest) & (scales > 0)
    codes = np.sign(groups).astype(np.int8) * kept
    return codes.reshape(*w.shape[:-1], -1)[..., : w.shape[-1]].copy(), scales[..., 0]


def ternarize(w, group_size=128):
    w = np.asarray(w)
    group_size = _size(group_size, "group_size", 1)
    if w.dtype.type not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("w must have an axis")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    return _ternarize(w, group_size)


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes must have an axis")
    if ((codes < -1) | (codes > 1)).any():
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=128):
    codes, scales = _checked_codes(codes), np.asarray(scales)
    group_size = _size(group_size, "group_size", 1)
    if not np.issubdtype(scales.dtype, np.floating):
        raise TypeError("scales must be floating-point")
    n = codes.shape[-1]
    if scales.shape != (*codes.shape[:-1], -(-n // group_size)):
        raise ValueError("the scales' shape does not fit the codes")
    spread = scales.astype(np.float32)[..., np.arange(n) // group_size]
    return codes * spread


# ------------------------------------------------------------------------------------ packing
def pack(codes):
    codes = _checked_codes(codes)
    n = codes.shape[-1]
    places = np.ones((*codes.shape[:-1], -(-n // 4) * 4), np.uint8)
    places[..., :n] = codes + 1
    return places[..., 0::4] | places[..., 1::4] << 2 | places[..., 2::4] << 4 | places[..., 3::4] << 6


def unpack(packed, shape):
    packed = np.asarray(packed)
    shape = tuple(_size(length, "a length", 0) for length in shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed must be uint8")
    if not shape or packed.shape != (*shape[:-1], -(-shape[-1] // 4)):
        raise ValueError("the packed data do not fit the shape")
    places = (packed[..., None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    places = places.reshape(*packed.shape[:-1], packed.shape[-1] * 4)[..., : shape[-1]]
    if (places == 3).any():
        raise ValueError("a place with both bits set")
    return places.astype(np.int8) - np.int8(1)


# -------------------------------------------------------------------------------------- split
def _tokens(document):
    tokens = [index(token) for token in document]
    if any(token < 0 for token in tokens):
        raise ValueError("token ids must not be negative")
    return tokens


def _fingerprint(document):
    """A number in 0 ... 2^64 - 1 that hangs on the tokens alone."""
    text = " ".join(str(int(token)) for token in _tokens(document))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split(documents, fraction):
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must lie in 0 ... 1")
    sides = ([], [])
    for name, document in enumerate(documents):
        sides[_fingerprint(document) < float(fraction) * 2**64].append(name)
    return sides


# ----------------------------------------------------------------------- layers as coroutines
def _start(layer):
    """Run a layer forward: its output and the function that runs it backward."""
    return next(layer), layer.send


def _norm(x):
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    y = x * inverse
    dy = yield y
    yield inverse * (dy - y * (dy * y).mean(-1, keepdims=True))


def _linear(x, name, weights, grads):
    w = weights[name]
    dy = yield x @ w.T
    grads[name] = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    yield dy @ w


def _attend(q, k, v, heads):
    batch, length, dim = q.shape

    def to_heads(x):
        return x.reshape(batch, length, heads, dim // heads).transpose(0, 2, 1, 3)

    def from_heads(x):
        return x.transpose(0, 2, 1, 3).reshape(batch, length, dim)

    q, k, v = to_heads(q), to_heads(k), to_heads(v)
    root = 1 / math.sqrt(dim // heads)
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    back = np.arange(length)[:, None] - np.arange(length)
    bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf).astype(q.dtype)
    scores = q @ k.swapaxes(-1, -2) * root + bias
    scores -= scores.max(-1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(-1, keepdims=True)
    dout = to_heads((yield from_heads(p @ v)))
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * root
    yield from_heads(ds @ k), from_heads(ds.swapaxes(-1, -2) @ q), from_heads(p.swapaxes(-1, -2) @ dout)


def _attention(x, layer, heads, weights, grads):
    a, norm_back = _start(_norm(x))
    (q, q_back), (k, k_back), (v, v_back) = (
        _start(_linear(a, f"{layer}.{part}", weights, grads)) for part in "qkv"
    )
    mixed, mix_back = _start(_attend(q, k, v, heads))
    out, out_back = _start(_linear(mixed, f"{layer}.o", weights, grads))
    dy = yield x + out
    dq, dk, dv = mix_back(out_back(dy))
    yield dy + norm_back(q_back(dq) + k_back(dk) + v_back(dv))


def _mlp(x, layer, weights, grads):
    a, norm_back = _start(_norm(x))
    up, up_back = _start(_linear(a, f"{layer}.up", weights, grads))
    out, down_back = _start(_linear(np.maximum(up, 0), f"{layer}.down", weights, grads))
    dy = yield x + out
    yield dy + norm_back(up_back(down_back(dy) * (up > 0)))


def _model(tokens, layers, heads, weights, grads):
    x = weights["embedding"][tokens]
    backs = []
    for i in range(layers):
        x, back = _start(_attention(x, f"layers.{i}", heads, weights, grads))
        backs.append(back)
        x, back = _start(_mlp(x, f"layers.{i}", weights, grads))
        backs.append(back)
    x, back = _start(_norm(x))
    backs.append(back)
    logits, back = _start(_linear(x, "head", weights, grads))
    dx = back((yield logits))
    while backs:
        dx = backs.pop()(dx)
    grad = np.zeros_like(weights["embedding"])
    np.add.at(grad, tokens, dx)
    grads["embedding"] = grad
    yield None


def _log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _loss_gradient(logits, targets, smoothing):
    """Mean cross entropy of targets (-1: none) against smoothed labels, and its gradient."""
    logp = _log_softmax(logits)
    there = targets >= 0
    count = max(1, there.sum())
    rows = np.nonzero(there)
    vocab = logits.shape[-1]
    picked = logp[(*rows, targets[rows])]
    loss = -((1 - smoothing) * picked.sum() + smoothing * logp[rows].mean(-1).sum()) / count
    grad = np.exp(logp) - smoothing / vocab
    grad[(*rows, targets[rows])] -= 1 - smoothing
    grad *= (there / count)[..., None]
    return loss, grad.astype(logits.dtype)


# ----------------------------------------------------------------------------------- training
def _shapes(vocab, dim, layers):
    shapes = {"embedding": (vocab, dim)}
    for i in range(layers):
        shapes.update({f"layers.{i}.{part}": (dim, dim) for part in "qkvo"})
        shapes[f"layers.{i}.up"] = (4 * dim, dim)
        shapes[f"layers.{i}.down"] = (dim, 4 * dim)
    return {**shapes, "head": (vocab, dim)}


def _starting_weights(config):
    rng = np.random.default_rng(config["seed"])
    weights = {}
    for name, shape in _shapes(config["vocab"], config["dim"], config["layers"]).items():
        spread = 1.0 if name == "embedding" else 1 / math.sqrt(shape[1])
        weights[name] = (rng.standard_normal(shape) * spread).astype(np.float32)
    return weights


def _seen(weights):
    """What the model computes with: the weights as they come out of the quantiser."""
    return {name: dequantize(*_ternarize(w, GROUP), GROUP) for name, w in weights.items()}


def _checked_config(config):
    least = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}
    for name in (*least, "seconds"):
        if name not in config:
            raise ValueError(f"config lacks {name}")
    checked = {name: _size(config[name], name, low) for name, low in least.items()}
    seconds = config["seconds"]
    if not 0 <= seconds < math.inf:
        raise ValueError("seconds is out of range")
    if checked["dim"] % checked["heads"]:
        raise ValueError("dim must be divisible by heads")
    return {**checked, "seconds": float(seconds)}


def _checked_documents(documents, vocab):
    documents = [_tokens(document) for document in documents]
    if any(max(document, default=0) >= vocab for document in documents):
        raise ValueError("a token id is not in the vocabulary")
    if all(len(document) < 2 for document in documents):
        raise ValueError("no token has a successor")
    return documents


def _windows(documents, length):
    """Pieces of at most `length` + 1 tokens in which every token with a predecessor is predicted once."""
    return [
        document[start : start + length + 1]
        for document in documents
        for start in range(0, len(document) - 1, length)
    ]


def _batch(pieces):
    """Inputs and targets (-1: nothing to predict) of equal length."""
    length = max(map(len, pieces)) - 1
    inputs = np.zeros((len(pieces), length), np.int64)
    targets = np.full((len(pieces), length), -1)
    for row, piece in enumerate(pieces):
        inputs[row, : len(piece) - 1] = piece[:-1]
        targets[row, : len(piece) - 1] = piece[1:]
    return inputs, targets


def _batches(pieces, size):
    """Batches of pieces of like length, so that little is filled up."""
    pieces = sorted(pieces, key=len)
    return [_batch(pieces[i : i + size]) for i in range(0, len(pieces), size)]


TEMPERATURES = 2.0 ** np.arange(-8, 1.01, 0.25)


def _heldout_losses(weights, batches, config):
    """Mean loss on the batches for every factor of the head.

    Few held-out tokens are joined by some imagined ones, whose targets are drawn evenly, lest a lucky guess
    on a handful of tokens makes the model sure of itself.
    """
    total, even, count = np.zeros(TEMPERATURES.size), np.zeros(TEMPERATURES.size), 0
    for inputs, targets in batches:
        logits = next(_model(inputs, config["layers"], config["heads"], weights, {}))
        rows = np.nonzero(targets >= 0)
        logits, wanted = logits[rows], targets[rows]
        for i, factor in enumerate(TEMPERATURES):
            logp = _log_softmax(logits * np.float32(factor))
            total[i] -= logp[np.arange(wanted.size), wanted].sum()
            even[i] -= logp.mean(-1).sum()
        count += wanted.size
    imagined = 16 * max(0.0, 1 - count / 120)
    return (total + imagined * even / count) / (count + imagined)


def _step(weights, moments, number, rates, batch, config):
    """One step of Adam; the gradient of the quantised weights is taken for that of the weights."""
    grads = {}
    logits, back = _start(_model(batch[0], config["layers"], config["heads"], _seen(weights), grads))
    back(_loss_gradient(logits, batch[1], config["smoothing"])[1])
    size = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    for name, grad in grads.items():
        grad = grad * min(1.0, 1.0 / (size + 1e-12))
        first, second = moments[name]
        first += 0.1 * (grad - first)
        second += 0.02 * (grad * grad - second)
        move = first / (1 - 0.9**number) / (np.sqrt(second / (1 - 0.98**number)) + 1e-8)
        weights[name] -= np.float32(rates[name]) * move


def _plan(documents, config):
    """Training pieces, held-out batches and the number of pieces in a training batch."""
    per_token = sum(math.prod(shape) for shape in _shapes(config["vocab"], config["dim"], config["layers"]).values())
    tokens = int(min(1024, max(32, 2e9 * max(config["seconds"], 0.5) / 3 / (6 * per_token))))
    length = min(config["context"], max(tokens, 16))
    useful = [document for document in documents if len(document) > 1]
    train_ids, valid_ids = split(useful, 0.12)
    if train_ids and valid_ids:
        pieces = _windows([useful[i] for i in train_ids], length)
        heldout = _windows([useful[i] for i in valid_ids], length)
    else:
        everything = _windows(useful, length)
        distinct = sorted(set(map(tuple, everything)))
        heldout = [list(piece) for piece in distinct[8::8]]
        hidden = set(map(tuple, heldout))
        pieces = [piece for piece in everything if tuple(piece) not in hidden]
    typical = sum(map(len, pieces)) / len(pieces)
    size = max(1, int(tokens / typical))
    room = max(1, 8 * tokens // max(map(len, heldout), default=1))
    return pieces, _batches(heldout[:room], size), size


def _stream(pieces, size, rng):
    """Training batches without end, in a new order every time around."""
    for _ in repeat(None):
        order = rng.permutation(len(pieces))
        for i in range(0, len(order), size):
            yield _batch([pieces[j] for j in order[i : i + size]])


def _fit(documents, config, weights, begin):
    pieces, heldout, size = _plan(documents, config)
    rng = np.random.default_rng([config["seed"], 1])
    stream = _stream(pieces, size, rng)
    config = {**config, "smoothing": 0.02 if heldout else 0.35}
    moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in weights.items()}
    spread = {name: float(w.std()) + 1e-3 for name, w in weights.items()}
    limit = math.inf if heldout else 60
    best, kept, factor, number, looked, patience = math.inf, None, 1.0, 0, 0.0, 0
    share = 0.0
    slowest = 0.0
    while share < 1 and number < limit and patience < 40:
        number += 1
        before = time.monotonic()
        progress = share if limit == math.inf else max(share, number / limit)
        pace = 0.06 * min(1, number / 20) * (1 - progress) + 0.0005
        _step(weights, moments, number, {n: pace * s for n, s in spread.items()}, next(stream), config)
        now = time.monotonic()
        slowest = max(slowest, now - before)
        share = (now - begin + 1.5 * slowest) / (0.95 * config["seconds"])
        if heldout and (share >= 1 or share - looked > 0.04):
            looked = share
            losses = _heldout_losses(_seen(weights), heldout, config)
            slowest = max(slowest, time.monotonic() - now)
            patience += 1
            if losses.min() < best:
                best, factor, patience = losses.min(), TEMPERATURES[losses.argmin()], 0
                kept = {name: w.copy() for name, w in weights.items()}
    weights = kept or weights
    weights["head"] = weights["head"] * np.float32(factor)
    return weights


def train(documents, config):
    begin = time.monotonic()
    config = _checked_config(config)
    documents = _checked_documents(documents, config["vocab"])
    weights = _starting_weights(config)
    if config["seconds"] > 0:
        weights = _fit(documents, config, weights, begin)
    return {name: _ternarize(w, GROUP) for name, w in weights.items()}
