"""What a record holds: key and value rows as they are, or quantised."""

import numpy as np


class PlainCodec:
    """Rows as they are."""

    def __init__(self, heads, width):
        self.heads, self.width = heads, width

    def encode(self, k, v):
        """Records (n,) of k and v (n, G, D)."""
        row = (k.dtype, (self.heads, self.width))
        records = np.empty(len(k), [("k", *row), ("v", *row)])
        records["k"], records["v"] = k, v
        return records

    def decode(self, records, dtype):
        """(k, v) of records, as fresh arrays."""
        return tuple(np.array(records[name], dtype=dtype, order="C") for name in ("k", "v"))


class QuantisedCodec:
    """Symmetric integers for each row of D elements, with the row's largest magnitude in full.

    An element is code * peak / levels, levels = 2^(bits - 1) - 1.  Codes of 4 bits lie two in a byte,
    the even element in the low half, raised by 8 to be positive.
    """

    def __init__(self, heads, width, bits):
        self.heads, self.width, self.bits = heads, width, bits
        self.levels = 2 ** (bits - 1) - 1

    def encode(self, k, v):
        """Records (n,) of k and v (n, G, D)."""
        codes = ("i1", (self.heads, self.width)) if self.bits == 8 else (
            "u1", (self.heads, (self.width + 1) // 2))
        peak = (k.dtype, (self.heads,))
        records = np.empty(len(k), [
            ("k", *codes), ("v", *codes), ("k_peak", *peak), ("v_peak", *peak)])
        for name, rows in (("k", k), ("v", v)):
            records[name + "_peak"] = np.abs(rows).max(axis=-1)
            records[name] = self._pack(self._codes(rows, records[name + "_peak"]))
        return records

    def decode(self, records, dtype):
        """(k, v) of records, as fresh arrays."""
        return tuple(
            (self._unpack(records[name])
             * (records[name + "_peak"].astype(np.float64) / self.levels)[..., None]).astype(dtype)
            for name in ("k", "v"))

    def _codes(self, rows, peaks):
        divisor = np.where(peaks > 0, peaks, 1).astype(np.float64)[..., None]
        return np.rint(rows / divisor * self.levels).astype(np.int8)

    def _pack(self, codes):
        if self.bits == 8:
            return codes
        nibbles = (codes + 8).astype(np.uint8)
        packed = nibbles[..., 0::2].copy()
        packed[..., :self.width // 2] |= nibbles[..., 1::2] << 4
        return packed

    def _unpack(self, packed):
        if self.bits == 8:
            return packed
        codes = np.empty((*packed.shape[:-1], self.width), np.int8)
        codes[..., 0::2] = packed & 15
        codes[..., 1::2] = packed[..., :self.width // 2] >> 4
        codes -= 8
        return codes
