"""Softmax fused with top-k on a GPU: which kernels serve a shape, and their launch.

A row of up to SHORT logits is held in registers by one program (`kernels_short`). Longer rows are
read once by a first kernel, which leaves group maxima, and decided by a second (`kernels_long`).
Why that is enough, and what was measured: `docs/components/softmax_topk.md`.

No atomics, no state between calls and no host synchronisation: deterministic, and capturable in a
CUDA graph. A kernel may be launched while the one before still runs, and then waits for it on the
device (programmatic dependent launch).
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.kernels_device import may_start_early, processors
from trapline.gold.softmax_topk.kernels_long import select_kernel, stream_kernel
from trapline.gold.softmax_topk.kernels_order import EARLY, LATE, NOT
from trapline.gold.softmax_topk.kernels_short import best_kernel, short_kernel

KERNELS = "trapline_topk_kernels"
#: A row of at most this many logits is held by one program.
SHORT = 16384
#: The most programs that share a row.
SPLITS = 128
#: The most group maxima that one program holds.
HELD = 16384
MOST = 1024
#: Up to this k the threshold comes from counting; the keys of more are bisected and sorted.
RANKED = 64
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_SCHEMA = (
    "softmax_topk(Tensor logits, int k, float temperature, Tensor? temperatures, bool log_probs)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_Answers = tuple[Tensor, Tensor, Tensor, Tensor]
_Parts = tuple[Tensor, Tensor, Tensor]
_Warm = tuple[Tensor, float]  # a temperature for each row, or one


class Found(NamedTuple):
    """What the kernels write."""

    values: Tensor  # (N, K) probabilities or their logarithms in the logits' dtype
    indices: Tensor  # (N, K)
    lse: Tensor  # (N,) float32
    row_max: Tensor  # (N,) float32


def softmax_topk(
    logits: Tensor, k: int, temperature: float | Tensor, log_probs: bool = False
) -> Found:
    """The k largest logits of each row, best first. The temperature may be one for each row."""
    operator: Any = getattr(torch.ops, KERNELS).softmax_topk
    if isinstance(temperature, Tensor):
        each = temperature.expand(logits.shape[0])
        return Found(*operator(logits, k, 1.0, each, log_probs))
    return Found(*operator(logits, k, float(temperature), None, log_probs))


class Short(NamedTuple):
    """How a row is held in registers."""

    block: int  # logits, a power of two
    even: bool  # as many as the row has
    warps: int
    groups: int  # maxima that the threshold is taken from
    listed: int  # threads that may hold winners
    cap: int  # logits that may remain
    ranked: bool


def short_plan(vocabulary: int, k: int) -> Short:
    """Threads hold 32 logits, fewer of shorter rows; twice as many groups as winners, or more."""
    block = max(1024, triton.next_power_of_2(vocabulary))
    even = block == vocabulary
    warps = max(4, block // 1024)
    k_block = max(2, triton.next_power_of_2(k))
    if k <= RANKED:
        room = max(32, 2 * k_block, 32 * warps // (block // (32 * warps)))
        return Short(
            block, even, warps, max(64, 2 * k_block), room, max(32, 2 * k_block), ranked=True
        )
    return Short(block, even, warps, 32 * warps, 1, k_block, ranked=False)


class Select(NamedTuple):
    """How the second kernel is laid out."""

    warps: int
    registers: int | None  # of a thread at most, so that four programs share a processor
    group: int
    each: int  # logits that a thread looks at again at a time


#: All as measured. For few rows, where one program's way counts; for many; and beyond RANKED.
_FEW, _RANKED = Select(16, None, 32, 8), Select(4, 128, 32, 16)
_HUNDREDS, _MORE = Select(4, 128, 32, 16), Select(8, None, 16, 16)
HUNDREDS = 256
#: What a program of the first kernel has in flight, and its warps, where little is to be read:
#: then everybody starts at once; and where much is, with so many programs that they end together.
LITTLE, LITTLE_STREAM = 1 << 21, (1024, 4)
STREAM, PROGRAMS = (8192, 8), 1024
#: What many short and many long rows launch with.
MANY_SHORT, MANY_LONG = LATE, EARLY


class Long(NamedTuple):
    """How a long row is cut."""

    group: int  # neighbours whose maximum is kept
    block: int  # logits that a program has in flight
    warps: int
    blocks: int  # of a split
    splits: int
    groups: int  # maxima in a row, those of the last block's empty end too
    groups_block: int
    select: Select
    supers: int  # groups of groups that the threshold is taken from
    listed: int  # groups that may be looked at again
    tile: int  # of them at a time
    cap: int  # logits that may remain
    k_block: int
    ranked: bool


def long_plan(rows: int, vocabulary: int, k: int, slack: int, processors: int) -> Long:
    """Few rows are split until every processor has work."""
    few = rows <= processors // 2
    ranked = k <= RANKED
    select = select_plan(k, few)
    group = group_size(vocabulary, k, select.group)
    little = rows * vocabulary < LITTLE
    block, warps = LITTLE_STREAM if little else STREAM
    block = max(block, group)
    tiles = triton.cdiv(vocabulary + slack, block)
    splits = triton.cdiv(processors, rows) if little else max(1, PROGRAMS // rows)
    blocks = triton.cdiv(tiles, min(tiles, splits, SPLITS))
    groups = tiles * block // group
    threads = 32 * select.warps
    k_block = max(2, triton.next_power_of_2(k))
    tile = triton.cdiv(threads * select.each, group)
    return Long(
        group=group,
        block=block,
        warps=warps,
        blocks=blocks,
        splits=triton.cdiv(tiles, blocks),
        groups=groups,
        groups_block=max(triton.next_power_of_2(groups), threads),
        select=select,
        supers=min(threads, max(64, 2 * k_block)),
        listed=max(tile, 2 * k_block if ranked else k_block * 5 // 4),
        tile=tile,
        cap=max(32, 2 * k_block) if ranked else max(2 * k_block, threads),
        k_block=k_block,
        ranked=ranked,
    )


def select_plan(k: int, few: bool) -> Select:
    if k <= RANKED:
        return _FEW if few else _RANKED
    return _HUNDREDS if k <= HUNDREDS else _MORE


def group_size(vocabulary: int, k: int, near: int) -> int:
    """So small that k groups exist twice over, and so large that one program holds all maxima."""
    most = max(16, 1 << int(math.log2(max(1, vocabulary // (2 * k)))))
    least = triton.next_power_of_2(triton.cdiv(vocabulary + 8 + STREAM[0], HELD))
    return max(min(near, most), int(least))


def _softmax_topk(
    logits: Tensor, k: int, temperature: float, temperatures: Tensor | None, log_probs: bool
) -> _Answers:
    rows, vocabulary = logits.shape
    require(logits, k)
    answers = _shapes(logits, k, temperature, temperatures, log_probs)
    x = logits if logits.stride(1) == 1 or vocabulary == 1 else logits.contiguous()
    warm = (temperatures.float().contiguous() if temperatures is not None else x, temperature)
    launch = launch_of(x)
    same = {"PER_ROW": temperatures is not None, "PDL": launch, "launch_pdl": launch > 0}
    if rows == 0:
        return answers
    if vocabulary <= SHORT:
        run_short(x, k, warm, answers, log_probs, short_plan(vocabulary, k), same)
    else:
        width = width_of(x)
        slack = 0 if x.stride(0) % width == 0 else width - 1
        plan = long_plan(rows, vocabulary, k, slack, processors(x))
        run_long(x, k, warm, answers, log_probs, plan, same)
    return answers


def launch_of(x: Tensor) -> int:
    """When the next kernel is let in: at once where there is room for it, or at the end."""
    if not may_start_early(x.device):
        return int(NOT)
    rows, vocabulary = x.shape
    if rows <= processors(x) // 2:
        return int(EARLY)
    return int(MANY_SHORT if vocabulary <= SHORT else MANY_LONG)


def run_short(
    x: Tensor, k: int, warm: _Warm, answers: _Answers, log: bool, plan: Short, same: dict[str, Any]
) -> None:
    rows, vocabulary = x.shape
    kernel, launch = short_launch(plan, k, width_of(x), _SHIFT[x.dtype])
    room = () if k == 1 else room_of(x, plan)
    counts = (vocabulary,) if k == 1 else (vocabulary, k)
    kernel[(rows,)](*(x, *warm, *room, *answers, *counts, x.stride(0), int(log)), **launch, **same)


def short_launch(plan: Short, k: int, width: int, shift: int) -> tuple[Any, dict[str, Any]]:
    """The kernel for rows in registers, and what it is compiled with."""
    if k == 1:
        warps = 8 if plan.block > 1024 else 4
        sizes = {"BLOCK": plan.block, "THREADS": 32 * warps, "WIDTH": width, "EVEN": plan.even}
        return best_kernel, {**sizes, "num_warps": warps}
    return short_kernel, {
        "BLOCK": plan.block,
        "THREADS": 32 * plan.warps,
        "GROUPS": plan.groups,
        "LIST": plan.listed,
        "CAP": plan.cap,
        "SHIFT": shift,
        "RANKED": plan.ranked,
        "EVEN": plan.even,
        "num_warps": plan.warps,
    }


def run_long(
    x: Tensor, k: int, warm: _Warm, answers: _Answers, log: bool, plan: Long, same: dict[str, Any]
) -> None:
    parts = stream(x, warm, plan, same)
    select(x, k, warm, parts, answers, log, plan, same)


def stream(x: Tensor, warm: _Warm, plan: Long, same: dict[str, Any]) -> _Parts:
    """Group maxima, and the maximum and the sum of every split."""
    rows, vocabulary = x.shape
    maxima = x.new_empty((rows, plan.groups), dtype=torch.float32)
    peaks, totals = x.new_empty((2, rows, plan.splits), dtype=torch.float32)
    stream_kernel[(rows * plan.splits,)](
        *(x, *warm, maxima, peaks, totals),
        *(vocabulary, x.stride(0), plan.groups, plan.blocks, plan.splits),
        **stream_launch(plan, width_of(x)),
        **same,
    )
    return maxima, peaks, totals


def stream_launch(plan: Long, width: int) -> dict[str, Any]:
    return {
        "G": plan.group,
        "BLOCK": plan.block,
        "THREADS": 32 * plan.warps,
        "WIDTH": width,
        "num_warps": plan.warps,
    }


def select(
    x: Tensor,
    k: int,
    warm: _Warm,
    parts: _Parts,
    answers: _Answers,
    log: bool,
    plan: Long,
    same: dict[str, Any],
) -> None:
    rows, vocabulary = x.shape
    lists = x.new_empty((rows, plan.listed), dtype=torch.int32)
    keys = x.new_empty((rows, plan.cap), dtype=torch.int64)
    select_kernel[(rows,)](
        *(x, *warm, *parts, lists, keys, *answers),
        *(vocabulary, k, x.stride(0), plan.groups, plan.splits, int(log)),
        **select_launch(plan, width_of(x), _SHIFT[x.dtype]),
        **same,
    )


def select_launch(plan: Long, width: int, shift: int) -> dict[str, Any]:
    return {
        "G": plan.group,
        "WIDTH": width,
        "GROUPS_BLOCK": plan.groups_block,
        "SPLITS_BLOCK": SPLITS,
        "THREADS": 32 * plan.select.warps,
        "SUPER": plan.supers,
        "LIST": plan.listed,
        "TILE": plan.tile,
        "CAP": plan.cap,
        "K_BLOCK": plan.k_block,
        "SHIFT": shift,
        "RANKED": plan.ranked,
        "num_warps": plan.select.warps,
        "maxnreg": plan.select.registers,
    }


def width_of(x: Tensor) -> int:
    """Logits in 16 bytes."""
    return 16 // x.element_size()


def room_of(x: Tensor, plan: Short) -> tuple[Tensor, Tensor, Tensor]:
    """For a list of threads, and for the logits that remain with their columns."""
    rows = x.shape[0]
    lists = x.new_empty((rows, plan.listed), dtype=torch.int32)
    columns = x.new_empty((rows, plan.cap), dtype=torch.int32)
    return lists, x.new_empty((rows, plan.cap), dtype=torch.float32), columns


def require(logits: Tensor, k: int) -> None:
    """What the kernels take."""
    if logits.dtype not in _SHIFT:
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {logits.dtype}")
    if k > MOST:
        raise RangeError(f"the kernels take k up to {MOST}, not {k}")


def _shapes(
    logits: Tensor, k: int, _temperature: float, _temperatures: Tensor | None, _log_probs: bool
) -> _Answers:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows, k)),
        logits.new_empty((rows, k), dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
    )


_library: Any = torch.library  # its calls carry no types
_LIBRARY = _library.Library(KERNELS, "DEF")
_LIBRARY.define(_SCHEMA)
_LIBRARY.impl("softmax_topk", _softmax_topk, "CUDA")
_LIBRARY.impl("softmax_topk", _shapes, "Meta")
