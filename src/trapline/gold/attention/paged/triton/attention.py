# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How the paged kernels are launched, and the operators that launch them.

`kernels_paged_shares` has the kernels, `kernels_paged_rows` their inner loop,
`kernels_paged_merge` what the last program does, `kernels_paged_append` appending;
`kernels_paged_hopper` has the kernel for the common case of decoding on Hopper GPUs.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.paged import reference as fast_paged
from trapline.gold.attention.paged.completion_counters import arrivals
from trapline.gold.attention.paged.hopper import decode as kernels_paged_hopper
from trapline.gold.attention.paged.triton.append import append, strides_of
from trapline.gold.attention.paged.triton.work_partition import attention_kernel, prefix_kernel
from trapline.gold.device import beside, on_their_device, processors
from trapline.gold.errors import DTypeError, UnsupportedError

KERNELS = "trapline_paged_kernels"
WIDEST = 256
#: How many rows one program may have to merge of a tile of several queries, all parts together.
MOST_MERGED = 1024
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}


class Tiles(NamedTuple):
    """How a launch is cut: rows of queries, positions, warps, stages of the pipeline of loads."""

    rows: int
    positions: int
    warps: int = 4
    stages: int = 3
    #: Programs that fit on a multiprocessor.
    programs: int = 2
    #: The most registers a thread may have; None leaves it to the compiler.
    registers: int | None = None


def tiles_for(rows: int, D: int, dtype: torch.dtype, kind: int, *, many: bool = False) -> Tiles:
    """For so many rows of queries (query heads of a group times queries) a sequence.

    `many`: tiles of 128 rows would be enough to give half of the multiprocessors one. Every answer
    is compiled and checked in the tests.
    """
    if many and rows > 64 and dtype != torch.float32 and kind == 0 and D <= 128:
        return Tiles(128, 64, warps=8, programs=1)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        return Tiles(block_m, 32, stages=2)
    if D > 128:
        return Tiles(block_m, 32 if kind == 0 else 64)
    if block_m > 16 or kind == 0:
        return Tiles(block_m, 64)
    # Codes are soon read: it takes more warps to keep a multiprocessor busy with them, and a limit
    # on registers to have them there. Measured at D = 128; narrower heads were checked as they are.
    if kind == KINDS[torch.uint8]:
        if D > 96:
            return Tiles(block_m, 64, warps=2, programs=6, registers=168)
        return Tiles(block_m, 128, programs=4, registers=128)
    if D > 96:
        return Tiles(block_m, 128, programs=3, registers=168)
    return Tiles(block_m, 64, programs=4, registers=128)


def in_words(pages: Tensor, kind: int) -> Tensor:
    """Pages of codes as words of four; others as they are."""
    if not kind:
        return pages
    word = torch.int16 if kind == 3 else torch.int32
    return pages.view(torch.uint8).view(word)


def in_eights(tree: Tensor) -> Tensor:
    """A mask of bytes as words of eight: the first word of every row.

    Of the last word of a row the kernel reads what lies beyond the mask too; it means nothing.
    """
    rows, columns = tree.shape
    if columns < 8 or tree.stride(1) != 1 or tree.stride(0) % 8 or tree.data_ptr() % 8:
        room = tree.new_empty((rows, cdiv(columns, 8) * 8))
        room[:, :columns] = tree
        tree = room
    return tree[:, :8].view(torch.int64)


class Given(NamedTuple):
    """What both launches read, and how it lies."""

    q: Tensor
    k_words: Tensor
    v_words: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor

    @property
    def query_strides(self) -> tuple[int, ...]:
        return (self.q.stride(0), self.q.stride(1), self.block_table.stride(0))

    @property
    def page_strides(self) -> tuple[int, ...]:
        pages = (*self.k_words.stride()[:3], *self.v_words.stride()[:3])
        return (*pages, *strides_of(self.k_scale), *strides_of(self.v_scale))


