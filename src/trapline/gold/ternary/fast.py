"""Products with packed ternary weights: kernels on a GPU, compiled C or torch on a CPU.

None of them makes a dense copy of the matrix: the torch path unpacks a tile of rows at a time.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.errors import ShapeError
from trapline.gold.ternary import native

#: From so many rows of x on, unpacking a tile once for all of them is cheaper.
_COMPILED_ROWS = 96
_TILE_WEIGHTS = 1 << 18


def packed_linear(
    x: Tensor, plane: Tensor, scales: Tensor, group_size: int = 128, *, settled: bool = False
) -> Tensor:
    """x (…, K) times the transposed matrix of plane (N, ⌈K/4⌉) and scales (N, ⌈K/group⌉).

    `settled`: nothing that may still run on the GPU writes plane or scales. They are then read
    before the kernel that makes x is done.
    """
    columns = x.shape[-1]
    wanted = (-(-columns // 4), (plane.shape[0], -(-columns // group_size)))
    if (plane.shape[1], tuple(scales.shape)) != wanted:
        raise ShapeError(
            f"{columns} columns do not fit a plane {tuple(plane.shape)} with scales"
            f" {tuple(scales.shape)} in groups of {group_size}"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if x.is_cuda:
        from trapline.gold.ternary import kernels

        y = kernels.packed_matmul(rows, plane, scales, group_size, settled=settled)
    elif _compiled(rows, group_size):
        y = _native(rows, plane, scales, group_size)
    else:
        y = _tiles(rows, plane, scales, group_size)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], plane.shape[0])


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


def _compiled(rows: Tensor, group_size: int) -> bool:
    whole = group_size % native.GROUP == 0
    return whole and rows.shape[0] <= _COMPILED_ROWS and native.unavailable() is None


def _native(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int) -> Tensor:
    x = rows.detach().float().contiguous()
    y = torch.empty(rows.shape[0], plane.shape[0])
    if group_size != native.GROUP:
        groups = -(-rows.shape[1] // native.GROUP)
        scales = scales.repeat_interleave(group_size // native.GROUP, dim=1)[:, :groups]
    native.product(x, plane.contiguous(), scales.contiguous(), y, torch.get_num_threads())
    return y if rows.dtype == y.dtype else y.to(rows.dtype)


def _tiles(rows: Tensor, plane: Tensor, scales: Tensor, group_size: int) -> Tensor:
    columns = rows.shape[1]
    step = max(1, _TILE_WEIGHTS // max(1, columns))
    parts = [
        functional.linear(
            rows,
            unpacked(plane[at : at + step], scales[at : at + step], columns, group_size).to(
                rows.dtype
            ),
        )
        for at in range(0, len(plane), step)
    ]
    return torch.cat(parts, dim=1) if parts else rows.new_zeros(len(rows), 0)


@cache
def _table(device: torch.device) -> Tensor:
    """The four codes of each byte, (256, 4)."""
    places = torch.arange(256)[:, None] >> torch.tensor([0, 2, 4, 6])
    return ((places & 3) - 1).float().to(device)
