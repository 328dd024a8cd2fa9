"""Ternary weights by exhaustive choice, packing by bits, and training one document at a time."""

import time
import zlib

import numpy as np
from trainer import descend, shapes_of

KEYS = ("vocab", "dim", "layers", "heads", "context", "seconds", "seed")
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
    values = np.empty(codes.shape, dtype=np.float32)
    for number, begin in enumerate(range(0, width, group_size)):
        own = slice(begin, begin + group_size)
        scale = np.asarray(scales, dtype=np.float32)[..., number, None]
        values[..., own] = np.where(codes[..., own] == 0, 0, np.copysign(scale, codes[..., own]))
    return values


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
    if not (fraction >= 0 and fraction <= 1):
        raise ValueError("fraction must be between 0 and 1")
    sides = ([], [])
    for index, document in enumerate(documents):
        sides[_checksum(document) < fraction * 2**32].append(index)
    return sides


def train(documents, config):
    """Cut, hold a sixth of the pieces out, descend."""
    started = time.monotonic()
    _require_config(config)
    learn, stop = _sides(_cut(documents, config))
    rng = np.random.default_rng([config["seed"], 11])
    start = {
        name: rng.normal(0.0, columns**-0.5, (rows, columns))
        for name, (rows, columns) in shapes_of(config).items()
    }

    def shipped(latent):
        return {name: dequantize(*ternarize(w)).astype(float) for name, w in latent.items()}

    deadline = started + config["seconds"]
    found = descend(start, learn, stop, config, shipped, deadline) if config["seconds"] else start
    return {name: ternarize(value) for name, value in found.items()}


def _cut(documents, config):
    """Pieces of 2 to context + 1 tokens; neighbours share one token."""
    pieces = []
    for document in documents:
        if any(token < 0 or token >= config["vocab"] for token in document):
            raise ValueError("token outside the vocabulary")
        for begin in range(0, len(document) - 1, config["context"]):
            pieces.append(tuple(document[begin : begin + config["context"] + 1]))
    if not pieces:
        raise ValueError("nothing follows anything")
    return pieces


def _sides(pieces):
    """Pieces to learn from and pieces to stop by; equal pieces stay together."""
    order = sorted({_checksum(piece) for piece in pieces})
    bound = order[(len(order) - 1) // 6]
    learn = [piece for piece in pieces if _checksum(piece) > bound]
    stop = sorted({piece for piece in pieces if _checksum(piece) <= bound})
    return learn or stop, stop


def _checksum(document):
    return zlib.crc32(" ".join(str(int(token)) for token in document).encode())


def _require_codes(codes):
    if not isinstance(codes, np.ndarray) or codes.dtype != np.int8:
        raise TypeError("codes must be an int8 array")
    if codes.ndim < 1 or not np.isin(codes, (-1, 0, 1)).all():
        raise ValueError("codes must be -1, 0 or 1, with at least one axis")


def _require_config(config):
    if not set(KEYS) <= set(config):
        raise ValueError(f"config must hold {', '.join(KEYS)}")
    for name in ("vocab", "dim", "heads", "context"):
        if config[name] < 1:
            raise ValueError(f"{name} must be positive")
    if config["seed"] < 0 or not config["seconds"] >= 0:
        raise ValueError("seed or seconds out of range")
    if config["layers"] < 0 or config["dim"] % config["heads"]:
        raise ValueError("layers or heads out of range")
