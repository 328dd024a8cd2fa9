"""Ternary weights: quantise, pack, split documents, train.

The trainer keeps all tensors whose rows are `dim` wide in one stacked matrix, so that quantising, Adam and the
straight-through gradient are each a handful of NumPy calls a step; `down` is a second such matrix.
"""

import hashlib
import math
import numbers
import operator
import time
import zlib

import numpy as np

LARGEST_HALF = 65504.0
MAGNITUDE_CAP = 2.0**900  # beyond any float16 scale; sums of capped magnitudes cannot overflow
THRESHOLD = 0.7
BLOCK = 1 << 16  # weights quantised at a time


# ---------------------------------------------------------------- quantiser

def _group_size(value):
    size = operator.index(value)
    if size < 1:
        raise ValueError("group_size must be at least 1")
    return size


def _quantise_groups(groups):
    """Codes and scales of contiguous groups (G, g), g >= 1: one row is one whole group."""
    magnitude = np.abs(groups, dtype=np.float64)
    if not magnitude.max(initial=0.0) < np.inf:
        raise ValueError("w holds NaN or infinity")
    np.minimum(magnitude, MAGNITUDE_CAP, out=magnitude)
    mean = magnitude.sum(axis=1) / groups.shape[1]
    chosen = magnitude > THRESHOLD * mean[:, None]
    count = chosen.sum(axis=1)
    magnitude *= chosen
    scale = magnitude.sum(axis=1) / np.maximum(count, 1)
    scale = np.minimum(scale, LARGEST_HALF).astype(np.float16)
    chosen &= (scale > 0)[:, None]
    codes = chosen.view(np.int8)
    np.negative(codes, out=codes, where=groups < 0)
    return codes, scale


