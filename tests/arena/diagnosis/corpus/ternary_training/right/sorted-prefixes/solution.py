"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md.

The quantiser finds the best scale of every group exactly: with the magnitudes in descending order, the best code set is
a prefix, and the scale is that prefix's mean. The trainer keeps float weights and runs the model with their ternary
shadow (straight-through gradients), in `language.py`.
"""

import hashlib
import math
import numbers
import operator
import time
import zlib

import numpy as np

import language

GROUP = 128
CHUNK = 1 << 17  # weights that are quantised at a time
LARGEST = float(np.finfo(np.float16).max)
MATRICES = ("q", "k", "v", "o", "up", "down")


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    if w.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"weights must be float32 or float64, not {w.dtype}")
    if w.ndim == 0:
        raise ValueError("weights need at least one axis")
    if not np.isfinite(w).all():
        raise ValueError("weights must be finite")
    count, size = _groups(w.shape[-1], group_size)
    padded = np.zeros((*w.shape[:-1], count * size), w.dtype)
    padded[..., : w.shape[-1]] = w
    grouped = padded.reshape(-1, size) if padded.size else np.zeros((0, size))
    codes = np.empty(grouped.shape, np.int8)
    scales = np.empty(len(grouped), np.float16)
    at_once = max(1, CHUNK // size)
    for start in range(0, len(grouped), at_once):
        some = slice(start, start + at_once)
        codes[some], scales[some] = _ternarize_groups(grouped[some].astype(np.float64))
    codes = codes.reshape(padded.shape)[..., : w.shape[-1]].copy()
    return codes, scales.reshape(*w.shape[:-1], count)


def _ternarize_groups(groups):
    """Codes and scales of groups (number, size), whose padding is zeros at the end.

    Every group is brought to a largest magnitude in [0.5, 1) by a power of two, so that no sum or square leaves
    float64's range. The sums run strictly from large to small: zeros of the padding come last and change nothing.
    """
    magnitudes = np.abs(groups)
    _, exponents = np.frexp(magnitudes.max(axis=-1, keepdims=True))
    magnitudes = np.ldexp(magnitudes, -exponents)
    descending = -np.sort(-magnitudes, axis=-1)
    sums = np.cumsum(descending, axis=-1)
    best = np.argmax(sums * sums / np.arange(1, groups.shape[-1] + 1), axis=-1)[:, None]
    means = np.ldexp(np.take_along_axis(sums, best, axis=-1) / (best + 1), exponents)
    scales = np.minimum(means, LARGEST).astype(np.float16)
    kept = magnitudes >= np.take_along_axis(descending, best, axis=-1)
    kept &= scales > 0
    return np.sign(groups) * kept, scales[:, 0]


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes, scales = _checked_codes(codes), np.asarray(scales)
    if scales.dtype != np.float16:
        raise TypeError(f"scales must be float16, not {scales.dtype}")
    length = codes.shape[-1]
    count, size = _groups(length, group_size)
    if scales.shape != (*codes.shape[:-1], count):
        raise ValueError(f"scales {scales.shape} do not fit codes {codes.shape}")
    spread = np.repeat(scales.astype(np.float32), size, axis=-1)[..., :length]
    return codes * spread


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _checked_codes(codes)
    length = codes.shape[-1]
    size = -(-length // 4)
    places = np.ones((*codes.shape[:-1], size * 4), np.uint8)
    places[..., :length] = codes + 1
    packed = np.zeros((*codes.shape[:-1], size), np.uint8)
    for place in range(4):
        packed |= places[..., place::4] << np.uint8(2 * place)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    shape = tuple(operator.index(length) for length in shape)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed data must be uint8, not {packed.dtype}")
    if not shape or min(shape) < 0:
        raise ValueError(f"no shape of codes: {shape}")
    if packed.shape != (*shape[:-1], -(-shape[-1] // 4)):
        raise ValueError(f"packed data {packed.shape} do not fit {shape}")
    places = np.empty((*packed.shape[:-1], packed.shape[-1] * 4), np.uint8)
    for place in range(4):
        places[..., place::4] = packed >> np.uint8(2 * place) & np.uint8(3)
    places = places[..., : shape[-1]]
    if (places == 3).any():
        raise ValueError("a place has both bits set")
    return places.astype(np.int8) - np.int8(1)


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie between 0 and 1, not {fraction}")
    border = float(fraction) * 2.0**64
    sides = [], []
    for number, document in enumerate(documents):
        sides[_fingerprint(document) < border].append(number)
    return sides


def _fingerprint(document):
    """A number below 2^64 that depends on the tokens alone; hexadecimal has no limit of digits."""
    tokens = [operator.index(token) for token in document]
    if any(token < 0 for token in tokens):
        raise ValueError("token ids must not be negative")
    text = "".join(f"{token:x}," for token in tokens)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    began = time.monotonic()
    sizes, seconds = _checked_config(config)
    texts = _checked_documents(documents, sizes["vocab"])
    weights = _starting_weights(sizes)
    if seconds > 0 and sizes["vocab"] > 1:
        learn, held_out, copies = _lessons(texts, sizes["context"])
        noise = _noise(learn, sizes)
        course = language.Course(learn, held_out, noise, doubtful=copies)
        weights = language.fit(weights, sizes, course, shadow, began, seconds)
    return {name: ternarize(weight, GROUP) for name, weight in weights.items()}


def shadow(weights):
    """The weights that the judge would see: every tensor ternarised and brought back."""
    return {name: dequantize(*ternarize(weight, GROUP), GROUP) for name, weight in weights.items()}


def _starting_weights(sizes):
    """Random weights drawn from the seed, each tensor from a stream of its own."""
    vocab, dim = sizes["vocab"], sizes["dim"]
    shapes = {"embedding": (vocab, dim)}
    for layer in range(sizes["layers"]):
        shapes |= {f"layers.{layer}.{name}": (dim, dim) for name in MATRICES[:4]}
        shapes[f"layers.{layer}.up"] = (4 * dim, dim)
        shapes[f"layers.{layer}.down"] = (dim, 4 * dim)
    shapes["head"] = (vocab, dim)
    weights = {}
    for name, shape in shapes.items():
        stream = np.random.default_rng([sizes["seed"], zlib.crc32(name.encode())])
        spread = 1.0 if name == "embedding" else 0.3 if name == "head" else 1.0
        weights[name] = (stream.standard_normal(shape) * spread / math.sqrt(shape[1])).astype(np.float32)
    return weights


def _lessons(texts, context):
    """Windows to learn from, windows held out to decide when to stop, and whether copies abound.

    Equal documents stay together: which ones are held out is decided among the different documents, by fingerprint.
    A lone document is cut in two instead.
    """
    usable = [tuple(text) for text in texts if len(text) > 1]
    different = sorted(set(usable), key=_fingerprint)
    words = sum(len(text) - 1 for text in different)
    if len(different) == 1:
        middle = len(usable[0]) // 2
        learn, held_out = [usable[0][: middle + 1]], _unheard(usable[0], middle)
        if not held_out:
            learn = [usable[0]]
    else:
        wanted = min(max(words * 0.1, 300), words * 0.4)
        chosen, taken = set(), 0
        for text in different[:-1]:
            if taken >= wanted:
                break
            chosen.add(text)
            taken += len(text) - 1
        learn = [text for text in usable if text not in chosen]
        held_out = sorted(chosen, key=_fingerprint)
    copies = len(different) * 2 <= len(usable) or not held_out
    return _windows(learn, context), _windows(held_out, context), copies


def _unheard(text, middle, length=8):
    """Pieces of a text's second half that do not occur in its first half."""
    heard = {text[start : start + length] for start in range(middle - length + 2)}
    pieces = (text[start : start + length] for start in range(middle, len(text) - length + 1, length - 1))
    return [piece for piece in pieces if piece not in heard]


