"""Launches backward on a GPU: chooses kernels and constants by the width of the rows.

A fixed number of programs walks the rows; each keeps float32 sums of dw and db and writes one row
of partial sums, which a last kernel adds in a fixed order: gradients are bitwise repeatable.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import is_hopper, may_start_early, processors
from trapline.gold.fallback import first_that_compiles, gluon_is_tested
from trapline.gold.norms.triton.kernels import (
    add_parts_kernel,
    backward_kernel,
    clear_kernel,
    columns_kernel,
    row_sums_kernel,
    statistics_kernel,
)

KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


#: Programmatic dependent launch on Hopper GPUs, for (RMS norm, layer norm), where it was measured
#: to gain.
NEITHER, CENTRED, BOTH = (False, False), (False, True), (True, True)


class BackwardTile(NamedTuple):
    """Constants of `backward_kernel`: a program takes tiles of whole rows."""

    rows: int
    warps: int
    stages: int  # of the pipeline of loads
    programs: int  # per processor
    early: tuple[bool, bool] = NEITHER


#: Rows up to this width, for 2 and for 4 bytes an element: measured on an H200.
BACKWARD = {
    2: {
        64: BackwardTile(16, 1, 3, 8),
        128: BackwardTile(8, 1, 3, 8),
        256: BackwardTile(4, 1, 3, 8),
        512: BackwardTile(4, 2, 3, 6),
        768: BackwardTile(4, 4, 3, 3, CENTRED),
        1024: BackwardTile(4, 4, 3, 2, CENTRED),
        2048: BackwardTile(2, 4, 3, 2),
        4096: BackwardTile(1, 8, 3, 2, BOTH),
        6144: BackwardTile(1, 8, 4, 1),
        8192: BackwardTile(1, 8, 3, 1, BOTH),
    },
    4: {
        64: BackwardTile(16, 1, 3, 4),
        128: BackwardTile(8, 1, 3, 8),
        512: BackwardTile(8, 2, 3, 4),
        # With four warps RMS norm spills registers and reloads them behind the next copies.
        768: BackwardTile(8, 8, 3, 1, BOTH),
        1024: BackwardTile(8, 4, 3, 1, BOTH),
        2048: BackwardTile(2, 8, 2, 2),
        4096: BackwardTile(1, 8, 3, 1),
        8192: BackwardTile(1, 16, 3, 1),
    },
}


class Team(NamedTuple):
    """Constants of `hopper/cooperative_rows`: several programs share a wide row."""

    share: int  # 32-bit words of a row per program
    warps: int
    places: int  # rows in the shared-memory ring
    lag: int  # rows between the sums of a row and its dx
    programs: int  # per processor


#: For rows with more elements than this, of 2 or 4 bytes.
TEAM, TEAM_FROM = Team(1024, 2, 6, 2, 4), {2: 8192, 4: 4096}
#: Words of the board that one program of `clear_kernel` clears.
CLEARED = 1024
#: Other wide rows: two sums per row, then blocks of columns; a program takes WIDE_PER rows.
WIDE_SUMS, WIDE_WARPS = 4096, 8
WIDE_COLUMNS, WIDE_TILE, WIDE_PER = 1024, BackwardTile(4, 4, 2, 1), 64
#: Rows and columns of partial sums that one step of `add_parts_kernel` adds.
PARTS, PART_COLUMNS, PART_WARPS = 128, 16, 4
Parts = tuple[Tensor | None, Tensor | None]
Entry = TypeVar("Entry")


class Backward(NamedTuple):
    """One backward problem as matrices of rows: inputs, dx and options."""

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

    def parts(self, programs: int) -> Parts:
        """Memory for the partial sums of dw and db, one row per program."""
        made = self.x.new_empty((2, programs, self.x.shape[1]), dtype=torch.float32)
        return made[0] if self.w is not None else None, made[1] if self.biased else None

    def strides(self) -> tuple[int, int, int, int]:
        through = 0 if self.dtotal is None else self.dtotal.stride(0)
        return len(self.x), self.dy.stride(0), through, self.x.stride(0)


def entry_for(table: Mapping[int, Entry], width: int) -> Entry | None:
    """The table entry for rows of this width, or None if they are too wide."""
    return next((entry for widest, entry in table.items() if width <= widest), None)


def backward(given: Backward, dw: Tensor | None, db: Tensor | None) -> None:
    """Fills dx, and dw and db unless they are None."""
    tile = entry_for(BACKWARD[given.x.element_size()], given.x.shape[1])
    early = may_start_early(given.x.device)
    tiers = {"triton": partial(_by_columns, given)}
    if tile is not None:
        early &= tile.early[given.centred]
        tiers = {"triton": partial(_by_tiles, given, tile, early)}
    if uses_teams(given) and gluon_is_tested():
        early = may_start_early(given.x.device)
        tiers = {"hopper": partial(_by_teams, given, early), **tiers}
    _add_parts(*first_that_compiles("norms' gradients", tiers), dw, db, early)


def _by_tiles(given: Backward, tile: BackwardTile, early: bool) -> Parts:
    M, D = given.x.shape
    programs = evenly(cdiv(M, tile.rows), tile.programs * processors(given.x))
    parts = given.parts(programs)
    block = triton.next_power_of_2(D)
    backward_kernel[(programs,)](
        *(*given[:7], *parts, *given.strides(), given.eps),
        D=D,
        BLOCK_D=block,
        ROWS=tile.rows,
        CENTRED=given.centred,
        STAGES=tile.stages if is_hopper(given.x.device) else 1,
        KEPT=kept_rows(tile, block, given.x.element_size()),
        EARLY=early,
        launch_pdl=early,
        num_warps=tile.warps,
    )
    return parts


def kept_rows(tile: BackwardTile, block: int, itemsize: int) -> int:
    """Rows of sums that a program keeps: one unless several warps share columns."""
    return 1 if tile.warps * 32 * (16 // itemsize) <= block else tile.rows


def evenly(tiles: int, most: int) -> int:
    """Number of programs, at most `most`, so that tiles per program differ by at most one."""
    rounds = max(1, cdiv(tiles, most))
    return max(1, cdiv(tiles, rounds))


def uses_teams(given: Backward) -> bool:
    """Whether wide rows are shared: on a Hopper GPU, aligned for copies of 16 bytes."""
    x, size, width = given.x, given.x.element_size(), given.x.shape[1]
    if width <= TEAM_FROM[size] or not len(x) or not is_hopper(x.device):
        return False
    if given.w is not None and given.w.dtype != x.dtype:
        return False
    tensors = [part for part in (x, given.dy, given.dtotal, given.w) if part is not None]
    places = [part.data_ptr() for part in tensors]
    places += [part.stride(0) * size for part in tensors if part.ndim == 2] + [width * size]
    aligned = all(place % 16 == 0 for place in places)
    return aligned and members(width * size // 4) <= TEAM.programs * processors(x)


def members(words: int) -> int:
    """Number of programs that share a row of this many words."""
    return int(triton.next_power_of_2(cdiv(words, TEAM.share)))


def share_of(words: int) -> int:
    """Words of a row per program: whole cache lines."""
    return cdiv(words, 32 * members(words)) * 32


def _by_teams(given: Backward, early: bool) -> Parts:
    from trapline.gold.norms.hopper.cooperative_rows import team_backward_kernel

    given = with_statistics(given)
    M, D = given.x.shape
    halves = 4 // given.x.element_size()
    width = D // halves
    team = members(width)
    teams = evenly(M, TEAM.programs * processors(given.x) // team)
    parts = given.parts(teams)
    board = given.x.new_empty(M * team, dtype=torch.int64)
    clear_kernel[(cdiv(M * team, CLEARED),)](
        board, M * team, BLOCK=CLEARED, EARLY=early, launch_pdl=early
    )
    words = (as_words(part) for part in (given.dy, given.dtotal, given.x, given.w))
    rows = (stride // halves for stride in given.strides()[1:])
    team_backward_kernel[(teams * team,)](
        *(*words, given.mean, given.rstd, as_words(given.dx), *parts, board, M, *rows),
        WIDTH=width,
        SHARE=share_of(width),
        BLOCK=TEAM.share,
        TEAM=team,
        PLACES=TEAM.places,
        LAG=TEAM.lag,
        KIND=KINDS[given.x.dtype],
        CENTRED=given.centred,
        EARLY=early,
        launch_pdl=early,
        num_warps=TEAM.warps,
        launch_cooperative_grid=True,  # programs wait for each other
    )
    return parts


def as_words(x: Tensor | None) -> Tensor | None:
    """The same memory as 32-bit words."""
    return x if x is None or x.element_size() == 4 else x.view(torch.int32)


def _by_columns(given: Backward) -> Parts:
    given = with_statistics(given)
    M, D = given.x.shape
    parts = given.parts(cdiv(M, WIDE_PER))
    if not M:
        return parts
    sums = given.x.new_empty((2, M), dtype=torch.float32)
    M, dy_row, dtotal_row, x_row = given.strides()
    row_sums_kernel[(M,)](
        *(given.dy, given.x, given.w, given.mean, given.rstd, sums, M, dy_row, x_row),
        D=D,
        CHUNK=WIDE_SUMS,
        CENTRED=given.centred,
        num_warps=WIDE_WARPS,
    )
    columns_kernel[(cdiv(D, WIDE_COLUMNS), cdiv(M, WIDE_PER))](
        *(given.dy, given.dtotal, given.x, given.w, given.mean, given.rstd, sums, given.dx),
        *(*parts, M, dy_row, dtotal_row, x_row, WIDE_PER),
        D=D,
        CHUNK=WIDE_COLUMNS,
        ROWS=WIDE_TILE.rows,
        CENTRED=given.centred,
        STAGES=WIDE_TILE.stages,
        num_warps=WIDE_TILE.warps,
    )
    return parts


def with_statistics(given: Backward) -> Backward:
    """The same problem with mean and rstd, recomputed if they were not saved."""
    M, D = given.x.shape
    if given.rstd is not None or not M:
        return given
    rstd, mean = given.x.new_empty((2, M), dtype=torch.float32)
    statistics_kernel[(M,)](
        *(given.x, mean, rstd, given.x.stride(0), given.eps),
        D=D,
        CHUNK=WIDE_SUMS,
        CENTRED=given.centred,
        num_warps=WIDE_WARPS,
    )
    return given._replace(mean=mean, rstd=rstd)


def _add_parts(
    dw_parts: Tensor | None,
    db_parts: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
    early: bool,
) -> None:
    parts = dw_parts if dw_parts is not None else db_parts
    if parts is None:
        return
    P, D = parts.shape
    add_parts_kernel[(cdiv(D, PART_COLUMNS), 2)](
        *(dw_parts, db_parts, dw, db, P, D),
        BLOCK_P=PARTS,
        BLOCK_D=PART_COLUMNS,
        EARLY=early,
        launch_pdl=early,
        num_warps=PART_WARPS,
    )
