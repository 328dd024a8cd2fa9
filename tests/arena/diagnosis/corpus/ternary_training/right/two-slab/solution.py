"""Ternary weights: quantise, pack, split documents, train.

The latent weights of the model live in two slabs: `wide` holds every tensor whose rows have `dim` entries, one
below the other, and `tall` the tensors whose rows have 4 * dim. A training step thus needs two quantisations and
two optimiser updates, however many layers there are. Gradients are derived by hand and pass the quantiser straight
through.
"""

import hashlib
import math
import numbers
import operator
import time

import numpy as np

GROUP = 128
LARGEST = float(np.finfo(np.float16).max)
EPSILON = 1e-6


# ---------------------------------------------------------------- quantiser


def _group_size(value):
    size = operator.index(value)
    if size < 1:
        raise ValueError(f"the group size must be at least 1, got {size}")
    return size


def _ceil_div(a, b):
    return -(-a // b)


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size)).

    The codes with the least squared error: the k largest magnitudes, k maximising (their sum)^2 / k; the scale is
    their mean.
    """
    w = np.asarray(w)
    if w.dtype.kind != "f" or w.dtype.itemsize not in (4, 8):
        raise TypeError(f"weights must be float32 or float64, got {w.dtype}")
    if w.ndim == 0:
        raise ValueError("weights need at least one axis")
    if not np.isfinite(w).all():
        raise ValueError("weights must be finite")
    n = w.shape[-1]
    size = min(_group_size(group_size), max(n, 1))
    groups = _ceil_div(n, size)
    magnitude = np.abs(w)
    if n % size:
        padding = np.zeros((*w.shape[:-1], groups * size - n), w.dtype)
        magnitude = np.concatenate([magnitude, padding], axis=-1)
    magnitude = magnitude.reshape(*w.shape[:-1], groups, size)

    ranked = np.sort(magnitude, axis=-1)[..., ::-1]
    # A power of two brings the largest to [0.5, 1), exactly, so that no square overflows or vanishes.
    exponent = np.frexp(ranked[..., :1])[1]
    sums = np.cumsum(np.ldexp(ranked.astype(np.float64), -exponent), axis=-1)
    counts = np.arange(1, size + 1)
    best = np.argmax(sums * sums / counts, axis=-1)[..., None]
    mean = np.ldexp(np.take_along_axis(sums, best, axis=-1) / (best + 1), exponent)
    scales = np.minimum(mean, LARGEST).astype(np.float16)
    threshold = np.take_along_axis(ranked, best, axis=-1)

    kept = (magnitude >= threshold) & (scales > 0)
    kept = kept.reshape(*w.shape[:-1], groups * size)[..., :n]
    codes = np.sign(w).astype(np.int8) * kept
    return codes, scales[..., 0]


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError(f"codes must be int8, got {codes.dtype}")
    if codes.ndim == 0:
        raise ValueError("codes need at least one axis")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def _expand(codes, scales, size):
    """code times scale without any checks."""
    each = np.repeat(scales.astype(np.float32), min(size, max(codes.shape[-1], 1)), axis=-1)
    return codes * each[..., : codes.shape[-1]]


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes = _checked_codes(codes)
    scales = np.asarray(scales)
    size = _group_size(group_size)
    if scales.dtype.kind != "f":
        raise TypeError(f"scales must be floating-point, got {scales.dtype}")
    expected = (*codes.shape[:-1], _ceil_div(codes.shape[-1], size))
    if scales.shape != expected:
        raise ValueError(f"scales must have shape {expected}, got {scales.shape}")
    return _expand(codes, scales, size)


# ---------------------------------------------------------------- packing


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _checked_codes(codes)
    n = codes.shape[-1]
    places = np.ones((*codes.shape[:-1], _ceil_div(n, 4) * 4), np.uint8)
    places[..., :n] = codes + 1
    return places[..., 0::4] | places[..., 1::4] << 2 | places[..., 2::4] << 4 | places[..., 3::4] << 6


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed codes must be uint8, got {packed.dtype}")
    shape = tuple(operator.index(length) for length in shape)
    if not shape or min(shape) < 0:
        raise ValueError(f"{shape} is not the shape of packed codes")
    if packed.shape != (*shape[:-1], _ceil_div(shape[-1], 4)):
        raise ValueError(f"bytes of shape {packed.shape} do not hold codes of shape {shape}")
    places = np.empty((*packed.shape[:-1], packed.shape[-1] * 4), np.uint8)
    for place in range(4):
        places[..., place::4] = packed >> (2 * place) & 3
    places = places[..., : shape[-1]]
    if (places == 3).any():
        raise ValueError("a place has both bits set")
    return places.astype(np.int8) - np.int8(1)


# ---------------------------------------------------------------- documents


def _token(value):
    token = operator.index(value)
    if token < 0:
        raise ValueError(f"token ids must not be negative, got {token}")
    return token


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not isinstance(fraction, numbers.Real):
        raise TypeError("the fraction must be a number")
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction must lie between 0 and 1, got {fraction}")
    sides = ([], [])
    for index, document in enumerate(documents):
        content = ",".join(f"{_token(token):x}" for token in document)
        digest = hashlib.sha256(content.encode()).digest()
        draw = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
        sides[draw < fraction].append(index)
    return sides


def _windows(documents, length):
    """Pieces of at most length + 1 tokens in which every token but a document's first is predicted once."""
    pieces = []
    for document in documents:
        for start in range(0, len(document) - 1, length):
            pieces.append(np.array(document[start : start + length + 1]))
    return pieces


