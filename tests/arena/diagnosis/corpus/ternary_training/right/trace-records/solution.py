"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md.

The trainer keeps float weights, runs the model with their ternary values and passes the gradients
straight through. Each stage of the model returns a record of what its backward needs.
"""

import hashlib
import math
import time
from operator import index
from typing import NamedTuple

import numpy as np

GROUP = 128
LARGEST = float(np.finfo(np.float16).max)
EPS = np.float32(1e-6)


# --- quantising ---------------------------------------------------------------------------------


def _group_size(value):
    value = index(value)
    if value < 1:
        raise ValueError("group_size must be at least 1")
    return value


def _codes(codes):
    """An int8 array of -1, 0 and 1 with at least one axis."""
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes need an axis")
    if ((codes < -1) | (codes > 1)).any():
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def _ternarize_groups(groups):
    """Codes and scales of whole groups (..., size): one scale for each row of the last axis."""
    # Far above what float16 holds and far below what a sum in float64 cannot.
    sizes = np.minimum(np.abs(groups.astype(np.float64, order="C")), 1e300)
    chosen = sizes > 0.75 * sizes.mean(axis=-1, keepdims=True)
    count = np.maximum(chosen.sum(axis=-1), 1)
    means = np.where(chosen, sizes, 0.0).sum(axis=-1) / count
    scales = np.minimum(means, LARGEST).astype(np.float16)
    codes = np.sign(groups).astype(np.int8) * (chosen & (scales > 0)[..., None])
    return codes, scales


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    group_size = _group_size(group_size)
    if w.dtype.type not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("w needs an axis")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")

    lead, n = w.shape[:-1], w.shape[-1]
    whole = n // group_size
    cut = whole * group_size
    codes = np.zeros(w.shape, np.int8)
    scales = np.zeros((*lead, -(-n // group_size)), np.float16)
    if whole:
        groups = w[..., :cut].reshape(*lead, whole, group_size)
        parts, scales[..., :whole] = _ternarize_groups(groups)
        codes[..., :cut] = parts.reshape(*lead, cut)
    if cut < n:
        codes[..., cut:], scales[..., whole] = _ternarize_groups(w[..., cut:])
    return codes, scales


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes = _codes(codes)
    scales = np.asarray(scales)
    group_size = _group_size(group_size)
    n = codes.shape[-1]
    if scales.dtype != np.float16:
        raise TypeError("scales must be float16")
    if scales.shape != (*codes.shape[:-1], -(-n // group_size)):
        raise ValueError("scales do not fit the codes")
    spread = np.repeat(scales.astype(np.float32), min(group_size, max(n, 1)), axis=-1)
    return codes * spread[..., :n]


# --- packing ------------------------------------------------------------------------------------


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _codes(codes)
    lead, n = codes.shape[:-1], codes.shape[-1]
    width = -(-n // 4)
    places = np.ones((*lead, 4 * width), np.uint8)
    places[..., :n] = codes + np.int8(1)
    places = places.reshape(*lead, width, 4)
    packed = places[..., 0].copy()
    for slot in range(1, 4):
        packed |= places[..., slot] << np.uint8(2 * slot)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    shape = tuple(index(extent) for extent in shape)
    if not shape or min(shape) < 0 or packed.shape != (*shape[:-1], -(-shape[-1] // 4)):
        raise ValueError("the packed data does not fit the shape")
    places = np.empty((*packed.shape, 4), np.uint8)
    for slot in range(4):
        places[..., slot] = (packed >> np.uint8(2 * slot)) & np.uint8(3)
    places = places.reshape(*packed.shape[:-1], 4 * packed.shape[-1])[..., : shape[-1]]
    if (places == 3).any():
        raise ValueError("a place has both bits set")
    return places.astype(np.int8) - np.int8(1)


# --- splitting ----------------------------------------------------------------------------------


def _draw(tokens, purpose):
    """A number in [0, 1) that only the tokens and the purpose decide."""
    text = purpose + ":" + ",".join(hex(token) for token in tokens)
    digest = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2.0**53


def _tokens(document):
    """A document's tokens as a tuple of non-negative Python ints."""
    tokens = tuple(map(index, document))
    if tokens and min(tokens) < 0:
        raise ValueError("token ids must not be negative")
    return tokens


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must lie between 0 and 1")
    sides = ([], [])
    for place, document in enumerate(documents):
        sides[_draw(_tokens(document), "split") < fraction].append(place)
    return sides


