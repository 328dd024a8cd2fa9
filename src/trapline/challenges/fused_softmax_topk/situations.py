"""Rows and controls that several traps are built from."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import Array, Rng, ask, logits_of

#: Where a bug of the blind corpus was seen.
WRITTEN_BLIND = "an answer written from this prompt alone"
#: The first place of a tile, whatever power of two up to this its length is.
LATE = 1 << 15
#: A length that ends in the middle of a tile, and not in that of LATE.
LENGTH = LATE + (1 << 14) + 7241


def sparse(entries: Mapping[Any, float], length: int = LENGTH, low: float = -60.0) -> Array:
    """One row that is `low` but for a few places: what a tile holds beside them has no weight.

    A wrong treatment of tiles then gives the same wrong answer for tiles of every length.
    """
    row = np.full((1, length), low)
    for place, value in entries.items():
        row[0, place] = value
    return row


def masked(entries: Mapping[Any, float]) -> Array:
    """The same with −inf: what a tile holds beside the few has no weight relative to itself."""
    return sparse(entries, low=-np.inf)


def one_tile(submission: Submission, rng: Rng) -> None:
    """A control: short rows, which any tile holds whole, without ties."""
    ask(submission, logits_of(rng, (2, 30)), 4)
