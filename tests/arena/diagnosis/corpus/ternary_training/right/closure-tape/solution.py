"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md."""

import hashlib
import math
import operator
import time

import numpy as np

GROUP = 128
LARGEST_SCALE = float(np.finfo(np.float16).max)
LLOYD_ROUNDS = 3
BATCH_TOKENS = 512
LEARNING_RATE = 0.01
EPSILON = 1e-6


# ---------------------------------------------------------------- quantiser


def _group_size(value):
    size = operator.index(value)
    if size < 1:
        raise ValueError("group size must be at least 1")
    return size


def _quantise_pieces(pieces):
    """Quantise each row of a C-ordered (..., m) array, m >= 1: int8 codes, float16 scales (...)."""
    magnitude = np.abs(pieces).astype(np.float64, order="C")
    peak = magnitude.max(axis=-1, keepdims=True)
    magnitude /= np.where(peak > 0, peak, 1.0)
    level = magnitude.mean(axis=-1, keepdims=True)
    for _ in range(LLOYD_ROUNDS):
        chosen = magnitude > 0.5 * level
        count = np.maximum(chosen.sum(axis=-1, keepdims=True), 1)
        level = np.where(chosen, magnitude, 0.0).sum(axis=-1, keepdims=True) / count
    scales = np.minimum(level * peak, LARGEST_SCALE).astype(np.float16)
    codes = np.where(chosen & (scales > 0), np.sign(pieces), 0).astype(np.int8)
    return codes, scales[..., 0]


