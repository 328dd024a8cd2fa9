"""The oracle of the ternary component: one group at a time, in float64, by the formula.

A group of weights w becomes codes t ∈ {−1, 0, 1} and one float16 scale s, so that w ≈ s·t. Three
ways to choose them (derivations in docs/components/ternary.md):

- absmean: t_i = sign(w_i) where |w_i| > mean|w| / 2
- threshold: t_i = sign(w_i) where |w_i| > 0.775 · mean|w|
  (both as n·|w_i| > factor · Σ|w|: a mean is rounded, and what it equals would be decided by that)
- lstsq: the t that leaves the least squared error of all

and in all three s = mean |w_i| over t_i ≠ 0, the least-squares scale for these codes. It is also
what makes them idempotent: the mean of equal magnitudes is that magnitude.
"""

import math
from collections.abc import Callable

import numpy as np

from trapline.gold.arithmetic import cdiv

LARGEST_SCALE = float(np.finfo(np.float16).max)


def ternarize(
    w: np.ndarray, group_size: int = 128, method: str = "absmean"
) -> tuple[np.ndarray, np.ndarray]:
    """codes int8 like w, scales float16 (…, ceil(n / group_size))."""
    columns = w.shape[-1]
    starts = range(0, columns, group_size)
    codes = np.zeros(w.shape, dtype=np.int8)
    scales = np.zeros((*w.shape[:-1], len(starts)), dtype=np.float16)
    for row in np.ndindex(*w.shape[:-1]):
        for number, start in enumerate(starts):
            group = w[row][start : start + group_size].astype(np.float64)
            codes[row][start : start + group_size], scales[row][number] = _group(group, method)
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, group_size: int = 128) -> np.ndarray:
    """code · scale of its group, float32."""
    values = np.zeros(codes.shape, dtype=np.float32)
    for column in range(codes.shape[-1]):
        scale = scales[..., column // group_size].astype(np.float32)
        values[..., column] = codes[..., column] * scale
    return values


def pack(codes: np.ndarray) -> np.ndarray:
    """Four codes a byte, code + 1 in two bits, the first lowest; spare places hold code 0."""
    columns = codes.shape[-1]
    packed = np.zeros((*codes.shape[:-1], cdiv(columns, 4)), dtype=np.uint8)
    for place in range(4 * packed.shape[-1]):
        code = codes[..., place].astype(int) if place < columns else np.zeros(codes.shape[:-1], int)
        packed[..., place // 4] |= ((code + 1) << (2 * (place % 4))).astype(np.uint8)
    return packed


def unpack(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The codes of this shape that were packed."""
    codes = np.zeros(shape, dtype=np.int8)
    for place in range(shape[-1]):
        codes[..., place] = ((packed[..., place // 4] >> (2 * (place % 4))) & 3).astype(int) - 1
    return codes


def squared_error(w: np.ndarray, values: np.ndarray) -> float:
    """Σ(w − values)² / Σw²."""
    wide = w.astype(np.float64)
    return float(np.sum((wide - values) ** 2) / np.sum(wide**2))


def _group(group: np.ndarray, method: str) -> tuple[np.ndarray, np.float16]:
    # A power of two changes no digit, and no sum of numbers below 1 overflows.
    power = max(0, math.frexp(np.max(np.abs(group)))[1])
    magnitude = np.ldexp(np.abs(group), -power)
    counts = _COUNTS[method](magnitude)
    mean = math.fsum(magnitude[counts]) / max(1, int(np.count_nonzero(counts)))
    scale = np.float16(math.ldexp(min(mean, math.ldexp(LARGEST_SCALE, -power)), power))
    if scale == 0:
        return np.zeros(group.shape, dtype=np.int8), scale
    return (np.sign(group) * counts).astype(np.int8), scale


def _above(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda magnitude: magnitude * magnitude.size > factor * math.fsum(magnitude)


def _least_error(magnitude: np.ndarray) -> np.ndarray:
    """Keeping the k largest leaves the error Σm² − (Σ of the k)² / k: take the best k."""
    order = np.argsort(-magnitude, kind="stable")
    largest = max(float(magnitude.max(initial=0.0)), np.finfo(np.float64).tiny)
    gains = np.cumsum(magnitude[order] / largest) ** 2 / np.arange(1, magnitude.size + 1)
    counts = np.zeros(magnitude.shape, dtype=bool)
    counts[order[: int(np.argmax(gains)) + 1]] = True
    return counts & (magnitude > 0)


_COUNTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "absmean": _above(0.5),
    "threshold": _above(0.775),
    "lstsq": _least_error,
}
