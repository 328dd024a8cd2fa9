"""Softmax fused with top-k by radix selection: digit histograms find the k-th logit, one scan
collects.

No candidate list is kept while searching: each scan over the row fixes DIGIT more bits of the
key of the k-th best entry.
"""

import numpy as np

SPAN = 16384
DIGIT = 8
KINDS = {
    np.dtype(np.float16): np.uint16,
    np.dtype(np.float32): np.uint32,
    np.dtype(np.float64): np.uint64,
}


def ordered(values, kind):
    """Unsigned integers in the order of the floats; -0 and +0 coincide."""
    width = 8 * np.dtype(kind).itemsize
    sign = kind(1 << (width - 1))
    bits = np.add(values, values.dtype.type(0)).view(kind)
    return np.where(bits >= sign, ~bits, bits ^ sign)


class Row:
    """One row of logits, read in spans."""

    def __init__(self, row):
        self.row = row
        self.kind = KINDS[row.dtype]
        self.bits = 8 * row.dtype.itemsize

    def spans(self):
        for start in range(0, len(self.row), SPAN):
            yield start, np.ascontiguousarray(self.row[start : start + SPAN])

    def largest(self):
        best = -np.inf
        for _, span in self.spans():
            peak = float(span.max())
            if not peak < np.inf:
                raise ValueError("NaN or +inf in a row")
            best = max(best, peak)
        if best == -np.inf:
            raise ValueError("a row is all -inf")
        return best

    def total(self, largest):
        mass = 0.0
        for _, span in self.spans():
            mass += float(np.exp(span.astype(np.float64) - largest).sum())
        return mass

    def histogram(self, prefix, shift):
        """How many keys that start with the prefix have each next digit."""
        counts = np.zeros(1 << DIGIT, dtype=np.int64)
        for _, span in self.spans():
            key = ordered(span, self.kind)
            if shift + DIGIT < self.bits:
                key = key[key >> self.kind(shift + DIGIT) == self.kind(prefix)]
            digit = (key >> self.kind(shift)) & self.kind((1 << DIGIT) - 1)
            counts += np.bincount(digit.astype(np.int64), minlength=1 << DIGIT)
        return counts

    def kth_key(self, k):
        """(a lower bound of the k best keys, how many entries with exactly that key may be among them)."""  # noqa: E501
        prefix, wanted = 0, k
        for shift in range(self.bits - DIGIT, -1, -DIGIT):
            counts = self.histogram(prefix, shift)
            digit = len(counts) - 1
            while counts[digit] < wanted:
                wanted -= int(counts[digit])
                digit -= 1
            prefix = (prefix << DIGIT) | digit
            if counts[digit] == wanted:  # all keys with this prefix are in
                return prefix << shift, wanted
        return prefix, wanted

    def best(self, k):
        """(logits, indices) of the k best, best first."""
        threshold, ties = self.kth_key(k)
        values = np.empty(k, dtype=self.row.dtype)
        places = np.empty(k, dtype=np.int64)
        filled = 0
        for start, span in self.spans():
            key = ordered(span, self.kind)
            equal = np.flatnonzero(key == self.kind(threshold))[:ties]
            ties -= len(equal)
            chosen = np.sort(np.concatenate([np.flatnonzero(key > self.kind(threshold)), equal]))
            values[filled : filled + len(chosen)] = span[chosen]
            places[filled : filled + len(chosen)] = chosen + start
            filled += len(chosen)
        order = np.argsort(-values, kind="stable")
        return values[order].astype(np.float64), places[order]


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    if not isinstance(logits, np.ndarray) or logits.dtype not in KINDS:
        raise TypeError("logits must be a float16, float32 or float64 array")
    if logits.ndim != 2:
        raise ValueError("logits must be two-dimensional")
    if not 0 < k <= logits.shape[1]:
        raise ValueError("k must be at least 1 and at most V")
    probs = np.empty((logits.shape[0], k), logits.dtype)
    indices = np.empty((logits.shape[0], k), np.int64)
    with np.errstate(over="ignore", under="ignore"):
        for n, values in enumerate(logits):
            row = Row(values)
            largest = row.largest()
            kept, indices[n] = row.best(k)
            probs[n] = np.exp(kept - largest) / row.total(largest)
    return probs, indices
