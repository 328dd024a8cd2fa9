"""Softmax fused with top-k on a GPU: which kernels serve a shape, and their launch.

A row of up to SHORT logits is held in registers by one program (`kernels_short`). Longer rows are
read once by a first kernel, which leaves group maxima, and decided by a second (`kernels_long`).
Why K groups are enough: `fast`.

No atomics, no state between calls and no host synchronisation: deterministic, and capturable in a
CUDA graph. The second kernel is launched while the first still runs and waits for it on the device
(programmatic dependent launch); so is every first kernel after whatever ran before it.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.kernels_device import processors
from trapline.gold.softmax_topk.kernels_long import select_kernel, stream_kernel
from trapline.gold.softmax_topk.kernels_short import best_kernel, short_kernel

KERNELS = "trapline_topk_kernels"
#: A row of at most this many logits is held by one program.
SHORT = 16384
#: Of a longer one a program has this many in flight.
BLOCK = 4096
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


class Long(NamedTuple):
    """How a long row is cut."""

    group: int  # neighbours whose maximum is kept
    block: int  # logits that a program has in flight
    warps: int
    chunk: int  # logits of a split
    splits: int
    groups: int  # maxima in a row, those of the last block's empty end too
    groups_block: int
    select_warps: int
    select_registers: int | None  # of a thread at most
    supers: int  # groups of groups that the threshold is taken from
    listed: int  # groups that may be looked at again
    tile: int  # of them at a time
    cap: int
    k_block: int
    ranked: bool


def long_plan(rows: int, vocabulary: int, k: int, slack: int, processors: int) -> Long:
    """Groups of about √(V/k); few rows are split until every processor has work for two."""
    k_block = max(2, triton.next_power_of_2(k))
    group = group_size(vocabulary, k)
    block = max(BLOCK, group)
    tiles = triton.cdiv(vocabulary + slack, block)
    splits = max(1, min(tiles, SPLITS, triton.cdiv(2 * processors, rows)))
    chunk = triton.cdiv(tiles, splits) * block
    groups = tiles * block // group
    groups_block = triton.next_power_of_2(groups)
    ranked = k <= RANKED
    warps = 8 if ranked else 16
    fewest = max(1, 32 * warps // group)
    listed = max(fewest, 2 * k_block if ranked else k_block * 5 // 4)
    tile = max(fewest, min(2 * k_block, warps * 32 * 16 // group))
    return Long(
        group,
        block,
        4,
        chunk,
        triton.cdiv(tiles * block, chunk),
        groups,
        max(groups_block, 32 * warps),
        warps,
        None,
        min(32 * warps, max(64, 2 * k_block)),
        listed,
        tile,
        max(32, 2 * k_block) if ranked else max(2 * k_block, 32 * warps),
        k_block,
        ranked,
    )


def group_size(vocabulary: int, k: int) -> int:
    """A power of two near √(V/k), and so large that one program holds all maxima."""
    near = 1 << max(4, min(7, round(math.log2(vocabulary / k) / 2)))
    least = triton.next_power_of_2(triton.cdiv(vocabulary + 8 + BLOCK, HELD))
    return max(near, int(least))


def _softmax_topk(
    logits: Tensor, k: int, temperature: float, temperatures: Tensor | None, log_probs: bool
) -> _Answers:
    rows, vocabulary = logits.shape
    require(logits, k)
    answers = _shapes(logits, k, temperature, temperatures, log_probs)
    x = logits if logits.stride(1) == 1 or vocabulary == 1 else logits.contiguous()
    warm = (temperatures.float().contiguous() if temperatures is not None else x, temperature)
    same = {
        "PER_ROW": temperatures is not None,
        "PDL": x.is_cuda,
        "launch_pdl": x.is_cuda,
    }
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


def run_short(
    x: Tensor, k: int, warm: _Warm, answers: _Answers, log: bool, plan: Short, same: dict[str, bool]
) -> None:
    rows, vocabulary = x.shape
    kernel, launch = short_launch(plan, k, _SHIFT[x.dtype])
    room = () if k == 1 else room_of(x, plan)
    counts = (vocabulary,) if k == 1 else (vocabulary, k)
    kernel[(rows,)](*(x, *warm, *room, *answers, *counts, x.stride(0), int(log)), **launch, **same)


def short_launch(plan: Short, k: int, shift: int) -> tuple[Any, dict[str, Any]]:
    """The kernel for rows in registers, and what it is compiled with."""
    if k == 1:
        return best_kernel, {"BLOCK": plan.block, "EVEN": plan.even, "num_warps": plan.warps}
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
    x: Tensor, k: int, warm: _Warm, answers: _Answers, log: bool, plan: Long, same: dict[str, bool]
) -> None:
    parts = stream(x, warm, plan, same)
    select(x, k, warm, parts, answers, log, plan, same)


def stream(x: Tensor, warm: _Warm, plan: Long, same: dict[str, bool]) -> _Parts:
    """Group maxima, and the maximum and the sum of every split."""
    rows, vocabulary = x.shape
    maxima = x.new_empty((rows, plan.groups), dtype=torch.float32)
    peaks, totals = x.new_empty((2, rows, plan.splits), dtype=torch.float32)
    stream_kernel[(rows * plan.splits,)](
        *(x, *warm, maxima, peaks, totals),
        *(vocabulary, x.stride(0), plan.groups, plan.chunk, plan.splits),
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
    same: dict[str, bool],
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
        "THREADS": 32 * plan.select_warps,
        "SUPER": plan.supers,
        "LIST": plan.listed,
        "TILE": plan.tile,
        "CAP": plan.cap,
        "K_BLOCK": plan.k_block,
        "SHIFT": shift,
        "RANKED": plan.ranked,
        "num_warps": plan.select_warps,
        "maxnreg": plan.select_registers,
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
