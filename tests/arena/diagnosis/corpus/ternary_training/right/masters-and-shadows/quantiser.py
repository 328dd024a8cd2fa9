"""Weights as -1, 0 and 1 times a float16 scale per group, and four of them to the byte.

The rule of a group: weights above 0.7 times the mean magnitude keep their sign, the others become 0; the scale is the mean
magnitude of those kept. All of it is computed on magnitudes relative to the group's largest one, so that nothing
overflows and a group of equal magnitudes has exactly that magnitude as its scale.
"""

from math import prod
from operator import index

import numpy as np

GROUP = 128
CUT = 0.7
LARGEST_SCALE = float(np.finfo(np.float16).max)
CHUNK = 1 << 16  # weights that are quantised at a time, to stay in the cache
PLACES = 4  # codes in a byte
SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)


def _group_size(value):
    size = index(value)
    if size < 1:
        raise ValueError("group_size must be at least 1")
    return size


def _ceil_div(a, b):
    return -(-a // b)


def _checked_codes(codes):
    array = np.asarray(codes)
    if array.dtype != np.int8:
        raise TypeError(f"codes must be int8, not {array.dtype}")
    if array.ndim == 0:
        raise ValueError("codes must have at least one axis")
    if array.size and (array.min() < -1 or array.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return array


def _quantise_groups(groups):
    """Codes (G, n) and scales (G,) of whole groups (G, n), n >= 1."""
    weights = groups.astype(np.float64, order="C")
    size = np.abs(weights)
    peak = size.max(axis=1, keepdims=True)
    size /= np.where(peak > 0, peak, 1.0)
    kept = size > CUT * size.mean(axis=1, keepdims=True)
    count = np.maximum(kept.sum(axis=1), 1)
    mean = (size * kept).sum(axis=1) / count
    scales = np.minimum(mean * peak[:, 0], LARGEST_SCALE).astype(np.float16)
    kept &= (scales > 0)[:, None]
    return np.sign(weights).astype(np.int8) * kept, scales


def _quantise_block(block):
    """The same chunk by chunk."""
    groups, size = block.shape
    codes = np.empty((groups, size), dtype=np.int8)
    scales = np.empty(groups, dtype=np.float16)
    step = max(1, CHUNK // size)
    with np.errstate(under="ignore"):
        for start in range(0, groups, step):
            part = slice(start, start + step)
            codes[part], scales[part] = _quantise_groups(block[part])
    return codes, scales


def ternarize(w, group_size=GROUP):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    weights, group = np.asarray(w), _group_size(group_size)
    if weights.dtype not in (np.float32, np.float64):
        raise TypeError(f"weights must be float32 or float64, not {weights.dtype}")
    if weights.ndim == 0:
        raise ValueError("weights must have at least one axis")
    if not np.isfinite(weights).all():
        raise ValueError("weights must be finite")
    width = weights.shape[-1]
    lead, whole = weights.shape[:-1], width // group
    rows = weights.reshape(prod(lead), width)
    codes = np.empty(rows.shape, dtype=np.int8)
    scales = np.empty((rows.shape[0], _ceil_div(width, group)), dtype=np.float16)
    border = whole * group
    if whole:
        body, body_scales = _quantise_block(rows[:, :border].reshape(-1, group))
        codes[:, :border] = body.reshape(-1, border)
        scales[:, :whole] = body_scales.reshape(-1, whole)
    if border < width:
        codes[:, border:], scales[:, whole] = _quantise_block(rows[:, border:])
    return codes.reshape(weights.shape), scales.reshape(*lead, scales.shape[1])


def dequantize(codes, scales, group_size=GROUP):
    """code times the scale of its group, float32."""
    array, group = _checked_codes(codes), _group_size(group_size)
    factors = np.asarray(scales)
    width = array.shape[-1]
    wanted = (*array.shape[:-1], _ceil_div(width, group))
    if factors.shape != wanted:
        raise ValueError(f"scales must have shape {wanted}, not {factors.shape}")
    if factors.dtype.kind != "f":
        raise TypeError(f"scales must be floating-point, not {factors.dtype}")
    owner = np.arange(width) // min(group, max(width, 1))
    return array * factors.astype(np.float32)[..., owner]


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    array = _checked_codes(codes)
    lead, width = array.shape[:-1], array.shape[-1]
    size = _ceil_div(width, PLACES)
    fields = np.ones((*lead, size * PLACES), dtype=np.uint8)
    fields[..., :width] = array + np.int8(1)
    fields = fields.reshape(*lead, size, PLACES)
    packed = fields[..., 0].copy()
    for place in range(1, PLACES):
        packed |= fields[..., place] << SHIFTS[place]
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    array = np.asarray(packed)
    if array.dtype != np.uint8:
        raise TypeError(f"packed codes must be uint8, not {array.dtype}")
    sizes = tuple(index(size) for size in shape)
    if not sizes or min(sizes) < 0:
        raise ValueError("the shape needs at least one axis and no negative length")
    lead, width = sizes[:-1], sizes[-1]
    if array.shape != (*lead, _ceil_div(width, PLACES)):
        raise ValueError(f"bytes of shape {array.shape} do not hold codes of shape {sizes}")
    fields = (array[..., None] >> SHIFTS) & np.uint8(3)
    fields = fields.reshape(*lead, array.shape[-1] * PLACES)[..., :width]
    if (fields == 3).any():
        raise ValueError("a place has both bits set")
    return fields.astype(np.int8) - np.int8(1)
