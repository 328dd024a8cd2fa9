"""Which rows a cache with `recent` must still know more exactly: a mark a row, nothing clever."""

from collections.abc import Sequence

import numpy as np

from trapline.gold.kv_cache.oracle import ListCache


class RecentRows(ListCache):
    """Lists of rows, the newest of them marked.

    A row is marked while it is among the newest `recent` of its sequence and layer since it came,
    and as long as no row after it lacks the mark.
    """

    def __init__(self, num_layers: int, recent: int) -> None:
        super().__init__(num_layers)
        self.recent = recent
        self.marks: dict[int, list[list[bool]]] = {}

    def add(self, seq: int) -> None:
        super().add(seq)
        self.marks[seq] = [[] for _ in range(self.num_layers)]

    def append(self, seq: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        super().append(seq, layer, k, v)
        marks = [*self.marks[seq][layer], *(True for _ in k)]
        behind = len(marks) - self.recent
        self.marks[seq][layer] = [mark and i >= behind for i, mark in enumerate(marks)]

    def fork(self, seq: int, child: int) -> None:
        super().fork(seq, child)
        self.marks[child] = [list(marks) for marks in self.marks[seq]]

    def keep(self, seq: int, indices: Sequence[int]) -> None:
        super().keep(seq, indices)
        kept = [[marks[i] for i in indices] for marks in self.marks[seq]]
        self.marks[seq] = [[all(marks[i:]) for i in range(len(marks))] for marks in kept]

    def free(self, seq: int) -> None:
        super().free(seq)
        del self.marks[seq]
