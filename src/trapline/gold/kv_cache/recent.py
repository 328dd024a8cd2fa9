"""Second codes for the newest rows of a sequence, which encode the error of the first code.

Attention weights near positions most, so bits are worth most there. The first code of a row never
changes; the second, 4 bits per element, is stored outside the pool and dropped once enough newer
rows have arrived. Stored arrays are replaced, never written, so that forks can share them.
"""

from typing import Any

import numpy as np

from trapline.gold.kv_cache.backend import Backend
from trapline.gold.kv_cache.codecs import Fields
from trapline.gold.kv_cache.dense import grown


class Recent:
    """Second codes of the last `most` rows of each sequence and layer."""

    def __init__(self, num_layers: int, most: int) -> None:
        self.num_layers, self.most = num_layers, most
        self._held: dict[int, list[Fields]] = {}

    def open(self, seq: int) -> None:
        self._held[seq] = [()] * self.num_layers

    def close(self, seq: int) -> None:
        del self._held[seq]

    def encode(self, backend: Backend, layer: int, fields: Fields, k: Any, v: Any) -> Fields:
        """The second codes of the last of these new rows (n,G,D), given their first codes."""
        if self.most == 0:
            return ()
        newest = slice(max(0, len(k) - self.most), None)
        first = tuple(field[newest] for field in fields)
        near_k, near_v = backend.codec.decode(layer, first, k.dtype)
        return backend.second.encode(layer, 0, k[newest] - near_k, v[newest] - near_v)

    def append(self, seq: int, layer: int, new: Fields) -> None:
        """Appends codes and drops the oldest beyond `most`."""
        held = self._held[seq][layer] or tuple(field[:0] for field in new)
        self._held[seq][layer] = tuple(
            _joined(old[max(0, len(old) + len(added) - self.most) :], added)
            for old, added in zip(held, new, strict=True)
        )

    def refine(self, backend: Backend, seq: int, layer: int, k: Any, v: Any) -> None:
        """Adds the decoded second codes to the last of these rows, in place."""
        held = self._held[seq][layer]
        if held:
            missed = backend.second.decode(layer, held, k.dtype)
            for rows, more in zip((k, v), missed, strict=True):
                n = min(len(rows), len(more))  # a window may be shorter
                rows[len(rows) - n :] += more[len(more) - n :]

    def fork(self, seq: int, child: int) -> None:
        self._held[child] = list(self._held[seq])

    def keep(self, seq: int, indices: np.ndarray, counts: list[int]) -> None:
        """Keeps the codes of these of the layers' `counts` positions, up to the last gap."""
        self._held[seq] = [
            _gathered(held, indices, count)
            for held, count in zip(self._held[seq], counts, strict=True)
        ]

    def nbytes(self) -> int:
        """Bytes of all codes; arrays that forks share count once."""
        stored = {id(a): a for layers in self._held.values() for held in layers for a in held}
        return sum(int(array.nbytes) for array in stored.values())


def _joined(old: Any, new: Any) -> Any:
    both = grown(old, len(old), len(old) + len(new))
    both[len(old) :] = new
    return both


def _gathered(held: Fields, indices: np.ndarray, count: int) -> Fields:
    """Selects codes; `held` belongs to the last of `count` positions."""
    if not held:
        return ()
    places = indices - (count - len(held[0]))
    gaps = np.flatnonzero(places < 0)
    places = places[gaps[-1] + 1 :] if len(gaps) else places
    return tuple(array[places] for array in held)