def fixed_for(q: Tensor, k_pages: Tensor, v_pages: Tensor, kind: int, softcap: float) -> Any:
    """What both kernels are compiled for."""
    D = q.shape[-1]
    return {
        "P": k_pages.shape[2],
        "D": D,
        "WIDE": max(16, triton.next_power_of_2(D if kind == 0 else D // 4)),
        "KIND": kind,
        "OWN": q.is_cuda,
        "CAPPED": softcap > 0.0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "TWINS": k_pages.stride() == v_pages.stride(),
    }


@on_their_device
def _attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor | None,
    max_q: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
    prefix_rows: int,
    prefix_pages: Tensor | None,
    out: Tensor,
) -> None:
    require(q, k_pages, v_pages)
    require(out)
    (queries, H, D), (_, G, P, _) = q.shape, k_pages.shape
    if not queries:
        return
    B, R = len(seq_lens), H // G
    kind = KINDS.get(k_pages.dtype, 0)
    block_table, seq_lens = beside(block_table), beside(seq_lens)
    asked = q, k_pages, v_pages, block_table, kind
    ruled = window or softcap or any(x is not None for x in (cu_q, tree_mask, prefix_pages))
    if max_q == 1 and not ruled and kernels_paged_hopper.takes(*asked):
        scales = k_scale, v_scale, kind
        kernels_paged_hopper.decode(q, k_pages, v_pages, block_table, seq_lens, *scales, scale, out)
        return
    fixed = fixed_for(q, k_pages, v_pages, kind, softcap)
    words = in_words(k_pages, kind), in_words(v_pages, kind)
    cu_q, prefix_pages = (x if x is None else beside(x) for x in (cu_q, prefix_pages))
    tree = None if tree_mask is None else in_eights(tree_mask)
    given = Given(q, *words, k_scale, v_scale, block_table)
    if prefix_pages is None or window:
        prefix_pages = prefix_parts = prefix_stats = None
    else:
        rules = (G, R, max_q, scale, softcap, prefix_rows)
        prefix_parts, prefix_stats = over_prefix(given, cu_q, prefix_pages, rules, fixed)
    many = 2 * B * G * cdiv(R * max_q, 128) >= processors(q)
    tiles = tiles_for(R * max_q, D, q.dtype, kind, many=many)
    tops = cdiv(R * max_q, tiles.rows)
    most = processors(q) * tiles.programs
    if max_q > 1:
        most = min(most, MOST_MERGED // tiles.rows * B * G * tops)
    units = B * G * tops * (cdiv(block_table.shape[1] * P, tiles.positions) + 1)
    parts = q.new_empty((2 * most, tiles.rows, D), dtype=torch.float32)
    stats = q.new_empty((2 * most, tiles.rows, 2), dtype=torch.float32)
    attention_kernel[(most,)](
        *(*given, seq_lens, cu_q, tree, prefix_pages, out),
        *(parts, stats, prefix_parts, prefix_stats, arrivals(most, q)),
        *(B, G, R, max_q, window, scale, softcap, prefix_rows),
        *(0 if prefix_parts is None else len(prefix_parts), queries, *given.query_strides),
        0 if tree is None else tree.stride(0),
        *(*given.page_strides, *out.stride()[:2]),
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_M=tiles.rows,
        BLOCK_S=tiles.positions,
        BLOCK_B=max(32, triton.next_power_of_2(B)),
        ROWS=merged_at_once(R * max_q, D, tiles, alone=max_q == 1),
        ALONE=max_q == 1,
        WINDOWED=window > 0,
        ONE_TOP=tops == 1,
        NARROW=units * most < 2**31,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **fixed,
    )


def merged_at_once(rows: int, D: int, tiles: Tiles, *, alone: bool) -> int:
    """How many rows of a tile are merged at a time: what registers hold of five parts."""
    held = (1024 if alone else 4096) // triton.next_power_of_2(D)
    return int(min(tiles.rows, triton.next_power_of_2(rows), held))


def over_prefix(
    given: Given, cu_q: Tensor | None, prefix_pages: Tensor, rules: tuple[Any, ...], fixed: Any
) -> tuple[Tensor, Tensor]:
    """The parts of all queries over what their group shares: (parts, queries, H, D), and sums."""
    q, (G, R, max_q, _, _, prefix_rows) = given.q, rules
    queries, H, D = q.shape
    rows = R * max_q * prefix_rows
    tiles = tiles_for(rows, D, q.dtype, fixed["KIND"])
    grid = len(prefix_pages) * G, cdiv(rows, tiles.rows)
    count = parts_for(grid[0] * grid[1], processors(q) * tiles.programs)
    parts = q.new_empty((count, queries, H, D), dtype=torch.float32)
    stats = q.new_empty((count, queries, H, 2), dtype=torch.float32)
    prefix_kernel[(*grid, count)](
        *(*given, cu_q, prefix_pages, parts, stats, *rules, count, queries),
        *(*given.query_strides, *given.page_strides),
        BLOCK_M=tiles.rows,
        BLOCK_S=tiles.positions,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **fixed,
    )
    return parts, stats


def parts_for(programs: int, room: int) -> int:
    """Into how many parts a shared prefix is cut, so that so many programs fill the room."""
    return max(1, min(room // max(programs, 1), 32))


def require(q: Tensor, *pages: Tensor) -> None:
    """What the kernels take."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {q.dtype}")
    if not 1 <= q.shape[-1] <= WIDEST:
        raise UnsupportedError(f"the kernels take heads up to {WIDEST} wide, not {q.shape[-1]}")
    if any(x.stride(-1) != 1 for x in (q, *pages)):
        raise UnsupportedError("the kernels need the elements of a head beside each other")
    for x in pages:
        size = {torch.uint8: 2}.get(x.dtype, 4)
        if x.dtype in KINDS and any(n % size for n in (x.shape[-1], *x.stride()[:-1])):
            raise UnsupportedError(
                f"the kernels read codes four at a time: rows of {q.shape[-1]} elements and their "
                f"strides {x.stride()} must be multiples of {size} bytes"
            )


@on_their_device
def _append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> None:
    for rows, pages in ((k, k_pages), (v, v_pages)):
        require(rows)
        if pages.stride(-1) != 1:
            raise UnsupportedError("the kernels need the elements of a head beside each other")
    append(k, v, k_pages, v_pages, slots, k_scale, v_scale, cosine, sine)


_LIBRARY: Any = fast_paged.define(KERNELS)
_LIBRARY.impl("attention", _attention, "CUDA")
_LIBRARY.impl("append", _append, "CUDA")
