"""Layer norm and RMS norm on a GPU: every element is read once and written once.

Short rows are held in registers (`kernels_rows`); longer ones stream through shared memory
(`kernels_ring`, backward on Hopper GPUs) or are looked at again in the cache (`kernels_wide`).
Backward runs a fixed number of programs; each keeps float32 sums of dw and db and writes one row
of partial sums, which a last kernel adds in a fixed order: gradients are bitwise repeatable.
Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.kernels_device import processors
from trapline.gold.norms import fast
from trapline.gold.norms.kernels_rows import add_parts_kernel, backward_kernel, forward_kernel
from trapline.gold.norms.kernels_wide import (
    columns_kernel,
    held_forward_kernel,
    row_sums_kernel,
    wide_forward_kernel,
)

WIDEST = 65536
KERNELS = "trapline_norms_kernels"
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class Tile(NamedTuple):
    """How rows are cut into tiles of whole rows."""

    rows: int
    warps: int
    stages: int = 1  # of loads on their way
    programs: int = 1  # a processor
    reload: bool = False  # weights with every row, where registers are short


#: Rows up to this width: measured on an H200 (docs/components/layer_norm.md).
FORWARD = {
    64: Tile(16, 1),
    128: Tile(8, 1),
    256: Tile(4, 1),
    512: Tile(2, 1),
    768: Tile(2, 2),
    1024: Tile(1, 2),
    2048: Tile(1, 4),
    4096: Tile(1, 8),
    6144: Tile(1, 4),
    8192: Tile(1, 8),
}
#: The same for backward, where rows come in stages, for 2 and for 4 bytes an element.
BACKWARD = {
    2: {
        64: Tile(16, 1, 3, 8),
        128: Tile(8, 1, 3, 8),
        256: Tile(4, 1, 3, 8),
        512: Tile(4, 2, 3, 6),
        768: Tile(4, 4, 3, 3),
        1024: Tile(4, 4, 3, 2),
        2048: Tile(2, 4, 3, 2),
        4096: Tile(1, 8, 3, 2),
        6144: Tile(1, 8, 4, 1),
        8192: Tile(1, 8, 3, 1),
        16384: Tile(1, 8, 3, 1, reload=True),
    },
    4: {
        64: Tile(16, 1, 3, 4),
        128: Tile(8, 1, 3, 8),
        512: Tile(8, 2, 3, 4),
        1024: Tile(8, 4, 3, 1),
        2048: Tile(2, 8, 2, 2),
        4096: Tile(1, 8, 3, 1),
        8192: Tile(1, 16, 3, 1),
    },
}


class Pieces(NamedTuple):
    """How a wide row is cut into pieces that are looked at one after the other."""

    size: int  # elements
    warps: int
    widest: int = WIDEST
    places: int = 0  # for pieces in shared memory
    held: bool = False  # in registers between two looks


#: Forward holds pieces in registers up to some width, and beyond looks at them again.
HELD = Pieces(2048, 8, 16384)
WIDE_FORWARD = Pieces(8192, 16)
#: Backward streams pieces (of 32-bit words) through shared memory, for 2 and 4 bytes an element.
RING = {2: Pieces(4096, 8, 16384, 4, held=True), 4: Pieces(4096, 16, 16384, 5)}
#: Beyond, it takes two sums a row, then columns; each program keeps the sums of WIDE_PER rows.
WIDE_SUMS = Pieces(4096, 8)
WIDE_COLUMNS, WIDE_TILE, WIDE_PER = 1024, Tile(4, 4, 2), 64
#: Partial sums are added so many rows and columns at a time.
PARTS, PART_COLUMNS, PART_WARPS = 128, 16, 4


def tile_for(table: dict[int, Tile], width: int) -> Tile | None:
    """The entry for rows of this width; None for wider ones."""
    return next((tile for widest, tile in table.items() if width <= widest), None)


def kept_rows(tile: Tile, block: int, itemsize: int) -> int:
    """Rows of sums a program keeps: one unless several warps share columns."""
    return 1 if tile.warps * 32 * (16 // itemsize) <= block else tile.rows


def _forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(x)
    y, total, mean, rstd = answers = _forward_shape(x, residual, w, b, eps, centred)
    flat, added = rows_of(x), None if residual is None else rows_of(residual)
    M, D = flat.shape
    affine = dense(w), dense(b)
    given = (flat, added, *affine, y, None if added is None else total, mean, rstd)
    strides = flat.stride(0), 0 if added is None else added.stride(0)
    tile = tile_for(FORWARD, D)
    if not M:
        return answers
    if tile is not None:
        forward_kernel[(triton.cdiv(M, tile.rows),)](
            *(*given, M, *strides, eps),
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            ROWS=tile.rows,
            CENTRED=centred,
            num_warps=tile.warps,
        )
        return answers
    kernel, cut = wide_forward_kernel, WIDE_FORWARD
    if HELD.widest >= D:
        kernel, cut = held_forward_kernel, HELD
    kernel[(M,)](
        *(*given, *strides, eps), D=D, CHUNK=cut.size, CENTRED=centred, num_warps=cut.warps
    )
    return answers


class Backward(NamedTuple):
    """One backward pass: what is given and what is wanted, as rows."""

    dy: Tensor
    dtotal: Tensor | None
    x: Tensor
    w: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    dx: Tensor
    eps: float
    centred: bool
    biased: bool

    def parts(self, programs: int) -> tuple[Tensor | None, Tensor | None]:
        """Space for each program's share of dw and of db."""
        made = self.x.new_empty((2, programs, self.x.shape[1]), dtype=torch.float32)
        return made[0] if self.w is not None else None, made[1] if self.biased else None

    def strides(self) -> tuple[int, int, int, int]:
        through = 0 if self.dtotal is None else self.dtotal.stride(0)
        return len(self.x), self.dy.stride(0), through, self.x.stride(0)


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    require(x)
    answers = _backward_shape(dy, dtotal, x, w, mean, rstd, eps, centred, biased)
    dx, dw, db = answers
    through = None if dtotal is None else rows_of(dtotal)
    rows = rows_of(dy), through, rows_of(x)
    given = Backward(*rows, dense(w), mean, rstd, dx, eps, centred, biased)
    tile = tile_for(BACKWARD[x.element_size()], x.shape[-1])
    streamed = streams(given)
    # Weights that come with every row leave no shared memory for a third stream.
    if tile is not None and (not tile.reload or (streamed and through is None)):
        parts = _by_rows(given, tile)
    elif streamed:
        parts = _by_ring(given, RING[x.element_size()])
    else:
        parts = _by_columns(given)
    _add_parts(*parts, dw if w is not None else None, db if biased else None)
    return answers


