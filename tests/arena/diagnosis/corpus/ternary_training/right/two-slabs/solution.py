"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md.

The quantiser counts in fixed point, so its sums are exact and no layout of the data can change a result.
The trainer keeps all matrices in two slabs, one per row length, so that a step quantises and updates twice.
"""

import hashlib
import time
from operator import index

import numpy as np

from slab_model import loss_and_gradients, token_logits

GROUP = 128
THRESHOLD = 0.7  # of the mean magnitude; below it a weight becomes 0
FIXED_BITS = 24  # magnitudes are rounded to this many bits below their group's power of two
LEAST_EXPONENT = -64  # far below the smallest float16: such groups vanish anyway
LARGEST_EXPONENT = 1000  # far above the largest float16, and ldexp does not overflow
LARGEST_SCALE = float(np.finfo(np.float16).max)
HASH_BITS = 53


def ternarize(w, group_size=GROUP):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    if w.dtype.kind != "f" or w.dtype.itemsize not in (4, 8):
        raise TypeError("w must be float32 or float64")
    group_size = _whole(group_size, "group_size", least=1)
    if w.ndim == 0:
        raise ValueError("w needs an axis")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    return _quantise(w.astype(w.dtype.newbyteorder("="), copy=False), group_size)


def _quantise(w, group_size):
    """`ternarize` of what is known to be good."""
    n = w.shape[-1]
    width = max(1, min(group_size, n))
    groups = _ceil_div(n, width)
    grouped = _padded(w, groups * width).reshape(*w.shape[:-1], groups, width)
    sizes = np.minimum(width, n - width * np.arange(groups))
    magnitude = np.abs(grouped)
    exponent = np.frexp(magnitude.max(axis=-1))[1]
    exponent = np.maximum(exponent, LEAST_EXPONENT).astype(np.int32)
    unit = np.ldexp(w.dtype.type(1), FIXED_BITS - exponent)
    magnitude *= unit[..., None]
    np.rint(magnitude, out=magnitude)
    mean = magnitude.sum(axis=-1, dtype=np.float64) / sizes
    chosen = magnitude > (THRESHOLD * mean)[..., None]
    magnitude *= chosen
    count = np.maximum(np.count_nonzero(chosen, axis=-1), 1)
    mean = magnitude.sum(axis=-1, dtype=np.float64) / count
    scales = np.ldexp(mean, np.minimum(exponent, LARGEST_EXPONENT) - FIXED_BITS)
    scales = np.minimum(scales, LARGEST_SCALE).astype(np.float16)
    chosen &= (scales > 0)[..., None]
    codes = np.where(grouped < 0, np.int8(-1), np.int8(1)) * chosen
    return np.ascontiguousarray(codes.reshape(*w.shape[:-1], groups * width)[..., :n]), scales


def dequantize(codes, scales, group_size=GROUP):
    """code times the scale of its group, float32."""
    codes, scales = _codes(codes), np.asarray(scales)
    group_size = _whole(group_size, "group_size", least=1)
    if scales.dtype.kind != "f":
        raise TypeError("scales must be floating-point")
    n = codes.shape[-1]
    if scales.shape != (*codes.shape[:-1], _ceil_div(n, group_size)):
        raise ValueError("scales do not fit the codes")
    per_weight = np.repeat(scales.astype(np.float32), min(group_size, max(n, 1)), axis=-1)[..., :n]
    return codes * per_weight


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _codes(codes)
    n = codes.shape[-1]
    digits = (_padded(codes, 4 * _ceil_div(n, 4)) + np.int8(1)).view(np.uint8)
    packed = digits[..., 0::4].copy()
    for place in (1, 2, 3):
        packed |= digits[..., place::4] << np.uint8(2 * place)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    shape = tuple(_whole(size, "a size", least=0) for size in shape)
    if not shape or packed.shape != (*shape[:-1], _ceil_div(shape[-1], 4)):
        raise ValueError("the bytes do not fit the shape")
    digits = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
    table = (digits - 1).astype(np.int8)
    codes = table[packed].reshape(*shape[:-1], 4 * packed.shape[-1])[..., : shape[-1]]
    if (codes > 1).any():
        raise ValueError("a place has both bits set")
    return np.ascontiguousarray(codes)


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must lie between 0 and 1")
    sides = [], []
    for i, document in enumerate(documents):
        sides[_draw(document) < fraction].append(i)
    return sides


def _draw(document):
    """A number in [0, 1) that only the tokens decide."""
    tokens = [_whole(token, "a token", least=0) for token in document]
    digest = hashlib.sha256(",".join(f"{token:x}" for token in tokens).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - HASH_BITS)) / 2**HASH_BITS


def _ceil_div(n, size):
    return -(-n // size)


def _padded(array, n):
    """The array with zeros up to n along its last axis; contiguous, and new only if it must be."""
    if array.shape[-1] == n:
        return np.ascontiguousarray(array)
    answer = np.zeros((*array.shape[:-1], n), array.dtype)
    answer[..., : array.shape[-1]] = array
    return answer


def _codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes need an axis")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def _whole(number, name, least):
    number = index(number)
    if number < least:
        raise ValueError(f"{name} must be at least {least}")
    return number


LEAST = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}
MOST_SECONDS = 60
LEARNING_RATE = 0.07  # in units of a tensor's starting spread
DECAYS = (0.9, 0.98)
TOKENS_PER_STEP = 512
HELD_OUT = 0.1
BLIND_SMOOTHING = 0.35  # at least, where nothing can be held out
CHECKS = 16
SHRINKAGE = 0.002  # of a weight per step, in units of the learning rate
TEMPERATURES = np.array([0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2])


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    begin = time.perf_counter()
    config = _checked(config)
    pieces = _pieces(documents, config)
    rng = np.random.default_rng(config["seed"])
    slabs = Slabs(config, rng)
    if config["seconds"] > 0:
        _fit(slabs, pieces, config, rng, begin)
    return slabs.ternary()


def _checked(config):
    """The config with plain numbers, or an error."""
    missing = [name for name in (*LEAST, "seconds") if name not in config]
    if missing:
        raise ValueError(f"config lacks {missing}")
    good = {name: _whole(config[name], name, least) for name, least in LEAST.items()}
    good["seconds"] = config["seconds"] + 0.0
    if not 0 <= good["seconds"] <= MOST_SECONDS:
        raise ValueError("seconds out of range")
    if good["dim"] % good["heads"]:
        raise ValueError("dim must be divisible by heads")
    return good


def _pieces(documents, config):
    """The documents in pieces of at most context + 1 tokens in which every successor occurs once."""
    pieces = []
    for document in documents:
        tokens = [_whole(token, "a token", least=0) for token in document]
        if tokens and max(tokens) >= config["vocab"]:
            raise ValueError("a token is outside the vocabulary")
        step = config["context"]
        pieces += [np.array(tokens[at : at + step + 1]) for at in range(0, len(tokens) - 1, step)]
    if not pieces:
        raise ValueError("no token has a successor")
    return pieces


class Slabs:
    """All matrices of the model, stacked by row length into one narrow and one wide slab."""

    def __init__(self, config, rng):
        dim, vocab, layers = config["dim"], config["vocab"], config["layers"]
        self.shape = layers, config["heads"]
        narrow = {"embedding": vocab}
        for i in range(layers):
            narrow |= {f"layers.{i}.{name}": dim for name in "qkvo"} | {f"layers.{i}.up": 4 * dim}
        narrow["head"] = vocab
        wide = {f"layers.{i}.down": dim for i in range(layers)}
        self.places = [_places(narrow), _places(wide)]
        self.spreads = [np.full((sum(narrow.values()), 1), dim**-0.5), np.full((layers * dim, 1), dim**-0.5 / 2)]
        self.spreads[0][self.places[0]["embedding"]] = 0.5
        self.latent = [
            (rng.standard_normal((len(spread), length)) * spread).astype(np.float32)
            for spread, length in zip(self.spreads, (dim, 4 * dim))
        ]
        self.latent[0][self.places[0]["head"]] *= 0.1
        self.moments = [(np.zeros_like(slab), np.zeros_like(slab)) for slab in self.latent]
        self.steps = 0

    def ternary(self):
        """The answer of `train`: codes and scales of every tensor."""
        answer = {}
        for slab, places in zip(self.latent, self.places):
            codes, scales = _quantise(slab, GROUP)
            answer |= {name: (codes[rows].copy(), scales[rows].copy()) for name, rows in places.items()}
        return answer

    def weights(self):
        """What the model computes with: the ternarised weights as float32."""
        answer = {}
        for slab, places in zip(self.latent, self.places):
            values = dequantize(*_quantise(slab, GROUP))
            answer |= {name: values[rows] for name, rows in places.items()}
        return answer

    def update(self, gradients, rate):
        """One step of Adam on the latent weights; the quantiser counts as the identity."""
        self.steps += 1
        fast, slow = DECAYS
        for k, places in enumerate(self.places):
            gradient = np.concatenate([gradients[name] for name in places]) if places else 0
            first, second = self.moments[k]
            first += (1 - fast) * (gradient - first)
            second += (1 - slow) * (gradient * gradient - second)
            size = np.sqrt(second / (1 - slow**self.steps)) + 1e-9
            move = first / (1 - fast**self.steps) / size
            self.latent[k] *= np.float32(1 - SHRINKAGE * rate)
            self.latent[k] -= (rate * self.spreads[k]).astype(np.float32) * move


def _places(sizes):
    """The rows of each named matrix in a slab."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends)}


