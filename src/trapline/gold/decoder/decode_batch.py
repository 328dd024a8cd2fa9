"""The rows that one decoding step advances by a token."""

from typing import NamedTuple

from torch import Tensor


class DecodeBatch(NamedTuple):
    """The rows of a step: (B,) tensors, and where their keys and values lie.

    Rows come in groups of `beams` that share `prefix` (groups,) positions on `pages` (groups, M) of
    `page_size`. What else a row has is on its `tails` (B, M), pages of `tail_size`. Rows that share
    nothing have only tails.
    """

    ids: Tensor
    positions: Tensor
    active: Tensor
    tails: Tensor
    tail_size: int
    pages: Tensor
    page_size: int
    prefix: Tensor
    beams: int = 1
