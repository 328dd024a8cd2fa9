"""Products with packed ternary weights: kernels on a GPU, compiled C or torch on a CPU.

No path makes a dense copy of the matrix: the torch path unpacks one tile of rows at a time.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.arithmetic import cdiv
from trapline.gold.c_pointer import in_cpu_memory
from trapline.gold.errors import DTypeError, ShapeError, UnsupportedError
from trapline.gold.fallback import first_that_compiles
from trapline.gold.ternary.cpu import packed_linear as compiled

#: From this many rows of x on, unpacking a tile once for all of them is cheaper.
_COMPILED_ROWS = 96
_TILE_WEIGHTS = 1 << 18


def packed_linear(
    x: Tensor, plane: Tensor, scales: Tensor, group_size: int = 128, *, settled: bool = False
) -> Tensor:
    """x (…, K) times the transposed matrix of plane (N, ⌈K/4⌉) and scales (N, ⌈K/group⌉).

    `settled`: no kernel that may still be running writes plane or scales, so they are read before
    the kernel that computes x has finished. Gradients reach x; scales have none.
    """
    columns = x.shape[-1]
    wanted = (cdiv(columns, 4), (plane.shape[0], cdiv(columns, group_size)))
    if (plane.shape[1], tuple(scales.shape)) != wanted:
        raise ShapeError(
            f"{columns} columns do not fit a plane {tuple(plane.shape)} with scales"
            f" {tuple(scales.shape)} in groups of {group_size}"
        )
    if plane.dtype != torch.uint8 or not (x.is_floating_point() and scales.is_floating_point()):
        raise DTypeError(
            "a packed product needs floating-point x and scales and a uint8 plane,"
            f" got {x.dtype}, {scales.dtype} and {plane.dtype}"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if torch.is_grad_enabled() and scales.requires_grad:
        raise UnsupportedError(
            "packed scales cannot be trained: train a TernaryLinear, which has latent weights"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Product.apply(rows, plane, scales, group_size, settled)  # type: ignore[no-untyped-call]
    else:
        y = _product(rows, plane, scales, group_size, settled)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], plane.shape[0])


def _product(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int, settled: bool) -> Tensor:
    if rows.is_cuda:
        from trapline.gold.ternary.triton import packed_matmul

        product = packed_matmul.packed_matmul
        tiers = {
            "triton": partial(product, rows, plane, scales, group_size, settled=settled),
            "torch": partial(_by_tiles, rows, plane, scales, group_size),
        }
        return first_that_compiles("packed products", tiers)
    if not rows.device == plane.device == scales.device:
        raise UnsupportedError(
            f"x is on {rows.device}, the packed weights are on {plane.device} and {scales.device}:"
            " move them to one device"
        )
    if _runs_compiled(rows, plane, scales, group_size):
        return _compiled_product(rows, plane, scales, group_size)
    return _by_tiles(rows, plane, scales, group_size)


def _by_tiles(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """In torch, with a part of the matrix unpacked at a time."""
    parts = [
        functional.linear(rows, weights.to(rows.dtype))
        for _, weights in _unpacked_tiles(plane, scales, rows.shape[1], group_size)
    ]
    return torch.cat(parts, dim=1) if parts else rows.new_zeros(len(rows), 0)


def _runs_compiled(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int) -> bool:
    return (
        group_size % compiled.GROUP == 0
        and scales.dtype == torch.float16
        and rows.shape[0] <= _COMPILED_ROWS
        and in_cpu_memory(rows, plane, scales)
        and compiled.unavailable() is None
    )


def _compiled_product(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int) -> Tensor:
    if group_size != compiled.GROUP:
        groups = cdiv(rows.shape[1], compiled.GROUP)
        scales = scales.repeat_interleave(group_size // compiled.GROUP, dim=1)[:, :groups]
    x = rows.detach().float().contiguous()
    return compiled.product(x, plane.contiguous(), scales.contiguous()).to(rows.dtype)


class _Product(torch.autograd.Function):
    """The product with a gradient for x, which unpacks the tiles a second time."""

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
    """Rows `ids` of the matrix, float32 (…, K): the lookup of an embedding."""
    return unpacked(plane[ids], scales[ids], columns, group_size)


def unpacked(plane: Tensor, scales: Tensor, columns: int, group_size: int) -> Tensor:
    """The float32 weights (…, K) of packed rows."""
    table = _table_on(plane.device) if in_cpu_memory(plane) or plane.is_cuda else _table(plane)
    codes = torch.index_select(table, 0, plane.flatten().int())
    codes = codes.view(*plane.shape[:-1], 4 * plane.shape[-1])[..., :columns]
    if columns % group_size:
        return codes * scales.float().repeat_interleave(group_size, dim=-1)[..., :columns]
    groups = codes.reshape(*scales.shape, group_size)
    return (groups * scales.float()[..., None]).flatten(-2)


def backend() -> str:
    """The CPU path that serves a few rows, and why compiled C does not if it is another one."""
    reason = compiled.unavailable()
    return "compiled C" if reason is None else f"torch tiles: {reason}"


def _unpacked_tiles(
    plane: Tensor, scales: Tensor, columns: int, group_size: int
) -> Iterator[tuple[slice, Tensor]]:
    """The matrix one tile of rows at a time: the rows' slice and their weights."""
    step = max(1, _TILE_WEIGHTS // max(1, columns))
    for at in range(0, len(plane), step):
        part = slice(at, at + step)
        yield part, unpacked(plane[part], scales[part], columns, group_size)


def _table(like: Tensor) -> Tensor:
    """The four codes of each byte, float32 (256, 4), of the same kind of tensor as `like`."""
    byte = like.new_ones((256, 1), dtype=torch.int64).cumsum(0) - 1
    shifts = 2 * (like.new_ones(4, dtype=torch.int64).cumsum(0) - 1)
    return ((byte >> shifts & 3) - 1).float()


@cache
def _table_on(device: torch.device) -> Tensor:
    return _table(torch.empty(0, dtype=torch.uint8, device=device))