def _batch(pieces):
    """Inputs, targets and a mask of the real targets, padded at the end; all (B, T)."""
    longest = max(piece.size for piece in pieces) - 1
    inputs = np.zeros((len(pieces), longest), np.int64)
    targets = np.zeros_like(inputs)
    mask = np.zeros(inputs.shape, np.float32)
    for row, piece in enumerate(pieces):
        inputs[row, : piece.size - 1] = piece[:-1]
        targets[row, : piece.size - 1] = piece[1:]
        mask[row, : piece.size - 1] = 1
    return inputs, targets, mask


def _hold_out(documents):
    """(training, validation) documents, equal ones on the same side; validation may be empty."""
    usable = [document for document in documents if len(document) > 1]
    train_ids, valid_ids = split(usable, 0.1)
    if not train_ids or not valid_ids:
        last = usable[-1]
        valid_ids = [i for i, document in enumerate(usable) if document == last]
        train_ids = [i for i, document in enumerate(usable) if document != last]
        if not train_ids:
            return usable, []
    return [usable[i] for i in train_ids], [usable[i] for i in valid_ids]


# ---------------------------------------------------------------- model


def _norm(x):
    """x over its root mean square, and the factor."""
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPSILON))
    return x * factor, factor


def _norm_back(grad, y, factor):
    return factor * (grad - y * np.mean(grad * y, axis=-1, keepdims=True))


def _outer(grad, x):
    """The gradient of W in x Wᵀ."""
    return grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])