# --- the model ----------------------------------------------------------------------------------


class NormTrace(NamedTuple):
    out: np.ndarray
    inverse: np.ndarray


class AttentionTrace(NamedTuple):
    norm: NormTrace
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    weights: np.ndarray
    mixed: np.ndarray


class MlpTrace(NamedTuple):
    norm: NormTrace
    hidden: np.ndarray


def _norm(x):
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    return NormTrace(x * inverse, inverse)


def _norm_back(trace, grad):
    along = np.mean(grad * trace.out, axis=-1, keepdims=True)
    return trace.inverse * (grad - trace.out * along)


def _split_heads(x, heads):
    batch, length, dim = x.shape
    return np.ascontiguousarray(x.reshape(batch, length, heads, dim // heads).swapaxes(1, 2))


def _join_heads(x):
    batch, heads, length, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * width)


def _weight_grad(grad_out, inputs):
    """The gradient of W in inputs Wᵀ."""
    return grad_out.reshape(-1, grad_out.shape[-1]).T @ inputs.reshape(-1, inputs.shape[-1])


def _attention(x, w, layer, heads, bias):
    norm = _norm(x)
    q, k, v = (_split_heads(norm.out @ w[f"layers.{layer}.{name}"].T, heads) for name in "qkv")
    q *= np.float32(1 / math.sqrt(q.shape[-1]))
    scores = q @ k.swapaxes(-1, -2) + bias
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = _join_heads(weights @ v)
    return x + mixed @ w[f"layers.{layer}.o"].T, AttentionTrace(norm, q, k, v, weights, mixed)


def _attention_back(trace, grad, w, layer, grads):
    heads = trace.q.shape[1]
    grads[f"layers.{layer}.o"] = _weight_grad(grad, trace.mixed)
    grad_mixed = _split_heads(grad @ w[f"layers.{layer}.o"], heads)
    grad_v = trace.weights.swapaxes(-1, -2) @ grad_mixed
    grad_scores = grad_mixed @ trace.v.swapaxes(-1, -2)
    grad_scores -= np.sum(grad_scores * trace.weights, axis=-1, keepdims=True)
    grad_scores *= trace.weights
    grad_q = grad_scores @ trace.k * np.float32(1 / math.sqrt(trace.q.shape[-1]))
    grad_k = grad_scores.swapaxes(-1, -2) @ trace.q

    grad_normed = np.zeros_like(grad)
    for name, part in zip("qkv", (grad_q, grad_k, grad_v)):
        part = _join_heads(part)
        grads[f"layers.{layer}.{name}"] = _weight_grad(part, trace.norm.out)
        grad_normed += part @ w[f"layers.{layer}.{name}"]
    return grad + _norm_back(trace.norm, grad_normed)


def _mlp(x, w, layer):
    norm = _norm(x)
    hidden = np.maximum(norm.out @ w[f"layers.{layer}.up"].T, 0)
    return x + hidden @ w[f"layers.{layer}.down"].T, MlpTrace(norm, hidden)


def _mlp_back(trace, grad, w, layer, grads):
    grads[f"layers.{layer}.down"] = _weight_grad(grad, trace.hidden)
    grad_hidden = (grad @ w[f"layers.{layer}.down"]) * (trace.hidden > 0)
    grads[f"layers.{layer}.up"] = _weight_grad(grad_hidden, trace.norm.out)
    return grad + _norm_back(trace.norm, grad_hidden @ w[f"layers.{layer}.up"])


def _attention_bias(length, heads):
    """Slope times distance for every head, -infinity for the future: (heads, length, length)."""
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    distance = np.arange(length)[:, None] - np.arange(length)
    bias = -slopes[:, None, None] * distance
    bias[:, distance < 0] = -np.inf
    return bias.astype(np.float32)


class Batch(NamedTuple):
    """Windows padded to one length, shifted into inputs and targets, and which targets count."""

    inputs: np.ndarray
    targets: np.ndarray
    counts: np.ndarray


def _batch(windows):
    lengths = np.array([len(window) for window in windows])
    table = np.zeros((len(windows), lengths.max()), np.int64)
    for row, window in zip(table, windows):
        row[: len(window)] = window
    counts = np.arange(1, table.shape[1]) < lengths[:, None]
    return Batch(table[:, :-1], table[:, 1:], counts)


def _forward(w, batch, layers, heads):
    """Log-probabilities (batch, length, vocab) and the traces of all stages."""
    x = w["embedding"][batch.inputs]
    bias = _attention_bias(x.shape[1], heads)
    traces = []
    for layer in range(layers):
        x, attention = _attention(x, w, layer, heads, bias)
        x, mlp = _mlp(x, w, layer)
        traces.append((attention, mlp))
    final = _norm(x)
    logits = final.out @ w["head"].T
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits, traces, final


def _loss(log_probs, batch):
    """Mean negative log-probability of the targets that count."""
    picked = np.take_along_axis(log_probs, batch.targets[..., None], axis=-1)[..., 0]
    return -float(picked[batch.counts].mean(dtype=np.float64))


def _gradients(w, batch, layers, heads):
    """The loss of a batch and its gradient for every tensor."""
    log_probs, traces, final = _forward(w, batch, layers, heads)
    loss = _loss(log_probs, batch)

    grad = np.exp(log_probs)
    rows, columns = np.indices(batch.targets.shape, sparse=True)
    grad[rows, columns, batch.targets] -= 1
    grad *= (batch.counts / batch.counts.sum()).astype(np.float32)[..., None]

    grads = {"head": _weight_grad(grad, final.out)}
    grad = _norm_back(final, grad @ w["head"])
    for layer in reversed(range(layers)):
        attention, mlp = traces[layer]
        grad = _mlp_back(mlp, grad, w, layer, grads)
        grad = _attention_back(attention, grad, w, layer, grads)
    grads["embedding"] = np.zeros_like(w["embedding"])
    np.add.at(grads["embedding"], batch.inputs, grad)
    return loss, grads


# --- training -----------------------------------------------------------------------------------


class Config(NamedTuple):
    vocab: int
    dim: int
    heads: int
    context: int
    layers: int
    seed: int
    seconds: float


def _config(config):
    missing = [name for name in Config._fields if name not in config]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}")
    seconds = float(config["seconds"])
    checked = Config(*(index(config[name]) for name in Config._fields[:-1]), seconds)
    if min(checked[:4]) < 1 or min(checked.layers, checked.seed) < 0:
        raise ValueError("a config value is too small")
    if checked.dim % checked.heads:
        raise ValueError("dim must be divisible by heads")
    if not 0 <= seconds < math.inf:
        raise ValueError("seconds must be a finite number, not negative")
    return checked


