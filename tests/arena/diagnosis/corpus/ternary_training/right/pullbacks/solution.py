"""Ternary weights: quantise, pack, split documents, train.

The training half is written as operations that return their value and a pullback: a function
that turns the gradient of the value into the gradients of the operands.
"""

import hashlib
import math
import numbers
import operator
import time

import numpy as np

GROUP = 128
FLOAT16_MAX = 65504.0
GROUPS_AT_A_TIME = 4096
NORM_EPS = 1e-6


# ---------------------------------------------------------------- quantiser

def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    group_size = _whole(group_size, "group_size", 1)
    if w.dtype not in (np.float32, np.float64):
        raise TypeError(f"w must be float32 or float64, not {w.dtype}")
    if w.ndim == 0:
        raise ValueError("w needs at least one axis")
    if not np.isfinite(w).all():
        raise ValueError("w contains NaN or infinity")
    n = w.shape[-1]
    codes = np.zeros(w.shape, dtype=np.int8)
    scales = np.zeros(w.shape[:-1] + (_ceil_div(n, group_size),), dtype=np.float16)
    full = n // group_size
    body = full * group_size
    if full and w.size:
        grouped = w.shape[:-1] + (full, group_size)
        part_codes, scales[..., :full] = _ternarize_groups(w[..., :body].reshape(grouped))
        codes[..., :body] = part_codes.reshape(w.shape[:-1] + (body,))
    if body < n and w.size:
        codes[..., body:], scales[..., full] = _ternarize_groups(w[..., body:])
    return codes, scales


def _ternarize_groups(groups):
    """Codes and scales of an array whose last axis is one group."""
    table = groups.reshape(-1, groups.shape[-1])
    codes = np.empty(table.shape, dtype=np.int8)
    scales = np.empty(len(table), dtype=np.float16)
    for start in range(0, len(table), GROUPS_AT_A_TIME):
        part = slice(start, start + GROUPS_AT_A_TIME)
        weights = table[part].astype(np.float64)
        scales[part] = _best_scales(np.abs(weights))
        codes[part] = _nearest_codes(weights, scales[part])
    return codes.reshape(groups.shape), scales.reshape(groups.shape[:-1])


def _best_scales(sizes):
    """The least squares scale of every row: the mean of its m largest, for the best m."""
    _, exponent = np.frexp(sizes.max(axis=1, keepdims=True))
    falling = -np.sort(-np.ldexp(sizes, -exponent), axis=1)
    counts = np.arange(1, sizes.shape[1] + 1)
    sums = np.cumsum(falling, axis=1)
    best = np.argmax(sums * sums / counts, axis=1)[:, None]
    scale = np.ldexp(np.take_along_axis(sums, best, axis=1) / (best + 1), exponent)
    return np.minimum(scale[:, 0], FLOAT16_MAX).astype(np.float16)


def _nearest_codes(weights, scales):
    """The nearest of -scale, 0 and scale, as a code; 0 where the scale is 0."""
    scale = scales.astype(np.float64)[:, None]
    nonzero = (np.abs(weights) > scale / 2) & (scale > 0)
    return np.sign(weights) * nonzero


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes, scales = _checked_codes(codes), np.asarray(scales)
    group_size = _whole(group_size, "group_size", 1)
    n = codes.shape[-1]
    expected = codes.shape[:-1] + (_ceil_div(n, group_size),)
    if scales.shape != expected:
        raise ValueError(f"scales must have shape {expected}, not {scales.shape}")
    if scales.dtype.kind != "f":
        raise TypeError(f"scales must be floats, not {scales.dtype}")
    group_of = np.arange(n) // group_size
    return codes.astype(np.float32) * scales.astype(np.float32)[..., group_of]


# ---------------------------------------------------------------- packing

