"""Ternary weights by exhaustive choice, packing by bits, and a model of word pairs.

Of the small model only embedding and head are used: the layers stay at zero and pass everything on.
The logits then depend on the last token alone, and all of the training text is one table of counts.
"""

import time
import zlib

import numpy as np

SQUARE = ("q", "k", "v", "o")
_TWO_BITS = np.array([[(byte >> shift) & 3 for shift in (0, 2, 4, 6)] for byte in range(256)])


def ternarize(w, group_size=128):
    """The codes with the least squared error: in each group, the best number of largest weights."""
    if not isinstance(w, np.ndarray) or w.dtype.char not in "fd":
        raise TypeError("w must be a float32 or float64 array")
    if w.ndim < 1 or not np.all(np.isfinite(w)):
        raise ValueError("w must have an axis and be finite")
    if group_size < 1:
        raise ValueError("group_size must be positive")
    width = w.shape[-1]
    rows = np.array(w, dtype=np.longdouble).reshape(-1, width) if w.size else np.zeros((0, width))
    bounds = list(range(0, width, group_size))
    codes = np.zeros(rows.shape, dtype=np.int8)
    scales = np.zeros((len(rows), len(bounds)), dtype=np.float16)
    for number, begin in enumerate(bounds):
        block = rows[:, begin : begin + group_size]
        if len(block):
            codes[:, begin : begin + group_size], scales[:, number] = _best_codes(block)
    return codes.reshape(w.shape), scales.reshape(*w.shape[:-1], len(bounds))


def _best_codes(block):
    size = np.abs(block)
    falling = -np.sort(-size, axis=1)
    sums = np.cumsum(falling, axis=1)
    how_many = np.arange(1, block.shape[1] + 1)
    keep = np.argmax(sums * sums / how_many, axis=1)
    every = np.arange(len(block))
    least = falling[every, keep]
    # Equal weights are kept or dropped together.
    kept = (size >= least[:, None]) & (size > 0)
    number = np.maximum(kept.sum(axis=1), 1)
    mean = np.where(kept, size, 0).sum(axis=1) / number
    scale = np.where(mean > 65504, 65504, mean).astype(np.float16)
    kept[scale == 0] = False
    return np.where(kept, np.where(block < 0, -1, 1), 0), scale


def dequantize(codes, scales, group_size=128):
    """code times scale."""
    _require_codes(codes)
    if group_size < 1:
        raise ValueError("group_size must be positive")
    width = codes.shape[-1]
    wanted = (*codes.shape[:-1], (width + group_size - 1) // group_size)
    if np.shape(scales) != wanted:
        raise ValueError(f"scales must have shape {wanted}")
    wide = np.repeat(np.asarray(scales, dtype=np.float32), group_size, axis=-1)[..., :width]
    return np.multiply(wide, codes, dtype=np.float32)


def pack(codes):
    """Two bits a code, written by `packbits`."""
    _require_codes(codes)
    spare = -codes.shape[-1] % 4
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, spare)]
    raised = np.pad(codes, padding) + 1
    bits = np.stack([raised & 1, raised >> 1], axis=-1)
    flat = bits.reshape(*raised.shape[:-1], 2 * raised.shape[-1])
    return np.packbits(flat.astype(np.uint8), axis=-1, bitorder="little")


