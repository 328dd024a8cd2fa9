"""Ternary weights by threshold, base-4 packing, and a model differentiated by a small tape.

Documents of a batch are laid end to end in one stream; a block mask keeps them apart.
"""

import math
import time

import numpy as np
from tape import Tape

GROUP = 128
STREAM = 200
JUDGES, PATIENCE = 10, 20
MASK64 = (1 << 64) - 1


def ternarize(w, group_size=GROUP):
    """Weights above 0.7 of the group's mean magnitude count; one group after the other."""
    w = np.asarray(w)
    if w.dtype.name not in ("float32", "float64"):
        raise TypeError("weights must be floating point")
    if w.ndim == 0:
        raise ValueError("weights must not be a scalar")
    if not isinstance(group_size, int | np.integer) or group_size <= 0:
        raise ValueError("group_size must be a positive integer")
    if not np.isfinite(w).all():
        raise ValueError("weights must be finite")
    codes = np.empty(w.shape, dtype=np.int8)
    scales = []
    for begin in range(0, w.shape[-1], group_size):
        piece = w[..., begin : begin + group_size].astype(np.float64)
        codes[..., begin : begin + group_size], scale = _one_group(piece)
        scales.append(scale)
    if not scales:
        return codes, np.zeros((*w.shape[:-1], 0), dtype=np.float16)
    return codes, np.stack(scales, axis=-1)


def _one_group(piece):
    magnitude = np.abs(piece)
    top = magnitude.max(axis=-1, initial=0.0)
    unit = np.where(top > 0, top, 1.0)
    relative = magnitude / unit[..., None]
    large = relative > 0.7 * relative.mean(axis=-1, keepdims=True)
    share = (relative * large).sum(axis=-1) / np.maximum(large.sum(axis=-1), 1)
    with np.errstate(over="ignore"):
        scale = (share * unit).astype(np.float16)
    scale = np.where(np.isinf(scale), np.float16(65504), scale).astype(np.float16)
    alive = (scale > 0)[..., None] & large
    return np.where(alive, np.copysign(1.0, piece), 0.0), scale


def dequantize(codes, scales, group_size=GROUP):
    """One group after the other."""
    codes, scales = _codes(codes), np.asarray(scales)
    if group_size <= 0:
        raise ValueError("group_size must be positive")
    if scales.shape != (*codes.shape[:-1], math.ceil(codes.shape[-1] / group_size)):
        raise ValueError("scales do not fit the codes")
    out = codes.astype(np.float32)
    for number in range(scales.shape[-1]):
        out[..., number * group_size : (number + 1) * group_size] *= scales[..., number, None]
    return out


def pack(codes):
    """Digits of base 4, the first the least."""
    codes = _codes(codes)
    *lead, width = codes.shape
    digits = np.full((*lead, math.ceil(width / 4), 4), 1, dtype=np.int64)
    digits.reshape(*lead, math.ceil(width / 4) * 4)[..., :width] = codes + 1
    return (digits @ np.array([1, 4, 16, 64])).astype(np.uint8)