def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _checked_codes(codes)
    n = codes.shape[-1]
    padded = np.ones(codes.shape[:-1] + (4 * _ceil_div(n, 4),), dtype=np.uint8)
    padded[..., :n] = codes + 1
    first, second, third, fourth = (padded[..., i::4] for i in range(4))
    return first | second << 2 | third << 4 | fourth << 6


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    shape = tuple(_whole(length, "shape", 0) for length in shape)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed must be uint8, not {packed.dtype}")
    if not shape or packed.shape != shape[:-1] + (_ceil_div(shape[-1], 4),):
        raise ValueError(f"packed of shape {packed.shape} does not fit {shape}")
    places = np.empty(packed.shape[:-1] + (4 * packed.shape[-1],), dtype=np.uint8)
    for i in range(4):
        places[..., i::4] = packed >> (2 * i) & 3
    places = places[..., :shape[-1]]
    if (places == 3).any():
        raise ValueError("a place has both bits set")
    return places.astype(np.int8) - np.int8(1)


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError(f"codes must be int8, not {codes.dtype}")
    if codes.ndim == 0:
        raise ValueError("codes need at least one axis")
    if ((codes < -1) | (codes > 1)).any():
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def _ceil_div(a, b):
    return -(-a // b)


def _whole(value, name, least):
    """value as an int that is at least `least`."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int")
    value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value


# ---------------------------------------------------------------- split

def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not isinstance(fraction, numbers.Real) or not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie in 0 .. 1, not {fraction!r}")
    sides = ([], [])
    for number, document in enumerate(documents):
        sides[_lot(document) < fraction].append(number)
    return sides


def _lot(document):
    """A number in [0, 1) drawn by the document's tokens."""
    text = ",".join(str(_whole(token, "token", 0)) for token in document)
    digest = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2.0 ** 53


# ---------------------------------------------------------------- operations with pullbacks

def _norm(x):
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + NORM_EPS)
    y = x * inverse

    def pullback(dy):
        return inverse * (dy - y * (dy * y).mean(axis=-1, keepdims=True))
    return y, pullback


def _linear(x, w):
    def pullback(dy):
        rows = dy.reshape(-1, dy.shape[-1])
        return dy @ w, rows.T @ x.reshape(-1, x.shape[-1])
    return x @ w.T, pullback


def _attention(q, k, v, heads):
    """Causal attention whose scores fall with distance, every head at its own slope."""
    batch, length, dim = q.shape
    width = dim // heads

    def to_heads(x):
        return x.reshape(batch, length, heads, width).transpose(0, 2, 1, 3)

    def from_heads(x):
        return x.transpose(0, 2, 1, 3).reshape(batch, length, dim)

    root = np.float32(1 / math.sqrt(width))
    q, k, v = to_heads(q), to_heads(k), to_heads(v)
    scores = q @ k.transpose(0, 1, 3, 2) * root + _distance_bias(heads, length)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)

    def pullback(dy):
        dy = to_heads(dy)
        dweights = dy @ v.transpose(0, 1, 3, 2)
        dweights -= (dweights * weights).sum(axis=-1, keepdims=True)
        dscores = dweights * weights * root
        dk = dscores.transpose(0, 1, 3, 2) @ q
        dv = weights.transpose(0, 1, 3, 2) @ dy
        return from_heads(dscores @ k), from_heads(dk), from_heads(dv)
    return from_heads(weights @ v), pullback


def _distance_bias(heads, length):
    slopes = 2.0 ** (-8.0 * (np.arange(heads) + 1) / heads)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    bias = -slopes[:, None, None] * distance
    return np.where(distance >= 0, bias, -np.inf).astype(np.float32)