class _Model:
    """The architecture: where tensors lie in the slabs, the loss and its gradient."""

    def __init__(self, config):
        self.vocab, self.dim = config["vocab"], config["dim"]
        self.heads, self.layers = config["heads"], config["layers"]
        self.spans = {}
        self.wide_rows = self.tall_rows = 0
        self._add("embedding", self.vocab)
        for i in range(self.layers):
            for part in "qkvo":
                self._add(f"layers.{i}.{part}", self.dim)
            self._add(f"layers.{i}.up", 4 * self.dim)
            self.spans[f"layers.{i}.down"] = ("tall", slice(i * self.dim, (i + 1) * self.dim))
        self._add("head", self.vocab)
        self.tall_rows = self.layers * self.dim
        self.slopes = 2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads)

    def _add(self, name, rows):
        self.spans[name] = ("wide", slice(self.wide_rows, self.wide_rows + rows))
        self.wide_rows += rows

    def start(self, rng):
        """Random latent weights."""
        wide = rng.standard_normal((self.wide_rows, self.dim)) / math.sqrt(self.dim)
        tall = rng.standard_normal((self.tall_rows, 4 * self.dim)) / math.sqrt(4 * self.dim)
        wide[self.spans["head"][1]] *= 0.5
        return {"wide": wide.astype(np.float32), "tall": tall.astype(np.float32)}

    def views(self, slabs):
        """{name: tensor} as views of the slabs."""
        return {name: slabs[slab][rows] for name, (slab, rows) in self.spans.items()}

    def _split_heads(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def _join_heads(self, x):
        x = x.transpose(0, 2, 1, 3)
        return x.reshape(*x.shape[:2], self.dim)

    def _bias(self, length):
        distance = np.arange(length)[:, None] - np.arange(length)
        bias = -self.slopes[:, None, None] * distance
        return np.where(distance >= 0, bias, -np.inf).astype(np.float32)

    def _attend(self, a, weight, layer, bias):
        q, k, v = (self._split_heads(a @ weight[f"layers.{layer}.{part}"].T) for part in "qkv")
        scores = q @ k.swapaxes(-1, -2)
        scores *= np.float32(1 / math.sqrt(self.dim // self.heads))
        scores += bias
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return q, k, v, scores, self._join_heads(scores @ v)

    def loss(self, weight, batch, smoothing=0.0, gradient=None):
        """Mean loss of a batch; adds the gradient to the views in `gradient` if there are any."""
        inputs, targets, mask = batch
        bias = self._bias(inputs.shape[1])
        x = weight["embedding"][inputs]
        tape = []
        for layer in range(self.layers):
            a, a_factor = _norm(x)
            q, k, v, attention, mixed = self._attend(a, weight, layer, bias)
            x = x + mixed @ weight[f"layers.{layer}.o"].T
            b, b_factor = _norm(x)
            hidden = np.maximum(b @ weight[f"layers.{layer}.up"].T, 0)
            x = x + hidden @ weight[f"layers.{layer}.down"].T
            tape.append((a, a_factor, q, k, v, attention, mixed, b, b_factor, hidden))
        final, factor = _norm(x)
        logits = final @ weight["head"].T
        logits -= logits.max(axis=-1, keepdims=True)
        law = np.exp(logits)
        total = law.sum(axis=-1, keepdims=True)
        count = mask.sum()
        picked = np.take_along_axis(logits, targets[..., None], axis=-1) - np.log(total)
        mean = -float((picked[..., 0] * mask).sum(dtype=np.float64) / count)
        if gradient is None:
            return mean

        law /= total
        law -= np.float32(smoothing / self.vocab)
        chosen = np.take_along_axis(law, targets[..., None], axis=-1) - np.float32(1 - smoothing)
        np.put_along_axis(law, targets[..., None], chosen, axis=-1)
        law *= (mask / count)[..., None]
        gradient["head"] += _outer(law, final)
        grad = _norm_back(law @ weight["head"], final, factor)
        for layer in reversed(range(self.layers)):
            grad = self._layer_back(grad, tape[layer], f"layers.{layer}.", weight, gradient)
        np.add.at(gradient["embedding"], inputs.ravel(), grad.reshape(-1, self.dim))
        return mean

    def _layer_back(self, grad, tape, name, weight, gradient):
        a, a_factor, q, k, v, attention, mixed, b, b_factor, hidden = tape
        gradient[name + "down"] += _outer(grad, hidden)
        inner = (grad @ weight[name + "down"]) * (hidden > 0)
        gradient[name + "up"] += _outer(inner, b)
        grad = grad + _norm_back(inner @ weight[name + "up"], b, b_factor)

        gradient[name + "o"] += _outer(grad, mixed)
        out = self._split_heads(grad @ weight[name + "o"])
        scores = out @ v.swapaxes(-1, -2)
        scores -= (scores * attention).sum(axis=-1, keepdims=True)
        scores *= attention
        scores *= np.float32(1 / math.sqrt(self.dim // self.heads))
        back = 0
        parts = {"q": scores @ k, "k": scores.swapaxes(-1, -2) @ q, "v": attention.swapaxes(-1, -2) @ out}
        for part, part_grad in parts.items():
            joined = self._join_heads(part_grad)
            gradient[name + part] += _outer(joined, a)
            back = back + joined @ weight[name + part]
        return grad + _norm_back(back, a, a_factor)


# ---------------------------------------------------------------- training


class _Adam:
    """Adam on the slabs, with weight decay beside it."""

    def __init__(self, slabs, fast=0.9, slow=0.99, decay=0.05):
        self.fast, self.slow, self.decay, self.steps = fast, slow, decay, 0
        self.first = {name: np.zeros_like(slab) for name, slab in slabs.items()}
        self.second = {name: np.zeros_like(slab) for name, slab in slabs.items()}

    def step(self, slabs, grads, rate):
        self.steps += 1
        rate *= math.sqrt(1 - self.slow**self.steps) / (1 - self.fast**self.steps)
        for name, slab in slabs.items():
            first, second, grad = self.first[name], self.second[name], grads[name]
            first += np.float32(1 - self.fast) * (grad - first)
            second += np.float32(1 - self.slow) * (grad * grad - second)
            slab *= np.float32(1 - rate * self.decay)
            slab -= np.float32(rate) * first / (np.sqrt(second) + np.float32(1e-9))


def _checked_config(config):
    """The config with plain numbers, or an error."""
    checked = {}
    for name, least in (("vocab", 1), ("dim", 1), ("heads", 1), ("context", 1), ("layers", 0), ("seed", 0)):
        if name not in config:
            raise ValueError(f"the config has no {name}")
        if isinstance(config[name], bool):
            raise TypeError(f"{name} must be an int")
        checked[name] = operator.index(config[name])
        if checked[name] < least:
            raise ValueError(f"{name} must be at least {least}, got {checked[name]}")
    if "seconds" not in config:
        raise ValueError("the config has no seconds")
    if isinstance(config["seconds"], bool) or not isinstance(config["seconds"], numbers.Real):
        raise TypeError("seconds must be a number")
    checked["seconds"] = float(config["seconds"])
    if not 0 <= checked["seconds"] < math.inf:
        raise ValueError(f"seconds must not be negative, got {checked['seconds']}")
    if checked["dim"] % checked["heads"]:
        raise ValueError(f"dim {checked['dim']} is not divisible by heads {checked['heads']}")
    return checked


def _checked_documents(documents, vocab):
    """The documents as lists of ints, or an error."""
    checked = [[_token(token) for token in document] for document in documents]
    if any(token >= vocab for document in checked for token in document):
        raise ValueError(f"a token id is outside 0 ... {vocab - 1}")
    if all(len(document) < 2 for document in checked):
        raise ValueError("no token has a successor")
    return checked


def _quantized(slabs):
    return {name: ternarize(slab, GROUP) for name, slab in slabs.items()}


def _floats(quantized):
    return {name: _expand(*pair, GROUP) for name, pair in quantized.items()}


def _answer(model, quantized):
    """{name: (codes, scales)} with arrays of their own."""
    return {
        name: tuple(array[rows].copy() for array in quantized[slab]) for name, (slab, rows) in model.spans.items()
    }


def _rows_per_step(model, pieces, seconds):
    """How many pieces make a step that is neither wasteful nor slow."""
    length = max(piece.size for piece in pieces) - 1
    weights = model.wide_rows * model.dim + model.tall_rows * 4 * model.dim
    by_tokens = 512 // length
    by_time = seconds * 1e8 / (6 * weights * length)
    by_memory = 4_000_000 / (length * max(model.heads * length, model.vocab, 4 * model.dim))
    return max(1, int(min(by_tokens, by_time, by_memory, len(pieces))))


class _Trainer:
    """Steps on training pieces until the deadline; remembers the best quantised weights."""

    PEAK_RATE = 0.02
    PATIENCE = 0.35

    def __init__(self, model, slabs, pieces, held_out, rng):
        self.model, self.slabs, self.pieces, self.rng = model, slabs, pieces, rng
        self.adam = _Adam(slabs)
        self.quantized = _quantized(slabs)
        self.grads = {name: np.zeros_like(slab) for name, slab in slabs.items()}
        self.grad_views = model.views(self.grads)
        tokens = sum(len(piece) - 1 for piece in {tuple(piece.tolist()) for piece in pieces})
        self.smoothing = min(0.5, 0.5 * model.vocab / tokens) if held_out else 0.5
        self.queue = []
        self.held_out = held_out
        self.best, self.best_loss = self.quantized, math.inf

    def _next_pieces(self, count):
        if len(self.queue) < count:
            self.queue.extend(self.rng.permutation(len(self.pieces)).tolist())
        chosen, self.queue = self.queue[:count], self.queue[count:]
        return [self.pieces[i] for i in chosen]

    def step(self, count, rate):
        weight = self.model.views(_floats(self.quantized))
        for grad in self.grads.values():
            grad.fill(0)
        self.model.loss(weight, _batch(self._next_pieces(count)), self.smoothing, self.grad_views)
        self.adam.step(self.slabs, self.grads, rate)
        self.quantized = _quantized(self.slabs)

    def judge(self):
        """Keep the present weights if they are the best so far on held-out text."""
        if not self.held_out:
            self.best = self.quantized
            return True
        weight = self.model.views(_floats(self.quantized))
        counts = [batch[2].sum() for batch in self.held_out]
        loss = np.average([self.model.loss(weight, batch) for batch in self.held_out], weights=counts)
        if loss >= self.best_loss:
            return False
        self.best, self.best_loss = self.quantized, loss
        return True

    def run(self, began, seconds):
        count = _rows_per_step(self.model, self.pieces, seconds)
        most_steps = math.inf if self.held_out else 200
        slowest, steps, judged, improved = 0.0, 0, 0.0, 0.0
        while steps < most_steps:
            now = (time.perf_counter() - began) / seconds
            if now + slowest >= 1:
                break
            progress = max(now, steps / most_steps)
            rate = self.PEAK_RATE * min(1, (steps + 1) / 20) * 0.5 * (1 + math.cos(math.pi * progress))
            self.step(count, rate)
            steps += 1
            if now - judged >= 0.04:
                judged = now
                improved = now if self.judge() else improved
                if now - improved > self.PATIENCE:
                    break
            slowest = max(slowest, (time.perf_counter() - began) / seconds - now)
        self.steps = steps
        self.judge()
        return self.best


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    began = time.perf_counter()
    config = _checked_config(config)
    documents = _checked_documents(documents, config["vocab"])
    model = _Model(config)
    rng = np.random.default_rng(config["seed"])
    slabs = model.start(rng)
    seconds = config["seconds"]
    if seconds == 0:
        return _answer(model, _quantized(slabs))
    training, validation = _hold_out(documents)
    length = min(config["context"], 256)
    pieces = _windows(training, length)
    held_out = _windows(validation, length)
    size = _rows_per_step(model, pieces + held_out, seconds)
    held_out = held_out[: 3 * size]
    batches = [_batch(held_out[i : i + size]) for i in range(0, len(held_out), size)]
    trainer = _Trainer(model, slabs, pieces, batches, rng)
    return _answer(model, trainer.run(began, seconds))
