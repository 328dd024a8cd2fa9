"""Contiguous storage: one growing array per sequence, layer and field."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from trapline.gold.kv_cache.codecs import Fields


class DenseStorage:
    """The simplest storage, as a baseline: capacity counts positions, a fork is a copy."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.num_layers, self.capacity = num_layers, capacity
        self._rows: dict[int, list[Fields]] = {}
        self._used: dict[int, list[int]] = {}

    def allocate(self, empty: Fields, rows: Any) -> None:
        del rows  # slices work for arrays and tensors
        self._empty = empty

    def open(self, seq: int) -> None:
        self._rows[seq] = [() for _ in range(self.num_layers)]
        self._used[seq] = [0] * self.num_layers

    def close(self, seq: int) -> None:
        del self._rows[seq], self._used[seq]

    def adopt(self, seq: int, tokens: Sequence[int], salt: Hashable) -> int:
        """Dense sequences share nothing."""
        del seq, tokens, salt
        return 0

    def publish(self, seq: int, tokens: Sequence[int], salt: Hashable) -> None:
        """Dense sequences share nothing."""

    def reserve(self, seq: int, layer: int, start: int, n: int, behind: int = 0) -> None:
        """Raises MemoryError unless n more rows fit. Rows behind a window stay stored."""
        del behind
        others = sum(used[layer] for name, used in self._used.items() if name != seq)
        if others + start + n > self.capacity:
            left = self.capacity - others - start
            raise MemoryError(f"{n} positions do not fit: {left} of {self.capacity} are left")

    def write(self, seq: int, layer: int, start: int, fields: Fields) -> None:
        stop = start + len(fields[0])
        held = self._rows[seq][layer] or self._empty
        if stop > len(held[0]):
            # Growing by half keeps appending one by one linear in time.
            room = min(max(stop, len(held[0]) * 3 // 2), self.capacity)
            held = tuple(grown(array, start, room) for array in held)
        for array, field in zip(held, fields, strict=True):
            array[start:stop] = field
        self._rows[seq][layer] = held
        self._used[seq][layer] = stop

    def read(self, seq: int, layer: int, count: int) -> Fields:
        return tuple(array[:count] for array in self._rows[seq][layer] or self._empty)

    def fork(self, seq: int, child: int) -> None:
        for layer, used in enumerate(self._used[seq]):
            self.reserve(child, layer, 0, used)
        self.open(child)
        self._used[child] = list(self._used[seq])
        self._rows[child] = self._each(seq, lambda array: grown(array, len(array), len(array)))

    def gather(self, seq: int, indices: np.ndarray) -> None:
        self._rows[seq] = self._each(seq, lambda array: array[indices])
        self._used[seq] = [len(indices)] * self.num_layers

    def shrink(self, seq: int, n: int) -> None:
        self._rows[seq] = self._each(seq, lambda array: grown(array, n, n))
        self._used[seq] = [n] * self.num_layers

    def first(self, seq: int) -> int:
        del seq
        return 0

    def nbytes(self) -> int:
        rows = sum(a.nbytes for layers in self._rows.values() for held in layers for a in held)
        return int(rows) + 8 * self.num_layers * len(self._used)

    def _each(self, seq: int, change: Callable[[Any], Any]) -> list[Fields]:
        return [tuple(change(array) for array in held) for held in self._rows[seq]]


def grown(array: Any, used: int, room: int) -> Any:
    """A new array or tensor of `room` rows with the first `used` rows copied."""
    shape = (room, *array.shape[1:])
    new = np.zeros(shape, array.dtype) if isinstance(array, np.ndarray) else array.new_zeros(shape)
    new[:used] = array[:used]
    return new