def unpack(packed, shape):
    """Divide by 4 again and again."""
    packed, shape = np.asarray(packed), tuple(shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed must be uint8")
    if len(shape) == 0 or any(size < 0 for size in shape):
        raise ValueError("bad shape")
    if packed.shape != (*shape[:-1], math.ceil(shape[-1] / 4)):
        raise ValueError("packed does not belong to this shape")
    codes = np.zeros(shape, dtype=np.int8)
    rest = packed.astype(np.int64)
    for place in range(4):
        rest, digit = np.divmod(rest, 4)
        target = codes[..., place::4]
        digit = digit[..., : target.shape[-1]]
        if (digit > 2).any():
            raise ValueError("a digit of 3 is not a code")
        target[...] = digit - 1
    return codes


def split(documents, fraction):
    """By a 64-bit hash written out by hand."""
    if not (0 <= fraction <= 1):
        raise ValueError("fraction out of range")
    valid = [i for i, document in enumerate(documents) if _hash(document) < int(fraction * 2**64)]
    held = set(valid)
    return [i for i in range(len(documents)) if i not in held], valid


def _hash(document):
    state = 0xCBF29CE484222325
    for token in [*document, len(document)]:
        state = (state ^ int(token)) * 0x9E3779B97F4A7C15 & MASK64
        state ^= state >> 29
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK64
    return state ^ (state >> 31)


def _codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0 or (codes.size and np.abs(codes.astype(int)).max() > 1):
        raise ValueError("codes must be -1, 0, 1")
    return codes


def train(documents, config):
    """Sign descent with momentum, on the latent weights, through a tape."""
    lacking = {"vocab", "dim", "layers", "heads", "context", "seconds", "seed"} - set(config)
    if lacking:
        raise ValueError(f"config without {lacking}")
    deadline = time.monotonic() + config["seconds"]
    pieces = _prepare(documents, config)
    rng = np.random.default_rng((7, config["seed"]))
    latent = {}
    for name, shape in _shapes(config).items():
        latent[name] = rng.normal(0.0, 0.02 if name == "head" else shape[1] ** -0.5, shape)
    if config["seconds"] > 0:
        latent = _search(latent, pieces, config, rng, deadline)
    return {name: ternarize(value) for name, value in latent.items()}


def _prepare(documents, config):
    if min(config["vocab"], config["dim"], config["heads"], config["context"]) < 1:
        raise ValueError("config values must be positive")
    if config["layers"] < 0 or not config["seconds"] >= 0 or config["dim"] % config["heads"] != 0:
        raise ValueError("config values out of range")
    pieces = []
    for document in documents:
        if any(not 0 <= token < config["vocab"] for token in document):
            raise ValueError("token outside the vocabulary")
        step = config["context"] + 1
        cut = [tuple(document[i : i + step]) for i in range(0, len(document), step)]
        pieces += [piece for piece in cut if len(piece) > 1]
    if not pieces and not any(len(document) > 1 for document in documents):
        raise ValueError("there is no pair of tokens")
    return pieces


def _shapes(config):
    vocab, dim = config["vocab"], config["dim"]
    shapes = {"embedding": (vocab, dim), "head": (vocab, dim)}
    for layer in range(config["layers"]):
        for name in "qkvo":
            shapes[f"layers.{layer}.{name}"] = (dim, dim)
        shapes[f"layers.{layer}.up"] = (4 * dim, dim)
        shapes[f"layers.{layer}.down"] = (dim, 4 * dim)
    return shapes


def _search(latent, pieces, config, rng, deadline):
    different = sorted(set(pieces), key=_hash)
    judges = set(different[: max(1, len(different) // 7)])
    learn = [piece for piece in pieces if piece not in judges] or pieces
    judged = _stream([p for p in different if p in judges][:JUDGES])
    begun, span = time.monotonic(), max(deadline - time.monotonic(), 1e-3)
    momentum = {name: np.zeros_like(value) for name, value in latent.items()}
    best, best_loss, since, step = _snapshot(latent), _loss(latent, judged, config)[0], 0, 0
    while time.monotonic() < deadline and since < PATIENCE:
        batch = _draw_batch(learn, rng)
        gradients = _loss(latent, _stream(batch), config)[1]
        rate = 0.1 * max(0.1, 1.0 - (time.monotonic() - begun) / span)
        for name, gradient in gradients.items():
            momentum[name] = 0.9 * momentum[name] + 0.1 * gradient
            move = np.sign(momentum[name] + 0.1 * gradient)
            latent[name] -= rate * latent[name].shape[1] ** -0.5 * move
        step += 1
        if step % 8 == 0 or time.monotonic() >= deadline:
            loss = _loss(latent, judged, config)[0]
            since += 1
            if loss < best_loss:
                best, best_loss, since = _snapshot(latent), loss, 0
    return best


def _snapshot(latent):
    return {name: value.copy() for name, value in latent.items()}


def _draw_batch(pieces, rng):
    batch, tokens = [], 0
    while tokens < STREAM:
        batch.append(pieces[int(rng.integers(len(pieces)))])
        tokens += len(batch[-1]) - 1
    return batch


def _stream(pieces):
    """Tokens, targets, number of the document and place in it, end to end."""
    tokens = np.concatenate([piece[:-1] for piece in pieces])
    targets = np.concatenate([piece[1:] for piece in pieces])
    owner = np.repeat(np.arange(len(pieces)), [len(piece) - 1 for piece in pieces])
    place = np.concatenate([np.arange(len(piece) - 1) for piece in pieces])
    return tokens, targets, owner, place


def _loss(latent, stream, config):
    tokens, targets, owner, place = stream
    back = place[:, None] - place[None, :]
    hidden = (owner[:, None] != owner[None, :]) | (back < 0)
    tape = Tape()
    quantised = {n: dequantize(*ternarize(v)).astype(np.float32) for n, v in latent.items()}
    leaves = {name: tape.leaf(value) for name, value in quantised.items()}
    x = tape.rows(leaves["embedding"], tokens)
    heads = config["heads"]
    for layer in range(config["layers"]):
        own = {n: leaves[f"layers.{layer}.{n}"] for n in ("q", "k", "v", "o", "up", "down")}
        normed = tape.normalise(x)
        q, k, v = (tape.linear(normed, own[n]) for n in "qkv")
        mixed = []
        for head in range(heads):
            slope = 2.0 ** (-8.0 * (head + 1) / heads)
            bias = np.where(hidden, -1e9, -slope * back).astype(np.float32)
            mixed.append(tape.attend(*(tape.columns(t, head, heads) for t in (q, k, v)), bias))
        x = tape.add(x, tape.linear(tape.join(mixed), own["o"]))
        inner = tape.relu(tape.linear(tape.normalise(x), own["up"]))
        x = tape.add(x, tape.linear(inner, own["down"]))
    logits = tape.linear(tape.normalise(x), leaves["head"])
    loss = tape.cross_entropy(logits, targets)
    return loss, tape.gradients(leaves)
