"""Products with packed ternary weights: kernels on a GPU, compiled C or torch on a CPU.

None of them makes a dense copy of the matrix: the torch path unpacks a tile of rows at a time.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import ShapeError, UnsupportedError
from trapline.gold.ternary.cpu import packed_linear as native

#: From so many rows of x on, unpacking a tile once for all of them is cheaper.
_COMPILED_ROWS = 96
_TILE_WEIGHTS = 1 << 18


def packed_linear(
    x: Tensor, plane: Tensor, scales: Tensor, group_size: int = 128, *, settled: bool = False
) -> Tensor:
    """x (…, K) times the transposed matrix of plane (N, ⌈K/4⌉) and scales (N, ⌈K/group⌉).

    `settled`: nothing that may still run on the GPU writes plane or scales. They are then read
    before the kernel that makes x is done. Gradients reach x; scales have none.
    """
    columns = x.shape[-1]
    wanted = (cdiv(columns, 4), (plane.shape[0], cdiv(columns, group_size)))
    if (plane.shape[1], tuple(scales.shape)) != wanted:
        raise ShapeError(
            f"{columns} columns do not fit a plane {tuple(plane.shape)} with scales"
            f" {tuple(scales.shape)} in groups of {group_size}"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if torch.is_grad_enabled() and scales.requires_grad:
        raise UnsupportedError("packed scales are not trained: TernaryLinear has latent weights")
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Product.apply(rows, plane, scales, group_size, settled)  # type: ignore[no-untyped-call]
    else:
        y = _product(rows, plane, scales, group_size, settled)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], plane.shape[0])


def _product(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int, settled: bool) -> Tensor:
    if rows.is_cuda:
        from trapline.gold.ternary.triton import packed_matmul as kernels

        return kernels.packed_matmul(rows, plane, scales, group_size, settled=settled)
    if _compiled(rows, scales, group_size):
        return _native(rows, plane, scales, group_size)
    return _tiles(rows, plane, scales, group_size)


class _Product(torch.autograd.Function):
    """The same where somebody wants x's gradient, for which tiles are unpacked once more."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, plane: Tensor, scales: Tensor, group_size: int, settled: bool
    ) -> Tensor:
        ctx.save_for_backward(plane, scales)
        ctx.columns, ctx.group_size = rows.shape[1], group_size
        return _product(rows, plane, scales, group_size, settled)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None, None, None]:
        (dy,), (plane, scales) = given, ctx.saved_tensors
        total = dy.new_zeros(len(dy), ctx.columns)
        for part, weights in _unpacked_tiles(plane, scales, ctx.columns, ctx.group_size):
            total += dy[:, part] @ weights.to(dy.dtype)
        return total, None, None, None, None


def packed_rows(
    ids: Tensor, plane: Tensor, scales: Tensor, columns: int, group_size: int = 128
) -> Tensor:
    """Rows `ids` of the matrix, float32 (…, K): what an embedding looks up."""
    return unpacked(plane[ids], scales[ids], columns, group_size)


def unpacked(plane: Tensor, scales: Tensor, columns: int, group_size: int) -> Tensor:
    """The float32 weights of some packed rows (…, K)."""
    codes = torch.index_select(_table(plane.device), 0, plane.flatten().int())
    codes = codes.view(*plane.shape[:-1], 4 * plane.shape[-1])[..., :columns]
    if columns % group_size:
        return codes * scales.float().repeat_interleave(group_size, dim=-1)[..., :columns]
    groups = codes.reshape(*scales.shape, group_size)
    return (groups * scales.float()[..., None]).flatten(-2)


def backend() -> str:
    """Which CPU path serves single rows, and why not the faster one."""
    reason = native.unavailable()
    return "compiled C" if reason is None else f"torch tiles: {reason}"


def _compiled(rows: Tensor, scales: Tensor, group_size: int) -> bool:
    whole = group_size % native.GROUP == 0 and scales.dtype == torch.float16
    return whole and rows.shape[0] <= _COMPILED_ROWS and native.unavailable() is None


def _native(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int) -> Tensor:
    x = rows.detach().float().contiguous()
    y = torch.empty(rows.shape[0], plane.shape[0])
    if group_size != native.GROUP:
        groups = cdiv(rows.shape[1], native.GROUP)
        scales = scales.repeat_interleave(group_size // native.GROUP, dim=1)[:, :groups]
    native.product(x, plane.contiguous(), scales.contiguous(), y, torch.get_num_threads())
    return y if rows.dtype == y.dtype else y.to(rows.dtype)


def _tiles(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int) -> Tensor:
    parts = [
        functional.linear(rows, weights.to(rows.dtype))
        for _, weights in _unpacked_tiles(plane, scales, rows.shape[1], group_size)
    ]
    return torch.cat(parts, dim=1) if parts else rows.new_zeros(len(rows), 0)


def _unpacked_tiles(
    plane: Tensor, scales: Tensor, columns: int, group_size: int
) -> Iterator[tuple[slice, Tensor]]:
    """The matrix a tile of rows at a time: which they are, and their weights."""
    step = max(1, _TILE_WEIGHTS // max(1, columns))
    for at in range(0, len(plane), step):
        part = slice(at, at + step)
        yield part, unpacked(plane[part], scales[part], columns, group_size)


@cache
def _table(device: torch.device) -> Tensor:
    """The four codes of each byte, (256, 4)."""
    places = torch.arange(256)[:, None] >> torch.tensor([0, 2, 4, 6])
    return ((places & 3) - 1).float().to(device)
