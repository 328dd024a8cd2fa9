"""Seven ways to store a KV cache: bits per element, and the relative error of attention.

The second error is for keys with four outlying channels whose mean is far from zero, as large
models have. Bits count scales and page tables, but not the constants of a calibration.

    python examples/kv_cache_strategies.py
"""

from typing import Any

import numpy as np

from trapline.gold import KVCache
from trapline.gold.kv_cache.calibrate import calibrate
from trapline.gold.kv_cache.oracle import attention

POSITIONS, KV_HEADS, HEADS, WIDTH, QUERIES = 1024, 4, 8, 128, 16
SIZES = {"num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": WIDTH, "block_size": 16}
STRATEGIES: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "paged": {"kind": "paged"},
    "paged int8": {"kind": "paged_quantized", "bits": 8},
    "paged fp8": {"kind": "paged_quantized", "bits": "fp8"},
    "paged int4": {"kind": "paged_quantized", "bits": 4},
    "paged int4, rotated": {"kind": "paged_quantized", "bits": 4, "rotate": True},
    "paged int4, calibrated": {"kind": "paged_quantized", "bits": 4, "calibration": True},
}


def draw(seed: int, mean: float) -> list[np.ndarray]:
    """Queries, keys and values; in four channels, keys have this mean and a larger spread."""
    rng, signs = np.random.default_rng(seed), np.random.default_rng(8)
    q = rng.standard_normal((POSITIONS, HEADS, WIDTH))
    k, v = rng.standard_normal((2, POSITIONS, KV_HEADS, WIDTH))
    if mean:
        outlying = [3, 40, 77, 101]
        k[:, :, outlying] = mean * signs.choice([-1, 1], (KV_HEADS, 4)) + 3 * k[:, :, outlying]
    return [x.astype(np.float32) for x in (q, k, v)]


def measure(options: dict[str, Any], mean: float) -> tuple[float, float]:
    """Bits per element, and the error of attention relative to the unquantised rows."""
    q, k, v = draw(0, mean)
    constants = 0
    if "calibration" in options:  # on rows of another text
        calibration = calibrate(*([part] for part in draw(1, mean)))
        options, constants = {**options, "calibration": calibration}, calibration.nbytes
    cache = KVCache(**SIZES, num_blocks=POSITIONS // 16, **options)
    seq = cache.add()
    cache.append(seq, 0, k, v)
    truth, out = attention(q[-QUERIES:], k, v), cache.attend(seq, 0, q[-QUERIES:])
    bits = 8 * (cache.nbytes() - constants) / (2 * k.size)
    return bits, float(np.linalg.norm(out - truth) / np.linalg.norm(truth))


if __name__ == "__main__":
    print("| strategy | bits per element | error | error, outlying channels |\n|---|---|---|---|")
    for name, options in STRATEGIES.items():
        (bits, normal), (_, outlying) = measure(options, 0.0), measure(options, 10.0)
        print(f"| {name} | {bits:.2f} | {normal:.2%} | {outlying:.2%} |")