def ternarize(w, group_size=GROUP):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    size = _group_size(group_size)
    w = np.asarray(w)
    if w.dtype not in (np.float32, np.float64):
        raise TypeError("weights must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("weights need at least one axis")
    if not np.isfinite(w).all():
        raise ValueError("weights must be finite")
    lead, n = w.shape[:-1], w.shape[-1]
    codes = np.zeros(w.shape, np.int8)
    scales = np.zeros((*lead, -(-n // size)), np.float16)
    if w.size == 0:
        return codes, scales
    whole = n // size
    edge = whole * size
    if whole:
        body = np.ascontiguousarray(w[..., :edge]).reshape(*lead, whole, size)
        body_codes, scales[..., :whole] = _quantise_pieces(body)
        codes[..., :edge] = body_codes.reshape(*lead, edge)
    if edge < n:
        codes[..., edge:], scales[..., whole] = _quantise_pieces(
            np.ascontiguousarray(w[..., edge:])
        )
    return codes, scales


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes need at least one axis")
    if ((codes < -1) | (codes > 1)).any():
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=GROUP):
    """code times the scale of its group, float32."""
    size = _group_size(group_size)
    codes = _checked_codes(codes)
    scales = np.asarray(scales)
    n = codes.shape[-1]
    if scales.shape != (*codes.shape[:-1], -(-n // size)):
        raise ValueError("scales do not fit the codes")
    owner = np.arange(n) // size
    return codes.astype(np.float32) * scales.astype(np.float32)[..., owner]


# ---------------------------------------------------------------- packing


def _unpack_table():
    """The four codes of every byte; 2 stands for the pattern that no code has."""
    places = np.arange(256)[:, None] >> np.array([0, 2, 4, 6])
    return ((places & 3) - 1).astype(np.int8)


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _checked_codes(codes)
    lead, n = codes.shape[:-1], codes.shape[-1]
    digits = np.ones((*lead, -(-n // 4) * 4), np.uint8)
    digits[..., :n] = codes + 1
    packed = digits[..., 0::4].copy()
    for place in (1, 2, 3):
        packed |= digits[..., place::4] << np.uint8(2 * place)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    shape = tuple(operator.index(length) for length in shape)
    if not shape or min(shape) < 0:
        raise ValueError("not a shape of codes")
    n = shape[-1]
    if packed.shape != (*shape[:-1], -(-n // 4)):
        raise ValueError("the bytes do not fit the shape")
    places = _unpack_table()[packed]
    codes = places.reshape(*shape[:-1], 4 * packed.shape[-1])[..., :n].copy()
    if (codes > 1).any():
        raise ValueError("a place holds no code")
    return codes


# ---------------------------------------------------------------- split


def _position(document):
    """A number in [0, 1) that depends on the tokens alone."""
    tokens = [operator.index(token) for token in document]
    if any(token < 0 for token in tokens):
        raise ValueError("token ids are not negative")
    text = ",".join(format(token, "x") for token in tokens)
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2.0**53


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must lie between 0 and 1")
    sides = ([], [])
    for index, document in enumerate(documents):
        sides[_position(document) < fraction].append(index)
    return sides


# -------------------------------------------------------- model, each step with its way back


def _linear(x, weight):
    y = x @ weight.T

    def back(dy):
        flat = dy.reshape(-1, dy.shape[-1])
        return dy @ weight, flat.T @ x.reshape(-1, x.shape[-1])

    return y, back


def _norm(x):
    inverse = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON)
    y = x * inverse

    def back(dy):
        return inverse * (dy - y * (dy * y).mean(axis=-1, keepdims=True))

    return y, back


def _distance_bias(length, heads):
    steps = np.arange(length)
    gap = steps[:, None] - steps[None, :]
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    bias = np.where(gap >= 0, -slopes[:, None, None] * gap, -np.inf)
    return bias.astype(np.float32)


def _attention(q, k, v, heads):
    batch, length, dim = q.shape
    width = dim // heads

    def apart(x):
        return np.ascontiguousarray(x.reshape(batch, length, heads, width).transpose(0, 2, 1, 3))

    def together(x):
        return x.transpose(0, 2, 1, 3).reshape(batch, length, dim)

    qh, kh, vh = apart(q), apart(k), apart(v)
    factor = np.float32(1.0 / math.sqrt(width))
    scores = (qh @ kh.swapaxes(-1, -2)) * factor + _distance_bias(length, heads)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    share = scores / scores.sum(axis=-1, keepdims=True)

    def back(dy):
        dh = apart(dy)
        dshare = dh @ vh.swapaxes(-1, -2)
        dv = share.swapaxes(-1, -2) @ dh
        dscores = share * (dshare - (dshare * share).sum(axis=-1, keepdims=True)) * factor
        return together(dscores @ kh), together(dscores.swapaxes(-1, -2) @ qh), together(dv)

    return together(share @ vh), back


def _layer(x, weights, prefix, heads):
    a, norm_back = _norm(x)
    q, q_back = _linear(a, weights[prefix + "q"])
    k, k_back = _linear(a, weights[prefix + "k"])
    v, v_back = _linear(a, weights[prefix + "v"])
    mixed, mix_back = _attention(q, k, v, heads)
    added, o_back = _linear(mixed, weights[prefix + "o"])
    x = x + added
    b, middle_back = _norm(x)
    hidden, up_back = _linear(b, weights[prefix + "up"])
    active = np.maximum(hidden, 0)
    added, down_back = _linear(active, weights[prefix + "down"])

    def back(dx, grads):
        dactive, grads[prefix + "down"] = down_back(dx)
        db, grads[prefix + "up"] = up_back(dactive * (hidden > 0))
        dx = dx + middle_back(db)
        dmixed, grads[prefix + "o"] = o_back(dx)
        dq, dk, dv = mix_back(dmixed)
        da, grads[prefix + "q"] = q_back(dq)
        for part, part_back, dpart in (("k", k_back, dk), ("v", v_back, dv)):
            more, grads[prefix + part] = part_back(dpart)
            da = da + more
        return dx + norm_back(da)

    return x + added, back


def _loss(weights, config, inputs, targets, wanted=True):
    """Mean loss over the places with a target (>= 0), and the gradients where they are wanted."""
    x = weights["embedding"][inputs]
    trail = []
    for i in range(config["layers"]):
        x, back = _layer(x, weights, f"layers.{i}.", config["heads"])
        trail.append(back)
    y, norm_back = _norm(x)
    logits, head_back = _linear(y, weights["head"])
    logits = logits - logits.max(axis=-1, keepdims=True)
    chances = np.exp(logits)
    total = chances.sum(axis=-1, keepdims=True)
    real = targets >= 0
    count = real.sum()
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)
    loss = float(((np.log(total) - picked)[..., 0] * real).sum() / count)
    if not wanted:
        return loss, None
    grads = {}
    dlogits = chances / total
    rows = np.nonzero(real)
    dlogits[(*rows, targets[rows])] -= 1.0
    dlogits *= real[..., None] / np.float32(count)
    dy, grads["head"] = head_back(dlogits)
    dx = norm_back(dy)
    for back in reversed(trail):
        dx = back(dx, grads)
    embedding = np.zeros_like(weights["embedding"])
    np.add.at(embedding, inputs, dx)
    grads["embedding"] = embedding
    return loss, grads


# ---------------------------------------------------------------- trainer


def _checked_config(config):
    checked = {}
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
        checked[name] = operator.index(config[name])
        if checked[name] < least:
            raise ValueError(f"{name} must be at least {least}")
    if "seconds" not in config:
        raise ValueError("config lacks seconds")
    checked["seconds"] = float(config["seconds"])
    if not 0 <= checked["seconds"] < math.inf:
        raise ValueError("seconds must be a number from 0")
    if checked["dim"] % checked["heads"]:
        raise ValueError("dim must be divisible by heads")
    return checked


def _checked_documents(documents, vocab):
    checked = [[operator.index(token) for token in document] for document in documents]
    for document in checked:
        if document and not (min(document) >= 0 and max(document) < vocab):
            raise ValueError("token id outside the vocabulary")
    if all(len(document) < 2 for document in checked):
        raise ValueError("no token has a successor")
    return checked


def _shapes(config):
    vocab, dim = config["vocab"], config["dim"]
    shapes = {"embedding": (vocab, dim)}
    for i in range(config["layers"]):
        for part in "qkvo":
            shapes[f"layers.{i}.{part}"] = (dim, dim)
        shapes[f"layers.{i}.up"] = (4 * dim, dim)
        shapes[f"layers.{i}.down"] = (dim, 4 * dim)
    shapes["head"] = (vocab, dim)
    return shapes


def _start(config):
    rng = np.random.default_rng(config["seed"])
    start = {}
    for name, shape in _shapes(config).items():
        spread = 1.0 if name == "embedding" else 1.0 / math.sqrt(shape[-1])
        if name == "head":
            spread *= 0.5
        start[name] = (spread * rng.standard_normal(shape)).astype(np.float32)
    return start


def _pieces(document, context):
    """Cut a document into pieces of at most context + 1 tokens that share one token."""
    return [document[i : i + context + 1] for i in range(0, len(document) - 1, context)]


def _padded(pieces):
    length = max(len(piece) for piece in pieces) - 1
    inputs = np.zeros((len(pieces), length), np.int64)
    targets = np.full((len(pieces), length), -1, np.int64)
    for row, piece in enumerate(pieces):
        inputs[row, : len(piece) - 1] = piece[:-1]
        targets[row, : len(piece) - 1] = piece[1:]
    return inputs, targets


def _quantised(latent):
    return {name: ternarize(value, GROUP) for name, value in latent.items()}


def _values(quantised):
    return {name: dequantize(codes, scales, GROUP) for name, (codes, scales) in quantised.items()}


def _take(pieces, order, budget):
    """Pieces in this order until their padded size would pass the budget; at least one."""
    taken, longest = [], 0
    for index in order:
        longest = max(longest, len(pieces[index]))
        if taken and longest * (len(taken) + 1) > budget:
            break
        taken.append(pieces[index])
    return taken


def _sides(documents, config):
    """Pieces to learn from and pieces to watch; nothing to watch where there is little text."""
    useful = [document for document in documents if len(document) > 1]
    pieces = [piece for document in useful for piece in _pieces(document, config["context"])]
    learn, watch = split(pieces, 0.12 if len(pieces) >= 50 else 0.3)
    if not learn or not watch:
        return pieces, []
    return [pieces[i] for i in learn], [pieces[i] for i in watch]


class _Adam:
    def __init__(self, latent):
        self.first = {name: np.zeros_like(value) for name, value in latent.items()}
        self.second = {name: np.zeros_like(value) for name, value in latent.items()}
        self.steps = 0

    def update(self, latent, grads, rate):
        self.steps += 1
        correct_first = 1.0 - 0.9**self.steps
        correct_second = 1.0 - 0.98**self.steps
        for name, grad in grads.items():
            first, second = self.first[name], self.second[name]
            first += np.float32(0.1) * (grad - first)
            second += np.float32(0.02) * (grad * grad - second)
            spread = 3.0 if name == "embedding" else 1.0
            step = (first / correct_first) / (np.sqrt(second / correct_second) + 1e-8)
            latent[name] -= np.float32(rate * spread) * step


def _fit(latent, config, learn, watch, began):
    """Train until the time is over; the quantised weights that did best on the watched pieces."""
    rng = np.random.default_rng([config["seed"], 1])
    limit = config["seconds"]
    best = _quantised(latent)
    watched = _padded(_take(watch, range(len(watch)), 4 * BATCH_TOKENS)) if watch else None
    best_loss = _loss(_values(best), config, *watched, wanted=False)[0] if watch else math.inf
    adam = _Adam(latent)
    next_look = 0.1
    goal = 0.0 if watch else 0.7 * math.log(config["vocab"])
    while True:
        passed = (time.monotonic() - began) / limit
        if passed >= 1:
            break
        now = _quantised(latent)
        if watch and passed >= next_look:
            next_look = passed + 0.04
            seen = _loss(_values(now), config, *watched, wanted=False)[0]
            if seen < best_loss:
                best, best_loss = now, seen
        batch = _padded(_take(learn, rng.permutation(len(learn))[:BATCH_TOKENS], BATCH_TOKENS))
        loss, grads = _loss(_values(now), config, *batch)
        if loss < goal and adam.steps > 5:
            return now
        warm = min(1.0, (adam.steps + 1) / 10)
        adam.update(latent, grads, LEARNING_RATE * warm * (1.0 - 0.97 * passed))
    if not watch:
        return _quantised(latent)
    now = _quantised(latent)
    return now if _loss(_values(now), config, *watched, wanted=False)[0] < best_loss else best


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    began = time.monotonic()
    config = _checked_config(config)
    documents = _checked_documents(documents, config["vocab"])
    latent = _start(config)
    if config["seconds"] == 0:
        return _quantised(latent)
    learn, watch = _sides(documents, config)
    return _fit(latent, config, learn, watch, began)