def _fit(slabs, pieces, config, rng, begin):
    """Train until the time is used up, and leave the best weights in the slabs."""
    learned, held_out = _hold_out(pieces, rng)
    smoothing = _smoothing(learned, config["vocab"])
    if not held_out:
        smoothing = max(smoothing, BLIND_SMOOTHING)
    batches = _batches(learned, rng)
    best, best_loss, checked = None, np.inf, 0
    while (progress := (time.perf_counter() - begin) / config["seconds"]) < 1:
        batch = next(batches)
        _, gradients = loss_and_gradients(slabs.weights(), slabs.shape, *batch, smoothing)
        slabs.update(gradients, LEARNING_RATE * _schedule(progress))
        if held_out and progress * CHECKS >= checked + 1:
            checked = int(progress * CHECKS)
            loss, temperature = _check(slabs, held_out)
            if loss < best_loss:
                best, best_loss = ([slab.copy() for slab in slabs.latent], temperature), loss
    if best:
        slabs.latent = best[0]
        slabs.latent[0][slabs.places[0]["head"]] *= best[1]


def _hold_out(pieces, rng):
    """Pieces to learn and pieces to check with; equal ones on one side, none held out if all are equal."""
    distinct = list({piece.tobytes(): piece for piece in pieces})
    chosen = rng.permutation(len(distinct))[: max(1, int(HELD_OUT * len(distinct)))] if len(distinct) > 1 else ()
    aside = {distinct[i] for i in chosen}
    learned = [piece for piece in pieces if piece.tobytes() not in aside]
    return learned, [piece for piece in pieces if piece.tobytes() in aside]