def _by_rows(given: Backward, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
    M, D = given.x.shape
    programs = evenly(triton.cdiv(M, tile.rows), tile.programs * processors(given.x))
    parts = given.parts(programs)
    block = triton.next_power_of_2(D)
    backward_kernel[(programs,)](
        *(*given[:7], *parts, *given.strides(), given.eps),
        D=D,
        BLOCK_D=block,
        ROWS=tile.rows,
        CENTRED=given.centred,
        STAGES=tile.stages if on_hopper(given.x) else 1,
        KEPT=kept_rows(tile, block, given.x.element_size()),
        RELOAD=tile.reload,
        num_warps=tile.warps,
    )
    return parts


def _by_ring(given: Backward, cut: Pieces) -> tuple[Tensor | None, Tensor | None]:
    from trapline.gold.norms.kernels_ring import ring_backward_kernel

    M, D = given.x.shape
    programs = evenly(M, processors(given.x))
    parts = given.parts(programs)
    words = (as_words(part) for part in (given.dy, given.dtotal, given.x, given.w))
    halves = 4 // given.x.element_size()
    rows = (stride // halves for stride in given.strides()[1:])
    ring_backward_kernel[(programs,)](
        *(*words, given.mean, given.rstd, as_words(given.dx), *parts, M, *rows, given.eps),
        WIDTH=D // halves,
        PIECE=cut.size,
        PIECES=triton.cdiv(D // halves, cut.size),
        PLACES=cut.places,
        KIND=KINDS[given.x.dtype],
        HELD=cut.held,
        CENTRED=given.centred,
        num_warps=cut.warps,
    )
    return parts


def as_words(x: Tensor | None) -> Tensor | None:
    """The same memory in 32-bit words."""
    return x if x is None or x.element_size() == 4 else x.view(torch.int32)


def _by_columns(given: Backward) -> tuple[Tensor | None, Tensor | None]:
    M, D = given.x.shape
    parts = given.parts(triton.cdiv(M, WIDE_PER))
    if not M:
        return given.parts(0)
    saved = given.rstd is not None
    rstd, mean = given.rstd, given.mean
    if rstd is None:
        rstd, mean = given.x.new_empty((2, M), dtype=torch.float32)
    sums = given.x.new_empty((2, M), dtype=torch.float32)
    M, dy_row, dtotal_row, x_row = given.strides()
    row_sums_kernel[(M,)](
        *(given.dy, given.x, given.w, mean, rstd, sums, M, dy_row, x_row, given.eps),
        D=D,
        CHUNK=WIDE_SUMS.size,
        CENTRED=given.centred,
        SAVED=saved,
        num_warps=WIDE_SUMS.warps,
    )
    columns_kernel[(triton.cdiv(D, WIDE_COLUMNS), triton.cdiv(M, WIDE_PER))](
        *(given.dy, given.dtotal, given.x, given.w, mean, rstd, sums, given.dx, *parts),
        *(M, dy_row, dtotal_row, x_row, WIDE_PER),
        D=D,
        CHUNK=WIDE_COLUMNS,
        ROWS=WIDE_TILE.rows,
        CENTRED=given.centred,
        STAGES=WIDE_TILE.stages,
        num_warps=WIDE_TILE.warps,
    )
    return parts


def _add_parts(
    dw_parts: Tensor | None, db_parts: Tensor | None, dw: Tensor | None, db: Tensor | None
) -> None:
    parts = dw_parts if dw_parts is not None else db_parts
    if parts is None:
        return
    P, D = parts.shape
    add_parts_kernel[(triton.cdiv(D, PART_COLUMNS), 2)](
        *(dw_parts, db_parts, dw, db, P, D),
        BLOCK_P=PARTS,
        BLOCK_D=PART_COLUMNS,
        num_warps=PART_WARPS,
    )


def evenly(tiles: int, most: int) -> int:
    """At most `most` programs, and so many that all have as many tiles, or one less."""
    rounds = max(1, -(-tiles // most))
    return max(1, -(-tiles // rounds))


def on_hopper(x: Tensor) -> bool:
    """Whether x's processors have the shared memory that the stages and the ring were made for."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def streams(given: Backward) -> bool:
    """Whether rows can be copied to shared memory 16 bytes at a time, on a GPU that has enough."""
    x, size = given.x, given.x.element_size()
    if not on_hopper(x) or x.shape[1] > RING[size].widest:
        return False
    tensors = [part for part in (x, given.dy, given.dtotal, given.w) if part is not None]
    places = [part.data_ptr() for part in tensors]
    places += [part.stride(0) * size for part in tensors if part.ndim == 2] + [x.shape[1] * size]
    return all(place % 16 == 0 for place in places)


def require(x: Tensor) -> None:
    """What the kernels take."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {x.dtype}")
    if not 1 <= x.shape[-1] <= WIDEST:
        raise RangeError(f"the kernels take rows of 1 to {WIDEST} elements, not {x.shape[-1]}")


def dense(w: Tensor | None) -> Tensor | None:
    """Weights beside each other."""
    return None if w is None else w.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """(rows, D) with neighbours along D beside each other: a view wherever that is possible."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _forward_shape(
    x: Tensor, residual: Tensor | None, _w: Any, _b: Any, _eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one_a_row = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(one_a_row if centred else 0, dtype=torch.float32),
        x.new_empty(one_a_row, dtype=torch.float32),
    )


def _backward_shape(
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


_LIBRARY = fast.define(KERNELS)
for _name, _kernel, _shape in (
    ("forward", _forward, _forward_shape),
    ("backward", _backward, _backward_shape),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _shape, "Meta")