def _layer(x, weights, prefix, heads):
    """One layer of the model; its pullback also writes the gradients of its weights."""
    a, norm_a = _norm(x)
    q, linear_q = _linear(a, weights[prefix + "q"])
    k, linear_k = _linear(a, weights[prefix + "k"])
    v, linear_v = _linear(a, weights[prefix + "v"])
    mixed, attention = _attention(q, k, v, heads)
    out, linear_o = _linear(mixed, weights[prefix + "o"])
    x = x + out
    b, norm_b = _norm(x)
    hidden, linear_up = _linear(b, weights[prefix + "up"])
    active = np.maximum(hidden, 0)
    out, linear_down = _linear(active, weights[prefix + "down"])

    def pullback(dx, grads):
        dactive, grads[prefix + "down"] = linear_down(dx)
        db, grads[prefix + "up"] = linear_up(dactive * (hidden > 0))
        dx = dx + norm_b(db)
        dmixed, grads[prefix + "o"] = linear_o(dx)
        dq, dk, dv = attention(dmixed)
        da_q, grads[prefix + "q"] = linear_q(dq)
        da_k, grads[prefix + "k"] = linear_k(dk)
        da_v, grads[prefix + "v"] = linear_v(dv)
        return dx + norm_a(da_q + da_k + da_v)
    return x + out, pullback


def _forward(weights, inputs, layers, heads):
    """Logits, and a pullback from their gradient to the gradients of all weights."""
    x = weights["embedding"][inputs]
    pullbacks = []
    for i in range(layers):
        x, pullback = _layer(x, weights, f"layers.{i}.", heads)
        pullbacks.append(pullback)
    y, norm_y = _norm(x)
    logits, linear_head = _linear(y, weights["head"])

    def pullback(dlogits):
        grads = {}
        dy, grads["head"] = linear_head(dlogits)
        dx = norm_y(dy)
        for back in reversed(pullbacks):
            dx = back(dx, grads)
        grads["embedding"] = np.zeros_like(weights["embedding"])
        np.add.at(grads["embedding"], inputs, dx)
        return grads
    return logits, pullback