def unpack(packed, shape):
    """Look every byte up in a table of its four codes."""
    shape = tuple(shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed must be uint8")
    if not shape or packed.shape != (*shape[:-1], (shape[-1] + 3) // 4):
        raise ValueError("packed does not fit the shape")
    found = _TWO_BITS[packed].reshape(*packed.shape[:-1], packed.shape[-1] * 4)
    found = found[..., : shape[-1]]
    if found.size and found.max() > 2:
        raise ValueError("not a code")
    return (found - 1).astype(np.int8)


def split(documents, fraction):
    """By checksum."""
    if fraction < 0 or fraction > 1:
        raise ValueError("fraction must be between 0 and 1")
    sides = ([], [])
    for index, document in enumerate(documents):
        sides[_checksum(document) < fraction * 2**32].append(index)
    return sides


def train(documents, config):
    """Fit head · norm(embedding) to the counts of word pairs."""
    started = time.monotonic()
    _require_config(config)
    tables = _pair_counts(documents, config["vocab"])
    rng = np.random.default_rng(config["seed"])
    vocab, dim = config["vocab"], config["dim"]
    start = {"embedding": rng.normal(size=(vocab, dim)), "head": rng.normal(0, 0.01, (vocab, dim))}
    found = _descend(start, *tables, started + config["seconds"])
    answer = {name: ternarize(value) for name, value in found.items()}
    for layer in range(config["layers"]):
        shapes = dict.fromkeys(SQUARE, (dim, dim))
        shapes |= {"up": (4 * dim, dim), "down": (dim, 4 * dim)}
        for name, shape in shapes.items():
            answer[f"layers.{layer}.{name}"] = ternarize(np.zeros(shape))
    return answer


def _checksum(document):
    words = np.array([int(token) for token in document], dtype="<u8")
    return zlib.crc32(words.tobytes())


def _pair_counts(documents, vocab):
    """Counts of (word, next word), for documents to learn from and for those to stop by."""
    learn, stop = np.zeros((vocab, vocab)), np.zeros((vocab, vocab))
    if any(token < 0 or token >= vocab for document in documents for token in document):
        raise ValueError("token outside the vocabulary")
    order = sorted({_checksum(document) for document in documents if len(document) > 1})
    if not order:
        raise ValueError("nothing follows anything")
    bound = order[(len(order) - 1) // 6]
    for document in documents:
        tokens = np.array(document, dtype=int)
        if tokens.size > 1:
            table = stop if _checksum(document) <= bound else learn
            np.add.at(table, (tokens[:-1], tokens[1:]), 1)
    return (learn, stop) if learn.any() else (stop, stop)


def _descend(latent, learn, stop, deadline):
    """Gradient steps of a fixed length for every row, kept while the other counts agree."""
    best = {name: value.copy() for name, value in latent.items()}
    best_loss, waiting, step = _loss(latent, stop)[0], 0, 0
    pace = {name: np.zeros_like(value) for name, value in latent.items()}
    while time.monotonic() < deadline and waiting < 60:
        step += 1
        gradients = _loss(latent, learn)[1]
        for name, gradient in gradients.items():
            length = np.linalg.norm(gradient, axis=1, keepdims=True)
            pace[name] = 0.8 * pace[name] + 0.2 * gradient / (length + 1e-9)
            latent[name] -= (0.6 if name == "embedding" else 0.25) * pace[name] / (1 + step / 100)
        loss = _loss(latent, stop)[0]
        waiting += 1
        if loss < best_loss:
            best_loss, waiting = loss, 0
            best = {name: value.copy() for name, value in latent.items()}
    return best


def _loss(latent, counts):
    """Mean negative log-likelihood of the counts, and gradients straight through the quantiser."""
    embedding, head = (
        dequantize(*ternarize(latent[name])).astype(float) for name in ("embedding", "head")
    )
    root = np.sqrt((embedding**2).mean(axis=1, keepdims=True) + 1e-6)
    normed = embedding / root
    logits = normed @ head.T
    logits -= logits.max(axis=1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    total = counts.sum()
    dlogits = (np.exp(logp) * counts.sum(axis=1, keepdims=True) - counts) / total
    dnormed = dlogits @ head
    dembedding = (dnormed - normed * (dnormed * normed).mean(axis=1, keepdims=True)) / root
    gradients = {"embedding": dembedding, "head": dlogits.T @ normed}
    return -(counts * logp).sum() / total, gradients


def _require_codes(codes):
    if not isinstance(codes, np.ndarray) or codes.dtype != np.int8:
        raise TypeError("codes must be an int8 array")
    if codes.ndim < 1 or not np.isin(codes, (-1, 0, 1)).all():
        raise ValueError("codes must be -1, 0 or 1, with at least one axis")


def _require_config(config):
    for name in ("vocab", "dim", "heads", "context"):
        if config[name] < 1:
            raise ValueError(f"{name} must be positive")
    if config["layers"] < 0 or config["seconds"] < 0 or config["dim"] % config["heads"]:
        raise ValueError("layers, seconds or heads out of range")
