"""Rows as matrices, tables by their width, and the answers before they are computed."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
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


def forward_shape(
    x: Tensor, residual: Tensor | None, _w: Any, _b: Any, _eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one_a_row = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(one_a_row if centred else 0, dtype=torch.float32),
        x.new_empty(one_a_row, dtype=torch.float32),
    )


def backward_shape(
    _dy: Tensor,
    _dtotal: Any,
    x: Tensor,
    w: Tensor | None,
    _mean: Any,
    _rstd: Any,
    _eps: float,
    _centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(width if w is not None else 0),
        x.new_empty(width if biased else 0),
    )
