"""Ternary weights: quantise, pack, split documents, train.

The trainer keeps all latent weights in one flat vector, with a named view per tensor, and so do the gradient and
the moments of Adam: an update of the whole model is a handful of vector operations.
"""

import math
import time
from hashlib import sha256
from operator import index

import numpy as np

GROUP = 128
HALF = np.finfo(np.float16)
HUGE = 1e30  # weights above this count as this: squares of sums stay finite
EPSILON = 1e-6
LONGEST = 256  # positions of a training window
BATCH_TOKENS = 512
HELD_OUT_TOKENS = 2048
DECAY = 0.1  # of queries and keys: with one place to look at they have no gradient
RATE = 0.07  # over the root of the width

# ---------------------------------------------------------------- quantiser


def _group_size(value):
    size = index(value)
    if size < 1:
        raise ValueError("group_size must be at least 1")
    return size


def _ternary_groups(groups):
    """Codes and scales of groups (R, n) that are quantised row by row: the least squares for every row."""
    magnitude = np.abs(groups)
    ordered = -np.sort(-magnitude, axis=-1)
    count = np.arange(1, groups.shape[-1] + 1)
    sums = np.cumsum(np.minimum(ordered, HUGE), axis=-1, dtype=np.float64)
    kept = np.argmax(sums * sums / count, axis=-1)[:, None]
    mean = np.take_along_axis(sums, kept, axis=-1) / (kept + 1)
    scale = np.minimum(mean, HALF.max).astype(np.float16)
    is_kept = (magnitude >= np.take_along_axis(ordered, kept, axis=-1)) & (scale > 0)
    return np.where(is_kept, np.sign(groups), 0).astype(np.int8), scale[:, 0]