def _quantise_rows(groups):
    """Codes (G, g) and scales (G,) of groups (G, g), block by block."""
    codes, scales = np.empty(groups.shape, np.int8), np.empty(groups.shape[0], np.float16)
    step = max(1, BLOCK // groups.shape[1])
    for start in range(0, groups.shape[0], step):
        part = slice(start, start + step)
        codes[part], scales[part] = _quantise_groups(np.ascontiguousarray(groups[part]))
    return codes, scales


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    if w.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"w has dtype {w.dtype}")
    if w.ndim == 0:
        raise ValueError("w needs an axis")
    width = w.shape[-1]
    size = min(_group_size(group_size), max(width, 1))
    codes = np.zeros(w.shape, np.int8)
    scales = np.zeros((*w.shape[:-1], -(-width // size)), np.float16)
    if w.size == 0:
        return codes, scales

    rows = w.reshape(-1, width)
    whole = width - width % size
    body = _quantise_rows(rows[:, :whole].reshape(-1, size))
    if whole == width:
        return body[0].reshape(codes.shape), body[1].reshape(scales.shape)
    tail = _quantise_rows(rows[:, whole:])
    flat_codes, flat_scales = codes.reshape(-1, width), scales.reshape(rows.shape[0], -1)
    flat_codes[:, :whole], flat_codes[:, whole:] = body[0].reshape(-1, whole), tail[0]
    flat_scales[:, :-1], flat_scales[:, -1] = body[1].reshape(rows.shape[0], -1), tail[1]
    return codes, scales


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes need an axis")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("a code is not -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes = _checked_codes(codes)
    scales = np.asarray(scales)
    width = codes.shape[-1]
    size = min(_group_size(group_size), max(width, 1))
    if not np.issubdtype(scales.dtype, np.floating):
        raise TypeError("scales must be floating point")
    if scales.shape != (*codes.shape[:-1], -(-width // size)):
        raise ValueError("scales do not fit the codes")
    spread = np.repeat(scales.astype(np.float32), size, axis=-1)[..., :width]
    return codes * spread


# ---------------------------------------------------------------- packing

def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _checked_codes(codes)
    width = codes.shape[-1]
    octets = -(-width // 4)
    digits = np.ones((*codes.shape[:-1], 4 * octets), np.uint8)
    np.add(codes, 1, out=digits[..., :width].view(np.int8))
    quads = digits.view("<u4")
    quads = quads | quads >> 6
    return (quads | quads >> 12).astype(np.uint8)


_DIGITS = ((np.arange(256)[:, None] >> np.array([0, 2, 4, 6])) & 3).astype(np.int8) - np.int8(1)


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    shape = tuple(operator.index(length) for length in shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    if not shape or min(shape) < 0 or packed.shape != (*shape[:-1], -(-shape[-1] // 4)):
        raise ValueError("the packed bytes do not fit the shape")
    codes = _DIGITS[packed].reshape(*shape[:-1], 4 * packed.shape[-1])[..., :shape[-1]]
    if codes.size and codes.max() > 1:
        raise ValueError("a place has both bits set")
    return np.ascontiguousarray(codes)


# ---------------------------------------------------------------- split

def _position(document, salt):
    """A number in [0, 1) that depends on the tokens alone."""
    tokens = [operator.index(token) for token in document]
    if any(token < 0 for token in tokens):
        raise ValueError("a token id is negative")
    text = ",".join(format(token, "x") for token in tokens)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=salt).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not isinstance(fraction, numbers.Real):
        raise TypeError("fraction must be a number")
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must lie between 0 and 1")
    sides = ([], [])
    for place, document in enumerate(documents):
        sides[_position(document, b"split") < fraction].append(place)
    return sides


# ---------------------------------------------------------------- model

class Model:
    """Master weights, their ternary values, and Adam's moments, stacked by row width."""

    def __init__(self, config):
        self.vocab, self.dim, self.heads = config["vocab"], config["dim"], config["heads"]
        self.layers = config["layers"]
        dim, vocab = self.dim, self.vocab
        narrow = [("embedding", vocab, 0.5)]
        for layer in range(self.layers):
            narrow += [(f"layers.{layer}.{name}", dim, 1 / math.sqrt(dim)) for name in "qkv"]
            narrow.append((f"layers.{layer}.o", dim, 0.5 / math.sqrt(dim)))
            narrow.append((f"layers.{layer}.up", 4 * dim, 1 / math.sqrt(dim)))
        narrow.append(("head", vocab, 0.1 / math.sqrt(dim)))
        wide = [(f"layers.{layer}.down", dim, 0.25 / math.sqrt(dim)) for layer in range(self.layers)]
        self.places = {}
        self.masters, self.rates = [], []
        for stack, (tensors, width) in enumerate(((narrow, dim), (wide, 4 * dim))):
            total = sum(rows for _, rows, _ in tensors)
            master, rate = np.zeros((total, width), np.float32), np.zeros((total, 1), np.float32)
            start = 0
            for name, rows, std in tensors:
                part = slice(start, start + rows)
                rng = np.random.default_rng([config["seed"], zlib.crc32(name.encode())])
                master[part] = rng.normal(size=(rows, width)) * std
                rate[part] = max(std, 0.5 / math.sqrt(dim))
                self.places[name] = (stack, part)
                start += rows
            self.masters.append(master)
            self.rates.append(rate)
        self.first = [np.zeros_like(master) for master in self.masters]
        self.second = [np.zeros_like(master) for master in self.masters]
        self.steps = 0
        self.slopes = 2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads)
        self.values = None
        self.requantise()

    def requantise(self):
        self.values = [dequantize(*ternarize(master)) for master in self.masters]

    def tensor(self, stacks, name):
        stack, part = self.places[name]
        return stacks[stack][part]

    def qkv(self, stacks, layer):
        start = self.places[f"layers.{layer}.q"][1].start
        return stacks[0][start:start + 3 * self.dim]

    def answer(self, snapshot):
        return {name: ternarize(self.tensor(snapshot, name)) for name in self.places}

    def bias(self, length):
        """The scores' additive part (heads, T, T): distance penalties and the causal mask."""
        behind = np.arange(length)[:, None] - np.arange(length)
        bias = -self.slopes[:, None, None] * behind
        return np.where(behind >= 0, bias, -np.inf).astype(np.float32)

    def forward(self, ids):
        """Logits (B*T, V) of ids (B, T), and what the backward pass needs."""
        batch, length = ids.shape
        dim, heads = self.dim, self.heads
        width = dim // heads
        bias = self.bias(length)
        x = self.tensor(self.values, "embedding")[ids.reshape(-1)]
        tape = []
        for layer in range(self.layers):
            a, a_inv = _norm(x)
            mixed = (a @ self.qkv(self.values, layer).T).reshape(batch, length, 3, heads, width)
            q, k, v = np.ascontiguousarray(mixed.transpose(2, 0, 3, 1, 4))
            p = q @ k.swapaxes(-1, -2)
            p *= np.float32(1 / math.sqrt(width))
            p += bias
            p -= p.max(axis=-1, keepdims=True)
            np.exp(p, out=p)
            p /= p.sum(axis=-1, keepdims=True)
            joined = (p @ v).transpose(0, 2, 1, 3).reshape(-1, dim)
            x = x + joined @ self.tensor(self.values, f"layers.{layer}.o").T
            m, m_inv = _norm(x)
            hidden = m @ self.tensor(self.values, f"layers.{layer}.up").T
            np.maximum(hidden, 0, out=hidden)
            x = x + hidden @ self.tensor(self.values, f"layers.{layer}.down").T
            tape.append((a, a_inv, q, k, v, p, joined, m, m_inv, hidden))
        final, final_inv = _norm(x)
        return final @ self.tensor(self.values, "head").T, (tape, final, final_inv)

    def backward(self, ids, d_logits, saved):
        """The gradients of the ternary values, stacked as the masters are."""
        tape, final, final_inv = saved
        batch, length = ids.shape
        dim, heads = self.dim, self.heads
        width = dim // heads
        grads = [np.empty_like(master) for master in self.masters]

        def put(name, value):
            self.tensor(grads, name)[...] = value

        put("head", d_logits.T @ final)
        dx = _norm_backward(d_logits @ self.tensor(self.values, "head"), final, final_inv)
        for layer in reversed(range(self.layers)):
            a, a_inv, q, k, v, p, joined, m, m_inv, hidden = tape[layer]
            put(f"layers.{layer}.down", dx.T @ hidden)
            dh = dx @ self.tensor(self.values, f"layers.{layer}.down")
            dh *= hidden > 0
            put(f"layers.{layer}.up", dh.T @ m)
            dx = dx + _norm_backward(dh @ self.tensor(self.values, f"layers.{layer}.up"), m, m_inv)
            put(f"layers.{layer}.o", dx.T @ joined)
            dj = dx @ self.tensor(self.values, f"layers.{layer}.o")
            dj = dj.reshape(batch, length, heads, width).transpose(0, 2, 1, 3)
            dp = dj @ v.swapaxes(-1, -2)
            dp -= (dp * p).sum(axis=-1, keepdims=True)
            dp *= p
            dp *= np.float32(1 / math.sqrt(width))
            d_mixed = np.stack([dp @ k, dp.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dj])
            d_mixed = d_mixed.transpose(1, 3, 0, 2, 4).reshape(batch * length, 3 * dim)
            self.qkv(grads, layer)[...] = d_mixed.T @ a
            dx = dx + _norm_backward(d_mixed @ self.qkv(self.values, layer), a, a_inv)
        d_embedding = np.zeros((self.vocab, dim), np.float32)
        np.add.at(d_embedding, ids.reshape(-1), dx)
        put("embedding", d_embedding)
        return grads

    def update(self, grads, rate):
        """One step of Adam on the masters, straight through the quantiser."""
        self.steps += 1
        norm = math.sqrt(sum(float(np.vdot(grad, grad)) for grad in grads))
        if not math.isfinite(norm):
            return
        clip = np.float32(min(1.0, 1.0 / (norm + 1e-12)))
        for master, scale, grad, first, second in zip(self.masters, self.rates, grads, self.first, self.second):
            grad *= clip
            first += np.float32(0.1) * (grad - first)
            second += np.float32(0.02) * (grad * grad - second)
            bias_1, bias_2 = 1 - 0.9**self.steps, 1 - 0.98**self.steps
            step = first / (np.sqrt(second / np.float32(bias_2)) + np.float32(1e-8))
            master -= scale * np.float32(rate / bias_1) * step
        self.requantise()


def _norm(x):
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return x * inverse, inverse


def _norm_backward(dy, y, inverse):
    return (dy - y * np.mean(dy * y, axis=-1, keepdims=True)) * inverse


# ---------------------------------------------------------------- training

LIMITS = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}
LONGEST_WINDOW = 512


def _checked_config(config):
    checked = {}
    for name, least in LIMITS.items():
        if name not in config:
            raise ValueError(f"config lacks {name}")
        checked[name] = operator.index(config[name])
        if checked[name] < least:
            raise ValueError(f"{name} must be at least {least}")
    if "seconds" not in config:
        raise ValueError("config lacks seconds")
    seconds = config["seconds"]
    if not isinstance(seconds, numbers.Real):
        raise TypeError("seconds must be a number")
    if not 0 <= seconds < math.inf:
        raise ValueError("seconds is out of range")
    if checked["dim"] % checked["heads"]:
        raise ValueError("dim must be divisible by heads")
    return {**checked, "seconds": float(seconds)}


def _checked_documents(documents, vocab):
    checked = []
    for document in documents:
        tokens = [operator.index(token) for token in document]
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            raise ValueError("a token id is outside the vocabulary")
        checked.append(tokens)
    if not any(len(tokens) > 1 for tokens in checked):
        raise ValueError("no token has a successor")
    return checked


def _windows(documents, context):
    """Pieces of at most context + 1 tokens; every pair of neighbours lies in exactly one piece."""
    stride = min(context, LONGEST_WINDOW)
    pieces = []
    for tokens in documents:
        for start in range(0, len(tokens) - 1, stride):
            pieces.append(np.array(tokens[start:start + stride + 1], dtype=np.int64))
    return pieces


def _padded(pieces):
    """(ids, targets, weights) of some pieces, padded at the end."""
    length = max(piece.size for piece in pieces) - 1
    ids = np.zeros((len(pieces), length), np.int64)
    targets = np.zeros((len(pieces), length), np.int64)
    weights = np.zeros((len(pieces), length), np.float32)
    for row, piece in enumerate(pieces):
        ids[row, :piece.size - 1] = piece[:-1]
        targets[row, :piece.size - 1] = piece[1:]
        weights[row, :piece.size - 1] = 1
    return ids, targets.reshape(-1), weights.reshape(-1)


def _batches(pieces, tokens):
    """Cut the pieces into runs of about `tokens` padded tokens each."""
    run, longest = [], 0
    for piece in pieces:
        longest = max(longest, piece.size - 1)
        if run and (len(run) + 1) * longest > tokens:
            yield run
            run, longest = [], piece.size - 1
        run.append(piece)
    if run:
        yield run


def _held_out(documents):
    """Split off some of the documents, by content, for choosing the moment to stop."""
    usable = [tokens for tokens in documents if len(tokens) > 1]
    places = [_position(tokens, b"stop") for tokens in usable]
    distinct = sorted(set(places))
    repetitive = len(distinct) < 32 and len(usable) >= 4 * len(distinct)
    if len(distinct) < 8 or repetitive:
        return usable, []
    share = min(60, max(4, len(distinct) // 8))
    held = [place < distinct[share] for place in places]
    keep = [tokens for tokens, out in zip(usable, held) if not out]
    away = [tokens for tokens, out in zip(usable, held) if out]
    return keep, away


def _softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return logits


def _loss(model, pieces, tokens):
    """Mean negative log-probability of the pieces' targets."""
    total = count = 0.0
    for run in _batches(pieces, tokens):
        ids, targets, weights = _padded(run)
        logits, _ = model.forward(ids)
        p = _softmax(logits)[np.arange(targets.size), targets]
        total -= float((np.log(np.maximum(p, 1e-30)) * weights).sum())
        count += float(weights.sum())
    return total / count


def _step(model, run, smoothing, rate):
    ids, targets, weights = _padded(run)
    logits, saved = model.forward(ids)
    gradient = _softmax(logits)
    gradient -= np.float32(smoothing / model.vocab)
    gradient[np.arange(targets.size), targets] -= np.float32(1 - smoothing)
    gradient *= (weights / weights.sum())[:, None]
    model.update(model.backward(ids, gradient, saved), rate)


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    began = time.monotonic()
    config = _checked_config(config)
    documents = _checked_documents(documents, config["vocab"])
    model = Model(config)
    best = [master.copy() for master in model.masters]
    seconds = config["seconds"]
    if seconds == 0:
        return model.answer(best)

    keep, away = _held_out(documents)
    pieces, judged = _windows(keep, config["context"]), _windows(away, config["context"])
    predictions = sum(piece.size - 1 for piece in pieces)
    smoothing = min(0.5, config["vocab"] / predictions) if judged else 0.5
    if not judged and predictions >= 50 * config["vocab"]:
        smoothing = 0.05
    size = int(min(384, max(64, 4e6 / config["vocab"])))
    judged = judged[:max(1, 4 * size // max((piece.size for piece in judged), default=1))]

    rng = np.random.default_rng([config["seed"], 1])
    best_loss, best_at = math.inf, 0.0
    next_look, slowest = 0.0, 0.0
    waiting = iter(())
    while True:
        before = time.monotonic() - began
        progress = before / seconds
        if model.steps and (before + slowest > 0.95 * seconds or progress - best_at > 0.5):
            break
        run = next(waiting, None)
        if run is None:
            order = rng.permutation(len(pieces))
            waiting = _batches([pieces[place] for place in order], size)
            run = next(waiting)
        rate = 0.08 * min(1.0, (model.steps + 1) / 20) * max(0.02, 1 - progress)
        _step(model, run, smoothing, rate)
        progress = (time.monotonic() - began) / seconds
        if judged and model.steps >= 5 and (progress >= next_look or progress > 0.93):
            loss = _loss(model, judged, 4 * size)
            if loss < best_loss:
                best_loss, best_at = loss, progress
                best = [master.copy() for master in model.masters]
            next_look = min(1.3 * progress, progress + 0.04)
        slowest = max(slowest, time.monotonic() - began - before)
        if not judged:
            best_at = progress
    if best_loss == math.inf:
        best = model.masters
    return model.answer(best)
