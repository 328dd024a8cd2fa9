"""Reorders the rows of a batch, as beam search does, with forks instead of copies."""

from collections.abc import Sequence
from typing import Protocol


class Forking(Protocol):
    """The methods that `follow` calls."""

    def fork(self, seq: int) -> int: ...
    def free(self, seq: int) -> None: ...


def follow(cache: Forking, seqs: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The sequences of the next step, where row i continues row parents[i] of this one.

    A row's first successor reuses its sequence, further ones are forks, and a row without a
    successor is freed. Forks precede frees, so a failed fork changes nothing.
    """
    taken: set[int] = set()
    following: list[int] = []
    made: list[int] = []
    try:
        for parent in parents:
            if parent in taken:
                made.append(cache.fork(seqs[parent]))
                following.append(made[-1])
            else:
                taken.add(parent)
                following.append(seqs[parent])
    except MemoryError:
        for seq in made:
            cache.free(seq)
        raise
    for row, seq in enumerate(seqs):
        if row not in taken:
            cache.free(seq)
    return following