def _starting_weights(config):
    """Random float32 weights, by name."""
    rng = np.random.default_rng(config.seed)
    dim = config.dim
    shapes = {"embedding": (config.vocab, dim)}
    for layer in range(config.layers):
        shapes |= {f"layers.{layer}.{name}": (dim, dim) for name in "qkvo"}
        shapes[f"layers.{layer}.up"] = (4 * dim, dim)
        shapes[f"layers.{layer}.down"] = (dim, 4 * dim)
    shapes["head"] = (config.vocab, dim)
    weights = {}
    for name, shape in shapes.items():
        deviation = 0.5 if name == "embedding" else shape[1] ** -0.5
        if name == "head":
            deviation *= 0.5
        weights[name] = (deviation * rng.standard_normal(shape)).astype(np.float32)
    return weights


def _quantised(weights):
    return {name: ternarize(w, GROUP) for name, w in weights.items()}


def _expanded(quantised):
    return {name: dequantize(*pair, GROUP) for name, pair in quantised.items()}


def _windows(document, context):
    """Pieces of at most context + 1 tokens, in which every token but the first is a target once."""
    starts = range(0, max(len(document) - 1, 0), context)
    return [document[start : start + context + 1] for start in starts]


def _hold_out(documents, context):
    """(training windows, validation windows) with all copies of a text on one side.

    About a tenth is held out, by content. Few documents are held out by window instead, so that one
    long document can be validated as well; a single window leaves nothing to hold out.
    """
    units = {document: _windows(document, context) for document in documents if len(document) > 1}
    if len(units) < 8:
        units = {window: [window] for windows in units.values() for window in windows}
    order = sorted(units, key=lambda unit: _draw(unit, "validation"))
    held = set(order[: max(1, len(order) // 10)] if len(order) > 1 else [])

    train, valid = [], []
    for document in documents:
        if document in units:
            (valid if document in held else train).extend(units[document])
        else:
            for window in _windows(document, context):
                (valid if window in held else train).append(window)
    return train, valid


class Adam:
    """Adam with a step that is relative to each tensor's starting deviation."""

    def __init__(self, weights):
        self.sizes = {name: float(w.std()) or 1.0 for name, w in weights.items()}
        self.first = {name: np.zeros_like(w) for name, w in weights.items()}
        self.second = {name: np.zeros_like(w) for name, w in weights.items()}
        self.steps = 0

    def update(self, weights, grads, rate):
        self.steps += 1
        correction = math.sqrt(1 - 0.98**self.steps) / (1 - 0.9**self.steps)
        for name, grad in grads.items():
            first, second = self.first[name], self.second[name]
            first += 0.1 * (grad - first)
            second += 0.02 * (grad * grad - second)
            step = np.float32(rate * correction * self.sizes[name])
            weights[name] -= step * first / (np.sqrt(second) + np.float32(1e-9))


def _batches(windows, rng, tokens_each):
    """Endless batches of about `tokens_each` tokens, every window once in each shuffled pass."""
    longest = max(map(len, windows))
    size = max(1, tokens_each // longest)
    while True:
        order = rng.permutation(len(windows))
        for start in range(0, len(order), size):
            yield _batch([windows[place] for place in order[start : start + size]])


def _fit(weights, train, valid, config, started):
    """The quantised weights with the lowest validation loss within the time."""
    rng = np.random.default_rng([config.seed, 1])
    batches = _batches(train, rng, 768)
    checks = [_batch(valid[start : start + 16]) for start in range(0, min(len(valid), 64), 16)]
    sizes = [check.counts.sum() for check in checks]
    adam = Adam(weights)
    quantised = best = _quantised(weights)
    best_loss, best_progress = math.inf, 0.0
    progress = longest_step = 0.0

    while progress < 1 and (progress - best_progress < 0.4 or not checks):
        began = time.monotonic()
        loss, grads = _gradients(_expanded(quantised), next(batches), config.layers, config.heads)
        rate = 0.06 * min(1.0, (adam.steps + 1) / 20) * (1 - progress)
        adam.update(weights, grads, max(rate, 1e-3))
        quantised = _quantised(weights)

        if not checks:
            if adam.steps >= 3 and loss < math.log(config.vocab) - 0.5 or adam.steps >= 60:
                break
        elif adam.steps in (4, 8, 16) or adam.steps % 25 == 0:
            w = _expanded(quantised)
            losses = [_loss(_forward(w, c, config.layers, config.heads)[0], c) for c in checks]
            score = float(np.average(losses, weights=sizes))
            if score < best_loss:
                best, best_loss, best_progress = quantised, score, progress
        now = time.monotonic()
        longest_step = max(longest_step, now - began)
        progress = (now - started + longest_step) / config.seconds
    return quantised if best_loss == math.inf else best


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    started = time.monotonic()
    config = _config(config)
    documents = [_tokens(document) for document in documents]
    if any(document and max(document) >= config.vocab for document in documents):
        raise ValueError("a token id lies outside the vocabulary")
    if all(len(document) < 2 for document in documents):
        raise ValueError("no token has a successor")

    weights = _starting_weights(config)
    if config.seconds == 0:
        return _quantised(weights)
    train_windows, valid_windows = _hold_out(documents, config.context)
    return _fit(weights, train_windows, valid_windows, config, started)
