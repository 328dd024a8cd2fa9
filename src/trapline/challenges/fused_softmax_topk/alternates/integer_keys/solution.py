"""Ranking by integers: float bits mapped to a monotone key, the k-th key found by radix selection.

Sixteen bits a pass: a histogram of the leading digit tells in which bucket the k-th key lies, then
the next digit of that bucket. One more pass collects what is above the k-th key and the first few
of those equal to it. The sum runs window by window with `math.fsum`.
"""

import math

import numpy as np

WINDOW = 4096
_INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}


def softmax_topk(logits, k):
    logits = np.asanyarray(logits)
    if logits.dtype.kind != "f" or logits.dtype.itemsize not in _INTEGER:
        raise TypeError(f"unsupported dtype {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError("expected (N, V)")
    if not (k >= 1 and k <= logits.shape[1]):
        raise ValueError("k out of range")
    probs, indices = [], []
    for row in logits:
        peak, total = _statistics(row)
        chosen = _choose(row, k)
        with np.errstate(over="ignore"):
            weights = np.exp(row[chosen].astype(np.float64) - peak) / total
        probs.append(weights.astype(logits.dtype))
        indices.append(chosen)
    shape = (logits.shape[0], k)
    return (
        np.array(probs, logits.dtype).reshape(shape),
        np.array(indices, np.int64).reshape(shape),
    )


def _windows(row):
    return ((start, row[start : start + WINDOW]) for start in range(0, len(row), WINDOW))


def _statistics(row):
    peaks = []
    for _, part in _windows(row):
        if np.isnan(part).any() or np.isposinf(part).any():
            raise ValueError("NaN or +inf among the logits")
        peaks.append(float(part.max()))
    peak = max(peaks)
    if peak == -math.inf:
        raise ValueError("all logits of a row are -inf")
    with np.errstate(over="ignore"):
        sums = [float(np.exp(part.astype(np.float64) - peak).sum()) for _, part in _windows(row)]
    return peak, math.fsum(sums)


def _keys(part):
    """Integers in the order of the floats; adding 0.0 makes +0 of −0."""
    bits = np.ascontiguousarray(part + part.dtype.type(0)).view(_INTEGER[part.dtype.itemsize])
    bits = bits.astype(np.int64)
    lowest = np.int64(np.iinfo(_INTEGER[part.dtype.itemsize]).min)
    return np.where(bits >= 0, bits, lowest - bits)


def _choose(row, k):
    threshold = _kth_key(row, k)
    above_keys, above, equal = [], [], []
    for start, part in _windows(row):
        keys = _keys(part)
        higher = np.flatnonzero(keys > threshold)
        above_keys.extend(keys[higher].tolist())
        above.extend((start + higher).tolist())
        if len(equal) < k:
            equal.extend((start + np.flatnonzero(keys == threshold)).tolist()[:k])
    ranked = sorted(range(len(above)), key=lambda i: -above_keys[i])
    return np.array([above[i] for i in ranked] + equal[: k - len(above)], np.int64)


def _kth_key(row, k):
    """The k-th largest key, digit by digit from the top."""
    bits = 8 * row.dtype.itemsize
    prefix, missing = None, k
    for shift in range(bits - 16, -1, -16):
        counts = np.zeros(1 << 16, np.int64)
        for _, part in _windows(row):
            shifted = _keys(part) >> shift
            if prefix is not None:
                shifted = shifted[shifted >> 16 == prefix]
            counts += np.bincount(_digit(shifted, prefix), minlength=1 << 16)
        reached = np.cumsum(counts[::-1])
        back = int(np.searchsorted(reached, missing))
        missing -= int(reached[back - 1]) if back else 0
        digit = (1 << 16) - 1 - back
        prefix = digit - (1 << 15) if prefix is None else (prefix << 16) + digit
    return prefix


def _digit(shifted, prefix):
    """The lowest sixteen bits; the leading digit is signed, so it is moved to start at 0."""
    return shifted + (1 << 15) if prefix is None else shifted & 0xFFFF
