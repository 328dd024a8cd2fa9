"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md."""

import hashlib
import math
import numbers
import operator
import time

import numpy as np

GROUP_SIZE = 128
FLOAT16_MAX = 65504.0
NORM_EPS = 1e-6
BLOCK_ELEMENTS = 1 << 16      # elements that ternarize works on at a time
ENOUGH_VALIDATION = 64        # tokens to predict that make a trustworthy validation set
LONGEST_WINDOW = 256          # tokens that a training window may predict


# ---------------------------------------------------------------- small checks

def _as_int(value, name, minimum):
    """`value` as an int that is at least `minimum`; refuses bools and floats."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int") from None
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}")
    return value


def _as_number(value, name, low, high):
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}")
    return value


def _as_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim < 1:
        raise ValueError("codes need at least one axis")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return codes


# ---------------------------------------------------------------- quantiser

def _ternarize_groups(groups):
    """Codes and scales of the rows of `groups` (G, g), g >= 1.

    With the magnitudes sorted downwards, keeping the first j and giving them their mean removes
    (sum of the first j)^2 / j from the squared error; the best j is found by trying all of them.
    """
    magnitude = np.abs(groups.astype(np.float64))
    peak = magnitude.max(axis=1, keepdims=True)
    peak[peak == 0] = 1.0
    magnitude /= peak
    ordered = np.sort(magnitude, axis=1)[:, ::-1]
    kept_sum = np.cumsum(ordered, axis=1)
    kept_count = np.arange(1, groups.shape[1] + 1)
    best = np.argmax(kept_sum * kept_sum / kept_count, axis=1)[:, None]
    threshold = np.take_along_axis(ordered, best, axis=1)
    mean = np.take_along_axis(kept_sum, best, axis=1) / (best + 1)
    scale = np.minimum(mean * peak, FLOAT16_MAX)
    scale[threshold == 0] = 0.0
    scale = scale.astype(np.float16)
    positive = (magnitude >= threshold) & (groups > 0)
    negative = (magnitude >= threshold) & (groups < 0)
    codes = positive.astype(np.int8) - negative.astype(np.int8)
    codes *= scale > 0
    return codes, scale[:, 0]


def _ternarize_in_blocks(groups):
    """`_ternarize_groups`, a cache-sized block of rows at a time."""
    count, width = groups.shape
    codes = np.zeros((count, width), np.int8)
    scales = np.zeros(count, np.float16)
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, count, step):
        block = slice(start, start + step)
        codes[block], scales[block] = _ternarize_groups(groups[block])
    return codes, scales


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    group_size = _as_int(group_size, "group_size", 1)
    if w.dtype not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if w.ndim < 1:
        raise ValueError("w needs at least one axis")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    n = w.shape[-1]
    codes = np.zeros(w.shape, np.int8)
    scales = np.zeros(w.shape[:-1] + (-(-n // group_size),), np.float16)
    if w.size == 0:
        return codes, scales
    group_size = min(group_size, n)
    rows = w.reshape(-1, n)
    code_rows = codes.reshape(-1, n)
    scale_rows = scales.reshape(len(rows), -1)
    full = n // group_size
    body = full * group_size
    body_codes, body_scales = _ternarize_in_blocks(rows[:, :body].reshape(-1, group_size))
    code_rows[:, :body] = body_codes.reshape(len(rows), body)
    scale_rows[:, :full] = body_scales.reshape(len(rows), full)
    if body < n:
        code_rows[:, body:], scale_rows[:, full] = _ternarize_in_blocks(rows[:, body:])
    return codes, scales


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes = _as_codes(codes)
    scales = np.asarray(scales)
    group_size = _as_int(group_size, "group_size", 1)
    if scales.dtype != np.float16:
        raise TypeError("scales must be float16")
    n = codes.shape[-1]
    if scales.shape != codes.shape[:-1] + (-(-n // group_size),):
        raise ValueError("scales do not fit codes")
    spread = np.repeat(scales.astype(np.float32), min(group_size, max(n, 1)), axis=-1)
    return codes * spread[..., :n]


# ---------------------------------------------------------------- packing

def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _as_codes(codes)
    n = codes.shape[-1]
    width = -(-n // 4)
    places = np.ones(codes.shape[:-1] + (4 * width,), np.uint8)
    places[..., :n] = codes + 1
    packed = places[..., 0::4].copy()
    for place in (1, 2, 3):
        packed |= places[..., place::4] << np.uint8(2 * place)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError("packed must be uint8")
    shape = tuple(_as_int(length, "shape", 0) for length in shape)
    if not shape:
        raise ValueError("shape needs at least one axis")
    n = shape[-1]
    if packed.shape != shape[:-1] + (-(-n // 4),):
        raise ValueError("packed does not fit shape")
    codes = np.empty(packed.shape[:-1] + (4 * packed.shape[-1],), np.int8)
    for place in range(4):
        codes[..., place::4] = ((packed >> np.uint8(2 * place)) & np.uint8(3)).astype(np.int8) - 1
    codes = codes[..., :n].copy()
    if (codes > 1).any():
        raise ValueError("packed holds a place with both bits set")
    return codes


# ---------------------------------------------------------------- splitting

def _document_position(document):
    """A number in [0, 1) that depends on the tokens alone."""
    tokens = [_as_int(token, "token id", 0) for token in document]
    text = ",".join(format(token, "x") for token in tokens)
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2.0 ** 53


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    fraction = _as_number(fraction, "fraction", 0, 1)
    train_ids, valid_ids = [], []
    for index, document in enumerate(documents):
        side = valid_ids if _document_position(document) < fraction else train_ids
        side.append(index)
    return train_ids, valid_ids


# ---------------------------------------------------------------- the model

def _shapes(config):
    """Shape and starting deviation of every tensor."""
    vocab, dim = config["vocab"], config["dim"]
    unit = dim ** -0.5
    shapes = {"embedding": ((vocab, dim), 1.0)}
    for i in range(config["layers"]):
        for name in "qkvo":
            shapes[f"layers.{i}.{name}"] = ((dim, dim), unit)
        shapes[f"layers.{i}.up"] = ((4 * dim, dim), unit)
        shapes[f"layers.{i}.down"] = ((dim, 4 * dim), unit / 2)
    shapes["head"] = ((vocab, dim), unit / 2)
    return shapes


def _starting_weights(config):
    rng = np.random.default_rng(config["seed"])
    weights = {}
    for name, (shape, deviation) in _shapes(config).items():
        weights[name] = (deviation * rng.standard_normal(shape)).astype(np.float32)
    return weights


def _quantise_all(weights):
    return {name: ternarize(w, GROUP_SIZE) for name, w in weights.items()}


def _dequantise_all(tensors):
    return {name: dequantize(codes, scales, GROUP_SIZE) for name, (codes, scales) in tensors.items()}


def _position_bias(heads, length):
    """-slope * distance for the past, -infinity for the future: (heads, length, length)."""
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    distance = np.arange(length)[:, None] - np.arange(length)
    bias = np.where(distance >= 0, -slopes[:, None, None] * distance, -np.inf)
    return bias.astype(np.float32)


def _norm(x):
    inverse = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(NORM_EPS))
    return x * inverse, inverse


def _norm_backward(dy, y, inverse):
    return inverse * (dy - y * np.mean(dy * y, axis=-1, keepdims=True))


def _softmax(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def _split_heads(x, heads):
    batch, length, dim = x.shape
    return x.reshape(batch, length, heads, dim // heads).transpose(0, 2, 1, 3)


def _join_heads(x):
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def _forward(weights, layers, heads, tokens, bias):
    """Logits (B, T, vocab) and what the way back needs."""
    x = weights["embedding"][tokens]
    bias = bias[:, :tokens.shape[1], :tokens.shape[1]]
    factor = np.float32((x.shape[-1] // heads) ** -0.5)
    saved = []
    for i in range(layers):
        w = {name: weights[f"layers.{i}.{name}"] for name in ("q", "k", "v", "o", "up", "down")}
        a, a_inverse = _norm(x)
        q, k, v = (_split_heads(a @ w[name].T, heads) for name in "qkv")
        p = _softmax(q @ k.swapaxes(-1, -2) * factor + bias)
        mixed = _join_heads(p @ v)
        x = x + mixed @ w["o"].T
        b, b_inverse = _norm(x)
        hidden = np.maximum(b @ w["up"].T, 0)
        x = x + hidden @ w["down"].T
        saved.append((w, a, a_inverse, q, k, v, p, mixed, b, b_inverse, hidden))
    y, inverse = _norm(x)
    return y @ weights["head"].T, (saved, y, inverse, factor)


def _outer(dy, x):
    """Gradient of w in y = x w^T."""
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def _backward(weights, heads, tokens, cache, dlogits):
    """Gradients of all tensors."""
    saved, y, inverse, factor = cache
    grads = {"head": _outer(dlogits, y)}
    dx = _norm_backward(dlogits @ weights["head"], y, inverse)
    for i in reversed(range(len(saved))):
        w, a, a_inverse, q, k, v, p, mixed, b, b_inverse, hidden = saved[i]
        grads[f"layers.{i}.down"] = _outer(dx, hidden)
        dhidden = (dx @ w["down"]) * (hidden > 0)
        grads[f"layers.{i}.up"] = _outer(dhidden, b)
        dx = dx + _norm_backward(dhidden @ w["up"], b, b_inverse)
        grads[f"layers.{i}.o"] = _outer(dx, mixed)
        dmixed = _split_heads(dx @ w["o"], heads)
        dp = dmixed @ v.swapaxes(-1, -2)
        dv = p.swapaxes(-1, -2) @ dmixed
        dscores = p * (dp - np.sum(dp * p, axis=-1, keepdims=True)) * factor
        dq = dscores @ k
        dk = dscores.swapaxes(-1, -2) @ q
        da = np.zeros_like(a)
        for name, part in (("q", dq), ("k", dk), ("v", dv)):
            part = _join_heads(part)
            grads[f"layers.{i}.{name}"] = _outer(part, a)
            da += part @ w[name]
        dx = dx + _norm_backward(da, a, a_inverse)
    grads["embedding"] = np.zeros_like(weights["embedding"])
    np.add.at(grads["embedding"], tokens.reshape(-1), dx.reshape(-1, dx.shape[-1]))
    return grads


# ---------------------------------------------------------------- training

def _checked_config(config):
    if not isinstance(config, dict):
        raise TypeError("config must be a dict")
    checked = {}
    for name, minimum in (("vocab", 1), ("dim", 1), ("heads", 1), ("context", 1), ("layers", 0), ("seed", 0)):
        if name not in config:
            raise ValueError(f"config lacks {name}")
        checked[name] = _as_int(config[name], name, minimum)
    if "seconds" not in config:
        raise ValueError("config lacks seconds")
    checked["seconds"] = float(_as_number(config["seconds"], "seconds", 0, 60))
    if checked["dim"] % checked["heads"]:
        raise ValueError("dim must be divisible by heads")
    return checked


def _checked_documents(documents, vocab):
    """The documents in which a token has a successor, as lists of ints."""
    useful = []
    for document in documents:
        tokens = [_as_int(token, "token id", 0) for token in document]
        if tokens and max(tokens) >= vocab:
            raise ValueError("token id outside the vocabulary")
        if len(tokens) >= 2:
            useful.append(tokens)
    if not useful:
        raise ValueError("no token has a successor")
    return useful


def _windows(documents, context):
    """Pieces of at most context + 1 tokens that predict every token but each document's first once."""
    pieces = []
    for document in documents:
        for start in range(0, len(document) - 1, context):
            pieces.append(document[start:start + context + 1])
    return pieces


