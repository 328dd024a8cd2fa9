"""Rows as matrices, and tables by their width."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

Cut = TypeVar("Cut")


def cut_for(table: Mapping[int, Cut], width: int) -> Cut | None:
    """The entry for rows of this width; None for wider ones."""
    return next((cut for widest, cut in table.items() if width <= widest), None)


def rows_of(x: Tensor) -> Tensor:
    """(rows, D) with neighbours along D beside each other: a view wherever that is possible."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def dense(w: Tensor | None) -> Tensor | None:
    """Weights beside each other."""
    return None if w is None else w.contiguous()