def _windows(texts, context):
    """Pieces of at most context + 1 tokens; every token but a document's first is predicted in one of them."""
    return [text[start : start + context + 1] for text in texts for start in range(0, len(text) - 1, context)]


def _noise(windows, sizes):
    """Two texts without any order: one in the words of these windows, one in all words."""
    stream = np.random.default_rng([sizes["seed"], 1])
    known = np.array([token for window in windows[:2000] for token in window])
    shape = (16, min(sizes["context"] + 1, 24))
    return stream.choice(known, shape).tolist(), stream.integers(sizes["vocab"], size=shape).tolist()


def _groups(length, group_size):
    """How many groups a row of this length has, and the length of a row's longest group."""
    group_size = operator.index(group_size)
    if group_size < 1:
        raise ValueError(f"group size must be at least 1, not {group_size}")
    return -(-length // group_size), max(1, min(group_size, length))


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError(f"codes must be int8, not {codes.dtype}")
    if codes.ndim == 0:
        raise ValueError("codes need at least one axis")
    if ((codes < -1) | (codes > 1)).any():
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def _checked_config(config):
    sizes = {}
    for name, least in (("vocab", 1), ("dim", 1), ("heads", 1), ("context", 1), ("layers", 0), ("seed", 0)):
        if name not in config:
            raise ValueError(f"config lacks {name}")
        if isinstance(config[name], (bool, np.bool_)):
            raise TypeError(f"{name} must be an int")
        sizes[name] = operator.index(config[name])
        if sizes[name] < least:
            raise ValueError(f"{name} must be at least {least}, not {sizes[name]}")
    if sizes["dim"] % sizes["heads"]:
        raise ValueError(f"dim {sizes['dim']} is not divisible by heads {sizes['heads']}")
    seconds = config.get("seconds")
    if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool):
        raise TypeError(f"seconds must be a number, not {seconds!r}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be finite and not negative, not {seconds}")
    return sizes, float(seconds)


def _checked_documents(documents, vocab):
    texts = [[operator.index(token) for token in document] for document in documents]
    for text in texts:
        if text and not 0 <= min(text) <= max(text) < vocab:
            raise ValueError(f"a token id lies outside 0 … {vocab - 1}")
    if all(len(text) < 2 for text in texts):
        raise ValueError("no token has a successor: there is nothing to predict")
    return texts
