"""Seven ways to store a KV cache side by side: bytes, and what they do to attention.

1024 positions, 4 kv heads of width 128, 8 query heads, float32. Two kinds of rows: normal ones, and
rows whose keys have four outlying channels with a mean far from zero, as large models have.
Errors are relative to attention over the rows as they were, in float64.

    python examples/kv_cache_strategies.py            # the tables of docs/components/kv_cache.md
    python examples/kv_cache_strategies.py --time     # and seconds on this machine
"""

import argparse
import time
from typing import Any, NamedTuple

import numpy as np

from trapline.gold import KVCache
from trapline.gold.kv_cache.calibrate import calibrate
from trapline.gold.kv_cache.codecs import IntCodec
from trapline.gold.kv_cache.oracle import attention

POSITIONS, KV_HEADS, HEADS, WIDTH, QUERIES = 1024, 4, 8, 128, 16
STRATEGIES: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "paged": {"kind": "paged"},
    "paged int8": {"kind": "paged_quantized", "bits": 8},
    "paged fp8": {"kind": "paged_quantized", "bits": "fp8"},
    "paged int4": {"kind": "paged_quantized", "bits": 4},
    "paged int4, rotated": {"kind": "paged_quantized", "bits": 4, "rotate": True},
    "paged int4, calibrated": {"kind": "paged_quantized", "bits": 4, "calibration": True},
}


class Rows(NamedTuple):
    """Queries of the last positions, keys, values; and rows of another text to calibrate with."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    other: tuple[np.ndarray, ...]


class Line(NamedTuple):
    """One strategy on one kind of rows."""

    name: str
    nbytes: int
    constants: int
    bits: float
    element: float
    attention: float
    seconds: float


def draw(*, outliers: bool) -> Rows:
    """The same rows on every machine."""
    rng = np.random.default_rng(8)
    shape = (POSITIONS, KV_HEADS, WIDTH)
    q = rng.standard_normal((QUERIES, HEADS, WIDTH))
    k, v, other_k = (rng.standard_normal(shape) for _ in range(3))
    if outliers:
        channels = [3, 40, 77, 101]
        means = 10 * rng.choice([-1, 1], (KV_HEADS, len(channels)))
        for keys in (k, other_k):
            keys[:, :, channels] = means + 3 * keys[:, :, channels]
    other_q = rng.standard_normal((POSITIONS, HEADS, WIDTH))
    other_v = rng.standard_normal(shape)
    return Rows(*(x.astype(np.float32) for x in (q, k, v)), (other_q, other_k, other_v))


def measure(name: str, rows: Rows) -> Line:
    """Fills a cache in chunks of 64, as a prefill would, and attends."""
    options = dict(STRATEGIES[name])
    constants = 0
    if options.get("calibration"):
        calibration = calibrate(*([part] for part in rows.other))
        options["calibration"], constants = calibration, calibration.nbytes
    cache = KVCache(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        block_size=16,
        num_blocks=POSITIONS // 16,
        **options,
    )
    seq = cache.add()
    began = time.perf_counter()
    for start in range(0, POSITIONS, 64):
        part = slice(start, start + 64)
        cache.append(seq, 0, rows.k[part], rows.v[part])
    out = cache.attend(seq, 0, rows.q)
    seconds = time.perf_counter() - began
    keys, values = cache.view(seq, 0)
    truth = attention(rows.q, rows.k, rows.v)
    return Line(
        name,
        cache.nbytes() - constants,
        constants,
        8 * (cache.nbytes() - constants) / (2 * rows.k.size),
        float(np.mean([np.abs(keys - rows.k).mean(), np.abs(values - rows.v).mean()])),
        float(np.linalg.norm(out - truth) / np.linalg.norm(truth)),
        seconds,
    )


def element_errors(width: int) -> tuple[float, float]:
    """Mean absolute error of int8 and int4 for normal rows of this width."""
    rows = np.random.default_rng(width).standard_normal((4000, 1, width))
    errors = []
    for bits in (8, 4):
        codec = IntCodec(bits, width)
        back = codec.decode(codec.encode(rows), np.dtype(np.float64))
        errors.append(float(np.abs(back - rows).mean()))
    return errors[0], errors[1]


def table(lines: list[Line], *, timed: bool) -> str:
    """Markdown."""
    text = [
        "| strategy | bytes | constants | bits an element | error of an element | of attention |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        text.append(
            f"| {line.name} | {line.nbytes:,} | {line.constants:,} | {line.bits:.2f} "
            f"| {line.element:.4f} | {100 * line.attention:.2g} % |"
        )
    if timed:
        text.append("")
        text.extend(f"{line.name}: {1e3 * line.seconds:.1f} ms" for line in lines)
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="KV-cache strategies side by side.")
    parser.add_argument("--time", action="store_true", help="print seconds too")
    timed = parser.parse_args().time
    for title, outliers in (("Normal rows", False), ("Keys with outlying channels", True)):
        rows = draw(outliers=outliers)
        print(f"{title}\n\n{table([measure(name, rows) for name in STRATEGIES], timed=timed)}\n")
    print("Mean error of an element, normal rows\n\n| head width | int8 | int4 |\n|---|---|---|")
    for width in (16, 32, 64, 128):
        int8, int4 = element_errors(width)
        print(f"| {width} | {int8:.4f} | {int4:.3f} |")


if __name__ == "__main__":
    main()
