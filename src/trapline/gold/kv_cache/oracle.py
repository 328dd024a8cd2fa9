"""The reference KV cache: lists of rows, and attention in float64.

Axis letters: n new positions, S positions of a sequence, H query heads, G kv heads, D head width.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

#: Key and value of one position in one layer, (G,D) each. Forking a sequence or reordering its
#: positions moves rows and never copies them, so a row can be followed by identity.
Row = tuple[np.ndarray, np.ndarray]


class ListCache:
    """An unlimited cache: one list of rows for each sequence and layer."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.rows: dict[int, list[list[Row]]] = {}

    def add(self, seq: int) -> None:
        self.rows[seq] = [[] for _ in range(self.num_layers)]

    def append(self, seq: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        self.rows[seq][layer].extend((np.array(a), np.array(b)) for a, b in zip(k, v, strict=True))

    def fork(self, seq: int, child: int) -> None:
        self.rows[child] = [list(layer) for layer in self.rows[seq]]

    def keep(self, seq: int, indices: Sequence[int]) -> None:
        """Keeps these positions, in this order, in every layer."""
        self.rows[seq] = [[layer[i] for i in indices] for layer in self.rows[seq]]

    def truncate(self, seq: int, n: int) -> None:
        self.keep(seq, range(n))

    def free(self, seq: int) -> None:
        del self.rows[seq]

    def length(self, seq: int) -> int:
        """Positions present in every layer."""
        return min(len(layer) for layer in self.rows[seq])

    def view(self, seq: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values (S,G,D) of a layer that holds at least one position."""
        keys, values = zip(*self.rows[seq][layer], strict=True)
        return np.stack(keys), np.stack(values)


class RecentRows(ListCache):
    """A `ListCache` that marks the rows a cache with `recent` must store with a second code.

    A row is marked while it has stayed among the newest `recent` rows of its sequence and layer,
    and while every later row is marked.
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


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None) -> np.ndarray:
    """q (n,H,D) belong to the last n of the S positions of k, v (S,G,D); float64 (n,H,D).

    Query i sees positions 0 … S − n + i, or the last `window` of them. Query head h reads kv head
    h // (H/G).
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    n, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros(q.shape)
    for i in range(n):
        end = len(k) - n + i + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for h in range(heads):
            scores = k[seen, h // group] @ q[i, h] / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ v[seen, h // group] / weights.sum()
    return out


def quantization_step(rows: np.ndarray, bits: int) -> np.ndarray:
    """The step of symmetric codes with one scale a position and head, (n,G,D) → (n,G,1)."""
    largest = np.abs(rows.astype(np.float64)).max(axis=-1, keepdims=True)
    return np.asarray(largest / (2 ** (bits - 1) - 1))


def max_context(
    spec: Mapping[str, int], gpu_bytes: int, utilization: Fraction, weight_bytes: int, reserve: int
) -> int:
    """⌊(utilization · gpu − weights − reserve) / (2·layers·heads·width·bits/8)⌋, never below 0."""
    a_token = Fraction(
        2 * spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"] * spec["bits"], 8
    )
    return max(0, (utilization * gpu_bytes - weight_bytes - reserve) // a_token)