def _schedule(progress):
    """The share of the learning rate: a short rise, then a cosine to nothing."""
    return min(1.0, progress * 50 + 0.02) * (0.5 + 0.5 * np.cos(np.pi * min(progress, 1.0))) + 0.01


def _smoothing(pieces, vocab):
    """How much of the uniform law the targets are mixed with: much where text is scarce."""
    distinct = {piece.tobytes(): len(piece) - 1 for piece in pieces}
    return 0.5 / (1 + sum(distinct.values()) / (4 * vocab))


def _padded_batch(pieces):
    lengths = np.array([len(piece) for piece in pieces])
    tokens = np.zeros((len(pieces), lengths.max()), np.int64)
    for row, piece in zip(tokens, pieces):
        row[: len(piece)] = piece
    return tokens, lengths


def _batches(pieces, rng):
    """Padded batches of pieces in random order, for ever."""
    size = max(1, TOKENS_PER_STEP // max(len(piece) for piece in pieces))
    while True:
        order = rng.permutation(len(pieces))
        for at in range(0, len(order), size):
            yield _padded_batch([pieces[i] for i in order[at : at + size]])


def _check(slabs, pieces):
    """The loss on held-out pieces at the best temperature, and that temperature."""
    totals, weights = np.zeros(len(TEMPERATURES)), slabs.weights()
    size = max(1, TOKENS_PER_STEP // max(len(piece) for piece in pieces))
    count = 0
    for at in range(0, min(len(pieces), 4 * size), size):
        tokens, lengths = _padded_batch(pieces[at : at + size])
        logits = token_logits(weights, slabs.shape, tokens[:, :-1])
        valid = np.arange(tokens.shape[1] - 1) < lengths[:, None] - 1
        logits, targets = logits[valid], tokens[:, 1:][valid]
        picked = logits[np.arange(len(targets)), targets]
        top = logits.max(axis=-1, keepdims=True)
        for k, temperature in enumerate(TEMPERATURES):
            spread = np.exp((logits - top) * np.float32(temperature)).sum(axis=-1)
            totals[k] += (np.log(spread) + (top[:, 0] - picked) * temperature).sum()
        count += len(targets)
    k = int(totals.argmin())
    return totals[k] / count, float(TEMPERATURES[k])
