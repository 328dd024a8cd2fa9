"""The calibrated 4 bit codec: more bits for the directions in which a model's rows vary most.

In the basis of their covariance the leading directions of a row get up to seven bits and the last
ones one or none (reverse water-filling), with the Lloyd-Max levels of a normal distribution and one
float16 scale per row. Keys are rotated back to position 0 first, because rotary embedding hides
most of their structure; the position at arrival is stored beside the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np

from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.kv_cache.codecs import Fields

MOST_BITS = 7
#: Candidate scales, relative to the root mean square of a row in its basis.
SHARES = tuple(2 ** (i / 8) for i in range(-3, 5))
_HALF_LARGEST = 65504.0
_NORMAL = NormalDist()


@dataclass(frozen=True, eq=False)
class Basis:
    """Maps row r of layer l and head g to (r − center[l,g]) @ into[l,g], of variance about 1.

    `back` inverts `into`. `widths` are the bits of the directions, descending, equal for all heads.
    Arrays are float16: center (layers,G,D), maps (layers,G,D,D).
    """

    center: np.ndarray
    into: np.ndarray
    back: np.ndarray
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        shape, bits = self.center.shape, sum(self.widths)
        if len(shape) != 3:
            raise ShapeError(f"center must be (layers, G, D), got {shape}")
        maps = (*shape, shape[2])
        for name, want in (("center", shape), ("into", maps), ("back", maps)):
            array = getattr(self, name)
            if array.shape != want or array.dtype != np.float16 or not np.isfinite(array).all():
                raise ShapeError(f"{name} must be finite float16 {want}, got {array.shape}")
        if list(self.widths) != sorted(self.widths, reverse=True) or len(self.widths) != shape[2]:
            raise RangeError(f"widths must be {shape[2]} falling numbers, got {self.widths}")
        if not (0 <= self.widths[-1] <= self.widths[0] <= MOST_BITS) or bits % 8 or not bits:
            raise RangeError(f"widths of 0 … {MOST_BITS} bits must fill bytes, got {self.widths}")
        product = self.into.astype(np.float32) @ self.back.astype(np.float32)
        if not np.abs(product - np.eye(shape[2])).max() < 0.05:
            raise RangeError("a map is singular: `back` does not undo `into`")

    @property
    def nbytes(self) -> int:
        return self.center.nbytes + self.into.nbytes + self.back.nbytes + len(self.widths)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The constants of a model, computed by `calibrate`.

    `turns` (D/2,) are the rotary frequencies of elements d and d + D/2 of a key in radians per
    position; None: keys are not rotated.
    """

    keys: Basis
    values: Basis
    turns: np.ndarray | None = None

    def __post_init__(self) -> None:
        shape, turns = self.shape, self.turns
        if self.values.center.shape != shape:
            raise ShapeError(f"keys are {shape}, but values {self.values.center.shape}")
        if turns is not None:
            check_turns(turns, shape[2])

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers, G, D)."""
        return self.keys.center.shape

    @property
    def nbytes(self) -> int:
        turns = 0 if self.turns is None else self.turns.nbytes
        return self.keys.nbytes + self.values.nbytes + turns


def check_turns(turns: np.ndarray, width: int) -> None:
    """Raises unless `turns` is a finite float64 vector: large positions need the precision."""
    if turns.dtype != np.float64 or turns.ndim != 1 or 2 * len(turns) != width:
        got = f"{turns.dtype} {turns.shape}"
        raise ShapeError(f"turns must be float64 ({width / 2:g},), got {got}")
    if not np.isfinite(turns).all():
        raise RangeError("turns are not finite")


class Arithmetic(Protocol):
    """Operations that NumPy and torch spell differently."""

    half: Any
    code: Any

    def hold(self, constant: np.ndarray) -> Any: ...
    def wide(self, dtype: Any) -> Any: ...
    def cast(self, array: Any, dtype: Any) -> Any: ...
    def cells(self, values: Any, edges: Any) -> Any: ...
    def joined(self, parts: Sequence[Any]) -> Any: ...
    def chosen(self, where: Any, a: Any, b: Any) -> Any: ...
    def look_up(self, table: Any, index: Any) -> Any: ...
    def positions(self, start: int, n: int) -> Any: ...
    def waves(self, angles: Any) -> tuple[Any, Any]: ...


class NumpyArithmetic:
    """For arrays."""

    half, code = np.float16, np.uint8

    def hold(self, constant: np.ndarray) -> np.ndarray:
        return constant

    def wide(self, dtype: Any) -> Any:
        return dtype

    def cast(self, array: np.ndarray, dtype: Any) -> np.ndarray:
        return np.asarray(array, dtype)

    def cells(self, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
        return np.searchsorted(edges, values).astype(np.uint8)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=-1)

    def chosen(self, where: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(where, a, b)

    def look_up(self, table: np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.asarray(table[index])

    def positions(self, start: int, n: int) -> np.ndarray:
        return np.arange(start, start + n, dtype=np.int32)[:, None, None]

    def waves(self, angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.cos(angles), np.sin(angles)


class CalibratedPair:
    """Encodes keys and values of a layer, with the positions if keys are rotated."""

    def __init__(self, calibration: Calibration, math: Arithmetic) -> None:
        self._math = math
        self._keys = BasisCodec(calibration.keys, math)
        self._values = BasisCodec(calibration.values, math)
        self._turns = None if calibration.turns is None else math.hold(calibration.turns)

    def encode(self, layer: int, start: int, k: Any, v: Any) -> Fields:
        wide = self._math.wide(k.dtype)
        k, v = self._math.cast(k, wide), self._math.cast(v, wide)
        if not all(bool((abs(rows) <= _HALF_LARGEST).all()) for rows in (k, v)):
            raise RangeError(f"values must be finite and at most {_HALF_LARGEST:g}")
        values = self._values.encode(layer, v)
        if self._turns is None:
            return (*self._keys.encode(layer, k), *values)
        positions = self._math.positions(start, len(k))
        return (positions, *self._keys.encode(layer, self._turned(k, positions, -1)), *values)

    def decode(self, layer: int, fields: Fields, dtype: Any) -> tuple[Any, Any]:
        *positions, k, k_scale, v, v_scale = fields
        wide = self._math.wide(dtype)
        keys = self._keys.decode(layer, (k, k_scale), wide)
        if positions:
            keys = self._turned(keys, positions[0], 1)
        values = self._values.decode(layer, (v, v_scale), wide)
        return self._math.cast(keys, dtype), self._math.cast(values, dtype)

    def _turned(self, rows: Any, positions: Any, sign: int) -> Any:
        waves = self._math.waves(sign * positions * self._turns)  # float64, as `turns` are
        cosine, sine = (self._math.cast(wave, rows.dtype) for wave in waves)
        half = rows.shape[-1] // 2
        left, right = rows[..., :half], rows[..., half:]
        return self._math.joined((left * cosine - right * sine, right * cosine + left * sine))


class BasisCodec:
    """Rows (n,G,D) of a layer as bytes (n,G,bits/8) and scales (n,G,1).

    Bit p of all directions with more than p bits forms a plane; these directions come first because
    widths descend. The planes are stored one after the other.
    """

    def __init__(self, basis: Basis, math: Arithmetic) -> None:
        self._math = math
        widths = np.array(basis.widths)
        self._center, self._into, self._back = map(
            math.hold, (basis.center, basis.into, basis.back)
        )
        self._planes = [int((widths > p).sum()) for p in range(widths[0])]
        starts = [basis.widths.index(w) for w in dict.fromkeys(basis.widths)]
        self._groups = [
            (slice(start, stop), math.hold(edges(levels(basis.widths[start]))))
            for start, stop in pairwise([*starts, len(widths)])
        ]
        self._levels = math.hold(np.concatenate([levels(w) for w in range(MOST_BITS + 1)]))
        self._first = math.hold(2**widths - 1)
        # Bits are assigned for equal errors: w bits mean a deviation of about 2^w.
        self._weights = math.hold(np.where(widths > 0, 4.0**widths, 0))

    def encode(self, layer: int, rows: Any) -> Fields:
        center, into = (self._math.cast(c[layer], rows.dtype) for c in (self._center, self._into))
        codes, scales = self._fitted(_mapped(rows - center, into))
        return self._packed(codes), scales

    def decode(self, layer: int, fields: Fields, dtype: Any) -> Any:
        packed, scales = fields
        center, back = (self._math.cast(c[layer], dtype) for c in (self._center, self._back))
        unit = self._values(self._unpacked(packed), dtype) * self._math.cast(scales, dtype)
        return _mapped(unit, back) + center

    def _fitted(self, unit: Any) -> tuple[Any, Any]:
        """Codes and scales with the least error among the candidate scales."""
        size = (unit[..., : self._planes[0]] ** 2).mean(-1)[..., None] ** 0.5
        if not bool((size * SHARES[-1] <= _HALF_LARGEST).all()):
            raise RangeError("rows are too far from those that the cache was calibrated with")
        codes, scales, error = self._tried(unit, size * SHARES[0])
        for share in SHARES[1:]:
            candidate, tried, smaller = self._tried(unit, size * share)
            better = smaller < error
            codes = self._math.chosen(better, candidate, codes)
            scales = self._math.chosen(better, tried, scales)
            error = self._math.chosen(better, smaller, error)
        return codes, scales

    def _tried(self, unit: Any, exact: Any) -> tuple[Any, Any, Any]:
        scales = self._math.cast(exact, self._math.half)
        steps = self._math.cast(scales, unit.dtype)
        ratios = unit / self._math.chosen(steps == 0, steps + 1, steps)
        codes = self._math.joined(
            [
                self._math.cells(ratios[..., where], self._math.cast(edge, unit.dtype))
                for where, edge in self._groups
            ]
        )
        missed = self._values(codes, unit.dtype) * steps - unit
        weights = self._math.cast(self._weights, unit.dtype)
        return codes, scales, (missed**2 * weights).sum(-1)[..., None]

    def _values(self, codes: Any, dtype: Any) -> Any:
        return self._math.cast(self._math.look_up(self._levels, codes + self._first), dtype)

    def _packed(self, codes: Any) -> Any:
        planes = [(codes[..., :count] >> p) & 1 for p, count in enumerate(self._planes)]
        bits = self._math.joined(planes)
        bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 8, 8)
        places = self._math.cast(self._math.hold(2 ** np.arange(8)), self._math.code)
        return self._math.cast((bits * places).sum(-1), self._math.code)

    def _unpacked(self, packed: Any) -> Any:
        places = self._math.cast(self._math.hold(np.arange(8)), self._math.code)
        bits = (packed[..., None] >> places) & 1
        bits = bits.reshape(*packed.shape[:-1], 8 * packed.shape[-1])
        codes, begin = 0 * bits[..., : len(self._first)], 0
        for p, count in enumerate(self._planes):
            codes[..., :count] |= bits[..., begin : begin + count] << p
            begin += count
        return codes


@cache
def levels(bits: int) -> np.ndarray:
    """The 2^bits levels of least squared error for a normal distribution (Lloyd-Max)."""
    count = 2**bits
    # Quantiles of the density's cube root are optimal for many levels; iterations help few.
    wide = NormalDist(0, 3**0.5)
    found = np.array([wide.inv_cdf((i + 0.5) / count) for i in range(count)])
    for _ in range(100):
        weights, moments = _cells(found)
        found = moments / weights
    return found


@cache
def distortion(bits: int) -> float:
    """The mean squared error of these levels for a normal distribution."""
    weights, moments = _cells(levels(bits))
    return float(1 + (levels(bits) * (weights * levels(bits) - 2 * moments)).sum())


def edges(found: np.ndarray) -> np.ndarray:
    """The midpoints between neighbouring levels."""
    return np.asarray((found[1:] + found[:-1]) / 2)


def _cells(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The probability of each level's cell under a normal distribution, and its first moment."""
    cuts = edges(found)
    below = np.array([0, *map(_NORMAL.cdf, cuts), 1])
    height = np.array([0, *map(_NORMAL.pdf, cuts), 0])
    return np.diff(below), -np.diff(height)


def _mapped(rows: Any, maps: Any) -> Any:
    """Multiplies each head (n,D) of rows (n,G,D) by its own map (D,D)."""
    return (rows.swapaxes(0, 1) @ maps).swapaxes(0, 1)