def ternarize(w, group_size=GROUP):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    size = _group_size(group_size)
    if w.dtype not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("w must have an axis")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    width = w.shape[-1]
    codes = np.zeros(w.shape, np.int8)
    scales = np.zeros((*w.shape[:-1], -(-width // size)), np.float16)
    if w.size == 0:
        return codes, scales
    whole = width - width % size
    if whole:
        part, scale = _ternary_groups(w[..., :whole].reshape(-1, size))
        codes[..., :whole] = part.reshape(*w.shape[:-1], whole)
        scales[..., : whole // size] = scale.reshape(*w.shape[:-1], whole // size)
    if whole < width:
        part, scale = _ternary_groups(w[..., whole:].reshape(-1, width - whole))
        codes[..., whole:] = part.reshape(*w.shape[:-1], width - whole)
        scales[..., -1] = scale.reshape(w.shape[:-1])
    return codes, scales


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes must have an axis")
    if ((codes < -1) | (codes > 1)).any():
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=GROUP):
    """code times the scale of its group, float32."""
    codes = _checked_codes(codes)
    scales = np.asarray(scales)
    size = _group_size(group_size)
    width = codes.shape[-1]
    if scales.dtype != np.float16:
        raise TypeError("scales must be float16")
    if scales.shape != (*codes.shape[:-1], -(-width // size)):
        raise ValueError("scales must have one entry per group")
    spread = np.repeat(scales.astype(np.float32), min(size, max(width, 1)), axis=-1)
    return codes * spread[..., :width]


# ---------------------------------------------------------------- packing


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _checked_codes(codes)
    width = codes.shape[-1]
    padded = np.ones((*codes.shape[:-1], -(-width // 4) * 4), np.uint8)
    padded[..., :width] = codes + 1
    first, second, third, fourth = (padded[..., place::4] for place in range(4))
    return first | second << 2 | third << 4 | fourth << 6


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    shape = tuple(index(extent) for extent in shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    if not shape or min(shape) < 0:
        raise ValueError("shape must have an axis and no negative extents")
    bytes_shape = (*shape[:-1], -(-shape[-1] // 4))
    if packed.shape != bytes_shape:
        raise ValueError("the bytes do not fit the shape")
    places = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    row_places = places.reshape(*shape[:-1], 4 * bytes_shape[-1])[..., : shape[-1]]
    if (row_places == 3).any():
        raise ValueError("a place holds no code")
    return row_places.astype(np.int8) - np.int8(1)


# ---------------------------------------------------------------- documents


def _tokens(document):
    tokens = [index(token) for token in document]
    if tokens and min(tokens) < 0:
        raise ValueError("token ids must not be negative")
    return tokens


def _draw(document):
    """A number in [0, 1) that follows from the tokens alone."""
    text = ",".join(map(hex, document))  # hex has no limit of digits
    return int.from_bytes(sha256(text.encode()).digest()[:6], "big") / 2**48


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must lie between 0 and 1")
    draws = [_draw(_tokens(document)) for document in documents]
    train_ids = [place for place, draw in enumerate(draws) if draw >= fraction]
    valid_ids = [place for place, draw in enumerate(draws) if draw < fraction]
    return train_ids, valid_ids


def _windows(documents, length):
    """Pieces of at most `length` + 1 tokens; neighbours share one token, so that every token but the first is a target."""
    pieces = []
    for document in documents:
        for start in range(0, len(document) - 1, length):
            pieces.append(document[start : start + length + 1])
    return pieces


def _first_tokens(windows, limit):
    """The first windows, as many as hold about `limit` tokens."""
    ends = np.cumsum([len(window) for window in windows])
    return windows[: int(np.searchsorted(ends, limit)) + 1]


def _batches(windows):
    """The windows in batches of at most BATCH_TOKENS places, padding included, or of one window."""
    batch = []
    for window in windows:
        longest = max(map(len, [*batch, window]))
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _endless(windows, rng):
    """The windows in a new order every time, for ever."""
    while True:
        for place in rng.permutation(len(windows)):
            yield windows[place]


def _padded(windows):
    """Inputs, targets and the targets' weights, each (B, T)."""
    longest = max(map(len, windows)) - 1
    inputs = np.zeros((len(windows), longest), np.int64)
    targets = np.zeros_like(inputs)
    weights = np.zeros(inputs.shape, np.float32)
    for row, window in enumerate(windows):
        inputs[row, : len(window) - 1] = window[:-1]
        targets[row, : len(window) - 1] = window[1:]
        weights[row, : len(window) - 1] = 1
    return inputs, targets, weights


# ---------------------------------------------------------------- model


def _checked_config(config):
    """The config with plain numbers."""
    checked = {}
    for name, least in (("vocab", 1), ("dim", 1), ("heads", 1), ("context", 1), ("layers", 0), ("seed", 0)):
        if name not in config:
            raise ValueError(f"{name} is missing")
        checked[name] = index(config[name])
        if checked[name] < least:
            raise ValueError(f"{name} must be at least {least}")
    if "seconds" not in config:
        raise ValueError("seconds is missing")
    checked["seconds"] = config["seconds"]
    if not 0 <= checked["seconds"] <= 60:
        raise ValueError("seconds must lie between 0 and 60")
    if checked["dim"] % checked["heads"]:
        raise ValueError("dim must be divisible by heads")
    return checked


def _shapes(config):
    dim, vocab = config["dim"], config["vocab"]
    shapes = {"embedding": (vocab, dim)}
    for layer in range(config["layers"]):
        shapes.update({f"layers.{layer}.{part}": (dim, dim) for part in "qkvo"})
        shapes[f"layers.{layer}.up"] = (4 * dim, dim)
        shapes[f"layers.{layer}.down"] = (dim, 4 * dim)
    shapes["head"] = (vocab, dim)
    return shapes


def _views(flat, shapes):
    """A named view into the flat vector for every tensor."""
    views, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        views[name] = flat[start:stop].reshape(shape)
        start = stop
    return views


def _starting_weights(shapes, seed):
    """The flat vector of random latent weights."""
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(sum(map(math.prod, shapes.values()))).astype(np.float32)
    for name, view in _views(flat, shapes).items():
        view *= 0.3 if name == "embedding" else 0.5 / math.sqrt(view.shape[1])
    return flat


def _quantised(flat, shapes):
    """The weights that the model computes with, by name."""
    return {name: dequantize(*ternarize(view)) for name, view in _views(flat, shapes).items()}


def _norm(x):
    """norm(x) and the factor that made it."""
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPSILON))
    return x * factor, factor


def _norm_gradient(gradient, normed, factor):
    return factor * (gradient - normed * np.mean(gradient * normed, axis=-1, keepdims=True))


def _bias(heads, length):
    """What is added to the scores, (heads, T, T): the distance's price, -infinity for the future."""
    place = np.arange(length)
    distance = place[:, None] - place[None, :]
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    bias = -slopes[:, None, None] * distance
    return np.where(distance >= 0, bias, -np.inf).astype(np.float32)


def _split_heads(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _join_heads(x):
    joined = x.swapaxes(1, 2)
    return joined.reshape(*joined.shape[:2], -1)


def _softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _layer_forward(x, weights, layer, heads):
    """The layer's output and what its gradient needs."""
    part = {name: weights[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "o", "up", "down")}
    a, a_factor = _norm(x)
    q, k, v = (_split_heads(a @ part[name].T, heads) for name in "qkv")
    attention = _softmax(q @ k.swapaxes(-1, -2) / np.float32(math.sqrt(q.shape[-1])) + _bias(heads, x.shape[1]))
    mixed = _join_heads(attention @ v)
    x = x + mixed @ part["o"].T
    b, b_factor = _norm(x)
    hidden = np.maximum(b @ part["up"].T, 0)
    return x + hidden @ part["down"].T, (part, a, a_factor, q, k, v, attention, mixed, b, b_factor, hidden)


def _outer(gradient, inputs):
    """The gradient of W in inputs Wᵀ."""
    return gradient.reshape(-1, gradient.shape[-1]).T @ inputs.reshape(-1, inputs.shape[-1])


def _layer_backward(g, cache, gradients, layer):
    """The gradient of the layer's input; those of its weights go into `gradients`."""
    part, a, a_factor, q, k, v, attention, mixed, b, b_factor, hidden = cache
    heads = q.shape[1]
    store = {name: gradients[f"layers.{layer}.{name}"] for name in part}
    store["down"][...] = _outer(g, hidden)
    g_hidden = (g @ part["down"]) * (hidden > 0)
    store["up"][...] = _outer(g_hidden, b)
    g = g + _norm_gradient(g_hidden @ part["up"], b, b_factor)
    store["o"][...] = _outer(g, mixed)
    g_mixed = _split_heads(g @ part["o"], heads)
    g_attention = g_mixed @ v.swapaxes(-1, -2)
    g_scores = attention * (g_attention - (attention * g_attention).sum(axis=-1, keepdims=True))
    g_scores /= np.float32(math.sqrt(q.shape[-1]))
    g_a = 0
    for name, heads_gradient in (
        ("q", g_scores @ k),
        ("k", g_scores.swapaxes(-1, -2) @ q),
        ("v", attention.swapaxes(-1, -2) @ g_mixed),
    ):
        joined = _join_heads(heads_gradient)
        store[name][...] = _outer(joined, a)
        g_a = g_a + joined @ part[name]
    return g + _norm_gradient(g_a, a, a_factor)


def _forward(weights, inputs, config):
    """The probabilities of the next token, and what the gradient needs."""
    x = weights["embedding"][inputs]
    caches = []
    for layer in range(config["layers"]):
        x, cache = _layer_forward(x, weights, layer, config["heads"])
        caches.append(cache)
    normed, factor = _norm(x)
    return _softmax(normed @ weights["head"].T), (caches, normed, factor)


def _losses(weights, windows, config):
    """The negative log-probability of every target."""
    losses = []
    for batch in _batches(sorted(windows, key=len)):
        inputs, targets, mask = _padded(batch)
        probabilities, _ = _forward(weights, inputs, config)
        chosen = np.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0]
        losses.append(-np.log(np.maximum(chosen[mask > 0], 1e-30).astype(np.float64)))
    return np.concatenate(losses)


def _gradient(weights, windows, config, shapes):
    """The flat gradient of the mean loss: that of the quantised weights, passed straight to the latent ones."""
    inputs, targets, mask = _padded(windows)
    g, (caches, normed, factor) = _forward(weights, inputs, config)
    np.put_along_axis(g, targets[..., None], np.take_along_axis(g, targets[..., None], axis=-1) - 1, axis=-1)
    g *= (mask / mask.sum())[..., None]
    flat = np.zeros(sum(map(math.prod, shapes.values())), np.float32)
    gradients = _views(flat, shapes)
    gradients["head"][...] = _outer(g, normed)
    g = _norm_gradient(g @ weights["head"], normed, factor)
    for layer in range(config["layers"] - 1, -1, -1):
        g = _layer_backward(g, caches[layer], gradients, layer)
    np.add.at(gradients["embedding"], inputs, g)
    return flat


# ---------------------------------------------------------------- trainer


def _bounded(flat, shapes):
    """The weights with a head so small that no law is far from uniform."""
    flat = flat.copy()
    head = _views(flat, shapes)["head"]
    longest = np.sqrt((head.astype(np.float64) ** 2).sum(axis=1).max() * head.shape[1])
    head *= np.float32(min(1, 0.4 / max(longest, 1e-30)))
    return flat


def _optimise(flat, windows, held_out, config, shapes, begin):
    """The weights that predict the held-out windows best, as time allows."""
    batches = _batches(_endless(windows, np.random.default_rng([config["seed"], 1])))
    first, second, decay = (np.zeros_like(flat) for _ in range(3))
    for name, view in _views(decay, shapes).items():
        view[...] = DECAY if name.endswith((".q", ".k")) else 0
    best, best_loss, seen = flat, math.inf, None
    step, next_look = 0, 0.25
    progress = (time.perf_counter() - begin) / config["seconds"]
    while progress < 1:
        gradient = _gradient(_quantised(flat, shapes), next(batches), config, shapes)
        gradient *= min(1, 1 / (float(np.linalg.norm(gradient)) + 1e-12))
        step += 1
        first += 0.1 * (gradient - first)
        second += 0.02 * (gradient * gradient - second)
        rate = RATE / math.sqrt(config["dim"]) * min(1, step / 10) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        move = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.98**step)) + 1e-8)
        flat = flat - np.float32(rate) * (move + decay * flat)
        before, progress = progress, (time.perf_counter() - begin) / config["seconds"]
        if held_out and (progress >= next_look or 2 * progress - before >= 1):
            losses = _losses(_quantised(flat, shapes), held_out, config)
            next_look = progress + 0.08
            if losses.mean() < best_loss:
                best, best_loss, seen = flat, losses.mean(), losses
            progress = (time.perf_counter() - begin) / config["seconds"]
    if seen is None:
        return _bounded(flat, shapes)
    doubt = 3 * seen.std() / math.sqrt(seen.size) + 4 / seen.size
    has_learnt = best_loss < math.log(config["vocab"]) and best_loss + doubt < math.log(4 * config["vocab"])
    return best if has_learnt else _bounded(best, shapes)


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    begin = time.perf_counter()
    config = _checked_config(config)
    documents = [_tokens(document) for document in documents]
    if any(document and max(document) >= config["vocab"] for document in documents):
        raise ValueError("a token id lies outside the vocabulary")
    windows = _windows(documents, min(config["context"], LONGEST))
    if not windows:
        raise ValueError("no token has a successor")
    shapes = _shapes(config)
    flat = _starting_weights(shapes, config["seed"])
    if config["seconds"] > 0:
        train_ids, valid_ids = split(windows, 0.12)
        held_out = []
        if train_ids:
            held_out = _first_tokens([windows[place] for place in valid_ids], HELD_OUT_TOKENS)
            windows = [windows[place] for place in train_ids]
        flat = _optimise(flat, windows, held_out, config, shapes, begin)
    return {name: ternarize(view) for name, view in _views(flat, shapes).items()}
