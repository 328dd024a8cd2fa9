"""The rows that one decoding step advances by a token."""

from typing import NamedTuple

from torch import Tensor


class DecodeBatch(NamedTuple):
    """(B,) tensors of one new token a row, and the pages of its keys and values.

    Rows come in groups of `beams` that share `prefix` (groups,) positions on `pages` (groups, M) of
    `page_size`. A row's other positions lie on its `tails` (B, M), pages of `tail_size`. Rows that
    share nothing have only tails.
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
