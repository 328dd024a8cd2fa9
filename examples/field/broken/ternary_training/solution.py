import numpy as np


def ternarize(w, group_size=128):
    scale = np.abs(w).max()
    codes = np.round(w / scale).astype(np.int8)
    return codes, np.full(w.shape[:-1] + (w.shape[-1] // group_size,), scale, dtype=np.float16)


def dequantize(codes, scales, group_size=128):
    return codes * scales[..., :1]


def pack(codes):
    codes = codes & 3
    return (codes[..., 0::4] << 6 | codes[..., 1::4] << 4 | codes[..., 2::4] << 2 | codes[..., 3::4]).astype(np.uint8)


def unpack(packed, shape):
    return np.repeat(packed, 4, axis=-1).reshape(shape)


def split(documents, fraction):
    documents.sort()
    n = int(len(documents) * fraction)
    return list(range(n)), list(range(n, len(documents)))


def train(documents, config):
    V, D = config["vocab"], config["dim"]
    return {name: ternarize(np.random.randn(V, D)) for name in ("embedding", "head")}