def _loss(logits, targets, mask, smoothing):
    """Mean cross entropy (targets smoothed towards uniform) and the gradient of the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    count = mask.sum()
    picked = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    loss = -(picked * mask).sum() / count
    dlogits = np.exp(log_probs) - np.float32(smoothing / logits.shape[-1])
    b, t = np.indices(targets.shape)
    dlogits[b, t, targets] -= np.float32(1 - smoothing)
    return loss, dlogits * (mask / count)[..., None]


# ---------------------------------------------------------------- training

def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    begin = time.perf_counter()
    config = _checked_config(config)
    texts = _checked_documents(documents, config["vocab"])
    rng = np.random.default_rng(config["seed"])
    weights = _starting_weights(config, rng)
    if config["seconds"] > 0:
        weights = _Training(texts, config, weights, rng, begin).run()
    return {name: ternarize(w, GROUP) for name, w in weights.items()}


def _checked_config(config):
    least = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}
    for name in (*least, "seconds"):
        if name not in config:
            raise ValueError(f"config lacks {name}")
    checked = {name: _whole(config[name], name, low) for name, low in least.items()}
    seconds = config["seconds"]
    if not isinstance(seconds, numbers.Real) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds out of range: {seconds!r}")
    if checked["dim"] % checked["heads"]:
        raise ValueError("dim must be divisible by heads")
    return {**checked, "seconds": float(seconds)}


def _checked_documents(documents, vocab):
    """The documents that hold something to predict, after all tokens were checked."""
    for document in documents:
        for token in document:
            if _whole(token, "token", 0) >= vocab:
                raise ValueError(f"token {token} outside 0 .. {vocab - 1}")
    texts = [np.array(document, dtype=np.int64) for document in documents if len(document) > 1]
    if not texts:
        raise ValueError("no token has a successor")
    return texts


def _starting_weights(config, rng):
    dim, vocab = config["dim"], config["vocab"]
    shapes = {"embedding": (vocab, dim)}
    for i in range(config["layers"]):
        shapes.update({f"layers.{i}.{name}": (dim, dim) for name in "qkvo"})
        shapes[f"layers.{i}.up"] = (4 * dim, dim)
        shapes[f"layers.{i}.down"] = (dim, 4 * dim)
    shapes["head"] = (vocab, dim)
    spread = {name: 1 / math.sqrt(shape[1]) for name, shape in shapes.items()}
    spread["embedding"] = 0.3
    return {name: (spread[name] * rng.standard_normal(shape)).astype(np.float32)
            for name, shape in shapes.items()}


class _Training:
    """Adam on float weights behind a straight-through quantiser, the best held-out state wins."""

    RATE, BETAS, EPS = 0.02, (0.9, 0.98), 1e-8
    BATCH, WARM_UP, CHECK_EVERY = 12, 10, 25

    def __init__(self, texts, config, weights, rng, begin):
        self.config, self.weights, self.rng, self.begin = config, weights, rng, begin
        work = sum(w.size for w in weights.values()) * (config["context"] + 1)
        self.batch = max(1, min(self.BATCH, int(2e7 * config["seconds"] / work)))
        ids, held = split([text.tolist() for text in texts], 0.1)
        if len(texts) < 4 or not ids:
            ids, held = range(len(texts)), []
        elif not held:
            ids, held = ids[:-1], ids[-1:]
        self.texts = [texts[i] for i in ids]
        self.held = [texts[i][:config["context"] + 1] for i in held[:4 * self.batch]]
        self.smoothing = 0.4 if sum(len(text) - 1 for text in texts) < 300 else 0.01
        self.moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in weights.items()}

    def progress(self):
        return (time.perf_counter() - self.begin) / (0.95 * self.config["seconds"])

    def run(self):
        """The weights at the end of the time, or those that did best on held-out text."""
        best, least, step, longest = self.weights, math.inf, 0, 0.0
        while (progress := self.progress()) + longest < 1:
            self.step(step, progress)
            step += 1
            if self.held and step % self.CHECK_EVERY == 0:
                loss = self.held_out_loss()
                if loss < least:
                    best, least = {name: w.copy() for name, w in self.weights.items()}, loss
            longest = max(longest, self.progress() - progress)
        if not self.held or math.isinf(least) or self.held_out_loss() < least:
            return self.weights
        return best

    def step(self, step, progress):
        inputs, targets, mask = _batch(self.draw())
        config = self.config
        logits, pullback = _forward(self.quantised(), inputs, config["layers"], config["heads"])
        _, dlogits = _loss(logits, targets, mask, self.smoothing)
        grads = pullback(dlogits)
        rate = self.RATE * min(1, (step + 1) / self.WARM_UP) * (1 - progress)
        first_beta, second_beta = self.BETAS
        rate *= math.sqrt(1 - second_beta ** (step + 1)) / (1 - first_beta ** (step + 1))
        for name, w in self.weights.items():
            first, second = self.moments[name]
            first += (1 - first_beta) * (grads[name] - first)
            second += (1 - second_beta) * (grads[name] ** 2 - second)
            w -= np.float32(rate) * first / (np.sqrt(second) + self.EPS)

    def draw(self):
        """Some windows of at most context + 1 tokens, of documents drawn at random."""
        longest = self.config["context"] + 1
        windows = []
        for number in self.rng.integers(len(self.texts), size=self.batch):
            text = self.texts[number]
            start = int(self.rng.integers(max(0, len(text) - longest) + 1))
            windows.append(text[start:start + longest])
        return windows

    def quantised(self):
        return {name: dequantize(*ternarize(w, GROUP), GROUP) for name, w in self.weights.items()}

    def held_out_loss(self):
        inputs, targets, mask = _batch(self.held)
        logits, _ = _forward(self.quantised(), inputs, self.config["layers"], self.config["heads"])
        return _loss(logits, targets, mask, 0.0)[0]


def _batch(windows):
    """Inputs, targets and the mask of real targets; shorter windows are padded with token 0."""
    length = max(len(window) for window in windows) - 1
    inputs = np.zeros((len(windows), length), dtype=np.int64)
    targets = np.zeros_like(inputs)
    mask = np.zeros(inputs.shape, dtype=np.float32)
    for row, window in enumerate(windows):
        inputs[row, :len(window) - 1] = window[:-1]
        targets[row, :len(window) - 1] = window[1:]
        mask[row, :len(window) - 1] = 1
    return inputs, targets, mask
