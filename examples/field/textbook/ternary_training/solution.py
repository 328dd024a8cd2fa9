"""Ternary weights, written step by step.

The language model keeps its layers at zero, so that a token's logits come from its embedding alone. That is a
bigram model: it uses little of the architecture, but it is easy to get right and quick to train.
"""

import hashlib
import time

import numpy as np

GROUP_SIZE = 128


def check_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes must have at least one axis")
    if codes.size > 0 and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def ternarize_group(group):
    """Codes and scale of one group of weights."""
    magnitude = np.abs(group)
    mean = np.mean(magnitude / len(group)) * len(group)
    mask = magnitude > 0.5 * mean
    if not mask.any():
        return np.zeros(len(group), dtype=np.int8), np.float16(0)
    scale = np.sum(magnitude[mask] / np.count_nonzero(mask))
    scale = np.float16(min(scale, 65504.0))
    if scale == 0:
        return np.zeros(len(group), dtype=np.int8), np.float16(0)
    return (np.sign(group) * mask).astype(np.int8), scale


def ternarize(w, group_size=GROUP_SIZE):
    w = np.asarray(w)
    if w.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError("w must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("w must have at least one axis")
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    if not np.all(np.isfinite(w)):
        raise ValueError("w must be finite")
    n = w.shape[-1]
    n_groups = (n + group_size - 1) // group_size
    codes = np.zeros(w.shape, dtype=np.int8)
    scales = np.zeros(w.shape[:-1] + (n_groups,), dtype=np.float16)
    for row in np.ndindex(w.shape[:-1]):
        for g in range(n_groups):
            part = slice(g * group_size, min((g + 1) * group_size, n))
            group = w[row][part].astype(np.float64)
            codes[row + (part,)], scales[row + (g,)] = ternarize_group(group)
    return codes, scales


def dequantize(codes, scales, group_size=GROUP_SIZE):
    codes = check_codes(codes)
    scales = np.asarray(scales)
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    n = codes.shape[-1]
    n_groups = (n + group_size - 1) // group_size
    if scales.shape != codes.shape[:-1] + (n_groups,):
        raise ValueError("scales have the wrong shape")
    repeated = np.repeat(scales.astype(np.float32), group_size, axis=-1)
    return codes.astype(np.float32) * repeated[..., :n]


def pack(codes):
    codes = check_codes(codes)
    n = codes.shape[-1]
    n_bytes = (n + 3) // 4
    packed = np.zeros(codes.shape[:-1] + (n_bytes,), dtype=np.uint8)
    for i in range(4 * n_bytes):
        if i < n:
            value = (codes[..., i] + 1).astype(np.uint8)
        else:
            value = np.ones(codes.shape[:-1], dtype=np.uint8)
        packed[..., i // 4] |= value << np.uint8(2 * (i % 4))
    return packed


def unpack(packed, shape):
    packed = np.asarray(packed)
    shape = tuple(shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed must be uint8")
    if len(shape) == 0 or packed.shape != shape[:-1] + ((shape[-1] + 3) // 4,):
        raise ValueError("packed does not fit the shape")
    codes = np.zeros(shape, dtype=np.int8)
    for i in range(shape[-1]):
        value = (packed[..., i // 4] >> np.uint8(2 * (i % 4))) & 3
        if np.any(value == 3):
            raise ValueError("3 is not a code")
        codes[..., i] = value.astype(np.int8) - 1
    return codes


def document_hash(document):
    """A number in [0, 1) from the content of the document."""
    digest = hashlib.md5(repr([int(t) for t in document]).encode()).hexdigest()
    return int(digest[:12], 16) / 16**12


def split(documents, fraction):
    if fraction < 0 or fraction > 1:
        raise ValueError("fraction must be between 0 and 1")
    train_ids, valid_ids = [], []
    for i, document in enumerate(documents):
        if document_hash(document) < fraction:
            valid_ids.append(i)
        else:
            train_ids.append(i)
    return train_ids, valid_ids


def check_config(documents, config):
    for name in ("vocab", "dim", "heads", "context"):
        if config[name] < 1:
            raise ValueError(name + " must be at least 1")
    if config["layers"] < 0 or config["seconds"] < 0:
        raise ValueError("layers and seconds must not be negative")
    if config["dim"] % config["heads"] != 0:
        raise ValueError("dim must be divisible by heads")
    for document in documents:
        for token in document:
            if token < 0 or token >= config["vocab"]:
                raise ValueError("token id out of range")
    if not any(len(document) >= 2 for document in documents):
        raise ValueError("nothing to predict")


def count_pairs(documents, vocab):
    counts = np.zeros((vocab, vocab))
    for document in documents:
        for first, second in zip(document[:-1], document[1:]):
            counts[first, second] += 1
    return counts


def fast_quantize(w):
    """dequantize(ternarize(w)) for rows of at most 128 weights, without loops."""
    if w.shape[1] > GROUP_SIZE:
        return dequantize(*ternarize(w))
    magnitude = np.abs(w)
    mask = magnitude > 0.5 * magnitude.mean(axis=1, keepdims=True)
    number = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    scale = ((magnitude * mask).sum(axis=1, keepdims=True) / number).astype(np.float16)
    return np.sign(w) * mask * scale.astype(np.float64)


def loss_and_gradients(embedding, head, counts):
    e, h = fast_quantize(embedding), fast_quantize(head)
    r = np.sqrt(np.mean(e * e, axis=1, keepdims=True) + 1e-6)
    x = e / r
    logits = x @ h.T
    logits = logits - logits.max(axis=1, keepdims=True)
    probs = np.exp(logits)
    probs = probs / probs.sum(axis=1, keepdims=True)
    total = max(counts.sum(), 1.0)
    loss = -np.sum(counts * np.log(probs)) / total
    dlogits = (probs * counts.sum(axis=1, keepdims=True) - counts) / total
    dx = dlogits @ h
    de = (dx - x * np.mean(dx * x, axis=1, keepdims=True)) / r
    return loss, de, dlogits.T @ x


def train(documents, config):
    start = time.monotonic()
    check_config(documents, config)
    vocab, dim = config["vocab"], config["dim"]
    rng = np.random.default_rng(config["seed"])
    weights = [rng.normal(size=(vocab, dim)), rng.normal(size=(vocab, dim)) * 0.02]
    usable = [tuple(d) for d in documents if len(d) >= 2]
    unique = sorted(set(usable), key=document_hash)
    valid_set = set(unique[: max(1, len(unique) // 6)])
    train_docs = [d for d in usable if d not in valid_set] or usable
    train_counts = count_pairs(train_docs, vocab)
    valid_counts = count_pairs([d for d in usable if d in valid_set], vocab)

    best_loss = loss_and_gradients(*weights, valid_counts)[0]
    best = [w.copy() for w in weights]
    m = [np.zeros_like(w) for w in weights]
    v = [np.zeros_like(w) for w in weights]
    bad, step = 0, 0
    while time.monotonic() - start < config["seconds"] and bad < 60:
        step += 1
        gradients = loss_and_gradients(*weights, train_counts)[1:]
        for i, g in enumerate(gradients):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.98 * v[i] + 0.02 * g * g
            update = (m[i] / (1 - 0.9**step)) / (np.sqrt(v[i] / (1 - 0.98**step)) + 1e-9)
            weights[i] -= (0.05 if i == 0 else 0.02) * update
        loss = loss_and_gradients(*weights, valid_counts)[0]
        bad += 1
        if loss < best_loss:
            best_loss, best, bad = loss, [w.copy() for w in weights], 0

    result = {"embedding": ternarize(best[0]), "head": ternarize(best[1])}
    for layer in range(config["layers"]):
        for name in ("q", "k", "v", "o"):
            result[f"layers.{layer}.{name}"] = ternarize(np.zeros((dim, dim)))
        result[f"layers.{layer}.up"] = ternarize(np.zeros((4 * dim, dim)))
        result[f"layers.{layer}.down"] = ternarize(np.zeros((dim, 4 * dim)))
    return result
