"""Ternary weights: quantise, pack, split documents, train.

The quantiser sorts every group once and takes the best prefix.  The model keeps the weights of all its
layers stacked, one array per kind of matrix, and `model.py` holds its two passes.
"""

import hashlib
import math
import operator

import numpy as np

from training import train_model

LARGEST_HALF = float(np.finfo(np.float16).max)
CLIP = 1e100  # far above float16, and its square is far below the largest float64
HELD_OUT = 0.1
PLACES = 4
ALLOWED_CODES = 1  # largest magnitude of a code
CONFIG_MINIMA = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}


def checked_group_size(group_size):
    """A whole number of at least 1."""
    size = operator.index(group_size)
    if size < 1:
        raise ValueError("group_size must be at least 1")
    return size


def checked_codes(codes):
    """An int8 array with an axis, of -1, 0 and 1."""
    if not isinstance(codes, np.ndarray) or codes.dtype != np.int8:
        raise TypeError("codes must be an int8 array")
    if codes.ndim == 0:
        raise ValueError("codes need at least one axis")
    if codes.size and (codes.min() < -ALLOWED_CODES or codes.max() > ALLOWED_CODES):
        raise ValueError("a code is not -1, 0 or 1")
    return codes


def ceil_div(count, size):
    """The number of pieces of `size` that hold `count`."""
    return -(-count // size)


def grouped(values, size):
    """The last axis cut into groups: (..., n) -> (..., groups, size), zeros behind the last."""
    count = values.shape[-1]
    groups = ceil_div(count, size)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, groups * size - count)]
    return np.pad(values, padding).reshape(*values.shape[:-1], groups, size)


def best_prefix(magnitudes):
    """The magnitude from which on a group's weights count, and the scale that then fits them best.

    With the k largest weights at +-s the squared error is least for s = S_k / k, where S_k is their sum;
    it is then (sum of squares) - S_k**2 / k, so the best k has the largest S_k**2 / k.
    """
    falling = -np.sort(-magnitudes, axis=-1)
    sums = np.cumsum(falling, axis=-1)
    counts = np.arange(1, falling.shape[-1] + 1)
    best = np.argmax(sums * sums / counts, axis=-1)[..., None]
    threshold = np.take_along_axis(falling, best, axis=-1)
    scale = np.take_along_axis(sums, best, axis=-1) / (best + 1)
    return threshold, scale


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    size = checked_group_size(group_size)
    if not isinstance(w, np.ndarray) or w.dtype not in (np.float32, np.float64):
        raise TypeError("w must be a float32 or float64 array")
    if w.ndim == 0:
        raise ValueError("w needs at least one axis")
    if not np.isfinite(w).all():
        raise ValueError("w holds NaN or infinity")
    count = w.shape[-1]
    if w.size == 0:
        return np.zeros(w.shape, np.int8), np.zeros((*w.shape[:-1], ceil_div(count, size)), np.float16)
    groups = grouped(w.astype(np.float64), min(size, count))
    magnitudes = np.minimum(np.abs(groups), CLIP)
    threshold, scale = best_prefix(magnitudes)
    scales = np.minimum(scale, LARGEST_HALF).astype(np.float16)
    kept = (magnitudes >= threshold) & (scales > 0)
    codes = np.where(kept, np.sign(groups), 0).astype(np.int8)
    codes = codes.reshape(*w.shape[:-1], -1)[..., :count]
    return np.ascontiguousarray(codes), scales[..., 0]


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    size = checked_group_size(group_size)
    checked_codes(codes)
    count = codes.shape[-1]
    expected = (*codes.shape[:-1], ceil_div(count, size))
    if not isinstance(scales, np.ndarray) or scales.shape != expected:
        raise ValueError(f"scales must have the shape {expected}")
    spread = np.repeat(scales.astype(np.float32), min(size, max(count, 1)), axis=-1)
    return codes * spread[..., :count]


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    checked_codes(codes)
    fields = (grouped(codes, PLACES) + 1).astype(np.uint8)
    packed = fields[..., 0].copy()
    for place in range(1, PLACES):
        packed |= fields[..., place] << (2 * place)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    if not isinstance(packed, np.ndarray) or packed.dtype != np.uint8:
        raise TypeError("packed must be a uint8 array")
    shape = tuple(operator.index(length) for length in shape)
    if not shape or min(shape) < 0:
        raise ValueError("shape needs an axis, and no length below 0")
    expected = (*shape[:-1], ceil_div(shape[-1], PLACES))
    if packed.shape != expected:
        raise ValueError(f"codes of shape {shape} are packed in {expected}, not {packed.shape}")
    fields = np.empty((*packed.shape, PLACES), np.uint8)
    for place in range(PLACES):
        fields[..., place] = packed >> (2 * place) & 3
    fields = fields.reshape(*shape[:-1], expected[-1] * PLACES)[..., : shape[-1]]
    if (fields == 3).any():
        raise ValueError("a place has both bits set")
    return fields.astype(np.int8) - np.int8(1)


def checked_documents(documents):
    """The documents as lists of non-negative Python ints."""
    if not isinstance(documents, (list, tuple)):
        raise TypeError("documents must be a list of lists of token ids")
    checked = []
    for document in documents:
        if isinstance(document, (str, bytes)):
            raise TypeError("a document must be a list of token ids")
        checked.append([operator.index(token) for token in document])
        if checked[-1] and min(checked[-1]) < 0:
            raise ValueError("a token id is negative")
    return checked


def position_of(document):
    """A number in [0, 1) that depends on the tokens alone."""
    text = ",".join(format(token, "x") for token in document)
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    share = float(fraction) if not isinstance(fraction, (str, bytes)) else math.nan
    if not 0 <= share <= 1:
        raise ValueError("fraction must be between 0 and 1")
    positions = [position_of(document) for document in checked_documents(documents)]
    train_ids = [index for index, place in enumerate(positions) if place >= share]
    valid_ids = [index for index, place in enumerate(positions) if place < share]
    return train_ids, valid_ids


def checked_config(config):
    """The settings of `train` as plain numbers."""
    if not isinstance(config, dict):
        raise TypeError("config must be a dict")
    missing = [name for name in (*CONFIG_MINIMA, "seconds") if name not in config]
    if missing:
        raise ValueError(f"config lacks {missing}")
    settings = {name: operator.index(config[name]) for name in CONFIG_MINIMA}
    if isinstance(config["seconds"], (str, bytes)):
        raise TypeError("seconds must be a number")
    settings["seconds"] = float(config["seconds"])
    for name, minimum in CONFIG_MINIMA.items():
        if settings[name] < minimum:
            raise ValueError(f"{name} must be at least {minimum}")
    if not 0 <= settings["seconds"] < math.inf:
        raise ValueError("seconds must be finite and not negative")
    if settings["dim"] % settings["heads"]:
        raise ValueError("dim must be divisible by heads")
    return settings


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    settings = checked_config(config)
    texts = checked_documents(documents)
    if any(max(text, default=0) >= settings["vocab"] for text in texts):
        raise ValueError("a token id is outside the vocabulary")
    if all(len(text) < 2 for text in texts):
        raise ValueError("no token has a successor")
    sides = [[texts[index] for index in side] for side in split(texts, HELD_OUT)]
    return train_model(texts, sides, settings, ternarize, dequantize)