def _predicted(windows):
    return sum(len(window) - 1 for window in windows)


def _hold_out(documents, context, rng):
    """Training and validation windows; equal documents stay together."""
    distinct = sorted(set(map(tuple, documents)))
    if len(distinct) < 2:
        windows = _windows(documents, context)
        return windows, []
    rng.shuffle(distinct)
    count = min(max(1, len(distinct) // 10), 50)
    while 2 * (count + 1) <= len(distinct) and _predicted(distinct[:count]) < ENOUGH_VALIDATION:
        count += 1
    held = set(distinct[:count])
    training = [d for d in documents if tuple(d) not in held]
    return _windows(training, context), _windows(sorted(held), context)


def _batch(windows):
    """Inputs, targets and target weights, padded at the end."""
    length = max(map(len, windows)) - 1
    tokens = np.zeros((len(windows), length + 1), np.int64)
    mask = np.zeros((len(windows), length), np.float32)
    for row, window in enumerate(windows):
        tokens[row, :len(window)] = window
        mask[row, :len(window) - 1] = 1
    return tokens[:, :-1], tokens[:, 1:], mask


def _loss(weights, config, batch, bias):
    """Mean negative log-probability of the batch's targets."""
    inputs, targets, mask = batch
    logits, _ = _forward(weights, config["layers"], config["heads"], inputs, bias)
    p = np.take_along_axis(_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return float(-np.sum(np.log(np.maximum(p, 1e-30)) * mask) / mask.sum())


def _gradients(weights, config, batch, bias, smoothing):
    inputs, targets, mask = batch
    logits, cache = _forward(weights, config["layers"], config["heads"], inputs, bias)
    dlogits = _softmax(logits)
    dlogits -= np.float32(smoothing / config["vocab"])
    rows, columns = np.indices(targets.shape)
    dlogits[rows, columns, targets] -= np.float32(1 - smoothing)
    dlogits *= (mask / mask.sum())[..., None]
    return _backward(weights, config["heads"], inputs, cache, dlogits)


class _Adam:
    """Adam with decoupled decay; the step of a tensor is proportional to its starting deviation."""

    def __init__(self, deviations):
        self.deviations = deviations
        self.first = {}
        self.second = {}
        self.count = 0

    def step(self, weights, grads, rate, decay):
        self.count += 1
        correct_first = 1 - 0.9 ** self.count
        correct_second = 1 - 0.98 ** self.count
        for name, g in grads.items():
            m = self.first.setdefault(name, np.zeros_like(g))
            v = self.second.setdefault(name, np.zeros_like(g))
            m += 0.1 * (g - m)
            v += 0.02 * (g * g - v)
            update = (m / correct_first) / (np.sqrt(v / correct_second) + 1e-10)
            weights[name] *= 1 - rate * decay
            weights[name] -= np.float32(rate * self.deviations[name]) * update


def _clip(grads, limit=1.0):
    total = math.sqrt(sum(float(np.vdot(g, g)) for g in grads.values()))
    if total > limit:
        for g in grads.values():
            g *= limit / total


def _rate(progress):
    """Short rise, then a cosine down to nothing."""
    peak = 0.08
    return peak * min(1.0, progress / 0.04 + 0.02) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    started = time.perf_counter()
    config = _checked_config(config)
    documents = _checked_documents(documents, config["vocab"])
    weights = _starting_weights(config)
    best = _quantise_all(weights)
    seconds = config["seconds"]
    if seconds == 0:
        return best

    rng = np.random.default_rng([config["seed"], 1])
    context = min(config["context"], LONGEST_WINDOW)
    training, validation = _hold_out(documents, context, rng)
    longest = max(map(len, training + validation)) - 1
    bias = _position_bias(config["heads"], longest)
    batch_tokens = min(max((1 << 22) // config["vocab"], 64), 256)
    batch_rows = max(1, batch_tokens // longest)
    # With next to nothing to validate on, smoothing bounds what confidence can cost.
    smoothing = 0.5 if _predicted(validation) < ENOUGH_VALIDATION // 2 else 0.0
    checks = _batch(validation[:4 * batch_rows]) if validation else None

    adam = _Adam({name: deviation for name, (_, deviation) in _shapes(config).items()})
    best_loss = math.inf
    next_check = 0.1
    order = []
    while True:
        progress = (time.perf_counter() - started) / (0.93 * seconds)
        if progress >= 1 and adam.count > 0:
            break
        if len(order) < batch_rows:
            order = list(rng.permutation(len(training)))
        picked = [training[i] for i in order[:batch_rows]]
        order = order[batch_rows:]
        dense = _dequantise_all(_quantise_all(weights))
        grads = _gradients(dense, config, _batch(picked), bias, smoothing)
        _clip(grads)
        adam.step(weights, grads, _rate(progress), 0.02)
        if checks is not None and progress >= next_check:
            next_check = progress + 0.04
            candidate = _quantise_all(weights)
            loss = _loss(_dequantise_all(candidate), config, checks, bias)
            if loss < best_loss:
                best, best_loss = candidate, loss
    last = _quantise_all(weights)
    if checks is None or _loss(_dequantise_all(last), config, checks, bias) < best_loss:
        best = last
    return best
