"""Softmax fused with top-k on a GPU: chooses the kernels for a shape and launches them.

One program keeps a short row in registers (`short_rows`). Of many short rows, each is read again
from the cache instead, so that several programs fit on a processor (`many_rows`). For long rows a
first kernel reads the row once and writes group maxima, and a second selects (`long_rows`); of
thousands of rows one kernel does both, side by side (`long_rows_small_k`).
`work_partition` chooses; docs/components/softmax_topk.md derives why this is exact.

No state between calls and no host synchronisation: calls can be captured in a CUDA graph. Results
are deterministic: the order in which threads enter shared memory decides where an entry is stored,
not what is returned. A kernel may be launched while the previous one still runs and then waits for
it on the device (programmatic dependent launch).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import may_start_early, on_their_device, processors
from trapline.gold.errors import DTypeError, RangeError, UnsupportedError
from trapline.gold.fallback import first_that_compiles
from trapline.gold.operators import operator
from trapline.gold.softmax_topk import reference
from trapline.gold.softmax_topk.triton import work_partition as plans
from trapline.gold.softmax_topk.triton.keys import AFTER, EARLY, NOT
from trapline.gold.softmax_topk.triton.long_rows import select_kernel, stream_kernel
from trapline.gold.softmax_topk.triton.long_rows_small_k import (
    clear_kernel,
    stream_and_select_kernel,
)
from trapline.gold.softmax_topk.triton.many_rows import many_kernel
from trapline.gold.softmax_topk.triton.many_rows_narrow import many_narrow_kernel
from trapline.gold.softmax_topk.triton.many_rows_small_k import many_small_k_kernel
from trapline.gold.softmax_topk.triton.narrow import words_of_sorter
from trapline.gold.softmax_topk.triton.short_rows import best_kernel, short_kernel
from trapline.gold.softmax_topk.triton.small_k import words_of_lists
from trapline.gold.softmax_topk.triton.work_partition import Long, Many, Narrow, Short, SmallK

MOST = 1024
#: A group of a longer row would exceed what a program reads at once.
LONGEST = 1 << 26
#: Rows that a program of `clear_kernel` clears.
CLEARED = 1024
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_SCHEMA = (
    "kernels(Tensor logits, int k, float temperature, Tensor? temperatures, bool log_probs)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_Answers = tuple[Tensor, Tensor, Tensor, Tensor]
_Temps = tuple[Tensor, float]  # one per row, or one for all
#: Logits, k, temperatures, results, whether logarithms are wanted, launch options.
_Call = tuple[Tensor, int, _Temps, _Answers, bool, dict[str, Any]]


class Found(NamedTuple):
    """Results of the kernels."""

    values: Tensor  # (N, K) probabilities or their logarithms in the logits' dtype
    indices: Tensor  # (N, K)
    lse: Tensor  # (N,) float32
    row_max: Tensor  # (N,) float32


def softmax_topk(
    logits: Tensor, k: int, temperature: float | Tensor, log_probs: bool = False
) -> Found:
    """The k largest logits of each row, best first; one temperature, or one per row."""
    if not logits.is_cuda:
        raise UnsupportedError(
            f"impl='kernels' needs CUDA tensors, got tensors on {logits.device}; use impl='torch'"
        )
    if isinstance(temperature, Tensor):
        each = temperature.expand(logits.shape[0])
        return Found(*topk_operator(logits, k, 1.0, each, log_probs))
    return Found(*topk_operator(logits, k, float(temperature), None, log_probs))


@on_their_device
def _softmax_topk(
    logits: Tensor, k: int, temperature: float, temperatures: Tensor | None, log_probs: bool
) -> _Answers:
    given = logits, k, temperature, temperatures, log_probs
    tiers = {"triton": partial(_by_kernels, *given), "torch": partial(_by_torch, *given)}
    return first_that_compiles("softmax_topk", tiers)


def _by_torch(
    logits: Tensor, k: int, temperature: float, temperatures: Tensor | None, log_probs: bool
) -> _Answers:
    warm = temperature if temperatures is None else temperatures
    found = reference.softmax_topk(logits, k, warm)
    values = found.log_probs if log_probs else found.log_probs.exp()
    return values.to(logits.dtype), found.indices, found.lse, found.row_max


def _by_kernels(
    logits: Tensor, k: int, temperature: float, temperatures: Tensor | None, log_probs: bool
) -> _Answers:
    rows, vocabulary = logits.shape
    require(logits, k)
    answers = _shapes(logits, k, temperature, temperatures, log_probs)
    x = logits if logits.stride(1) == 1 or vocabulary == 1 else logits.contiguous()
    # Loads of 16 bytes reach beyond a row: from an unaligned start, those of the last row would
    # leave the allocated memory.
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    warm = (temperatures.float().contiguous() if temperatures is not None else x, temperature)
    launch = launch_of(x)
    same = {"PER_ROW": temperatures is not None, "PDL": launch, "launch_pdl": launch > 0}
    if rows == 0:
        return answers
    call = x, k, warm, answers, log_probs, same
    if plans.stays_in_cache(rows, vocabulary, k, processors(x)):
        if k <= plans.RANKED:
            run_small_k(call, plans.small_k_plan(vocabulary, x.stride(0), width_of(x)))
        elif plans.is_narrow(k, width_of(x)):
            run_narrow(call, plans.narrow_plan(vocabulary, k, x.stride(0)))
        else:
            run_many(call, plans.many_plan(vocabulary, k, x.stride(0), width_of(x)))
    elif vocabulary <= plans.SHORT:
        run_short(call, plans.short_plan(vocabulary, k))
    else:
        plan = plans.long_plan(rows, vocabulary, k, x.stride(0), width_of(x), processors(x))
        run_long(call, plan)
    return answers


def launch_of(x: Tensor) -> int:
    """When the next kernel may start: after the loads, if rows fill the registers."""
    if not may_start_early(x.device):
        return int(NOT)
    return int(AFTER if x.shape[1] <= plans.SHORT else EARLY)


def run_short(call: _Call, plan: Short) -> None:
    x, k, warm, answers, log, same = call
    rows, vocabulary = x.shape
    kernel, launch = short_launch(plan, k, width_of(x), _SHIFT[x.dtype])
    room = () if k == 1 else (rooms(x, 3 * plan.cap + 2),)
    counts = (vocabulary,) if k == 1 else (vocabulary, k)
    kernel[(rows,)](*(x, *warm, *room, *answers, *counts, x.stride(0), int(log)), **launch, **same)


def short_launch(plan: Short, k: int, width: int, shift: int) -> tuple[Any, dict[str, Any]]:
    """The kernel for rows in registers, and its compile-time arguments."""
    if k == 1:
        warps = 8 if plan.block > 4096 else 4
        sizes = {"BLOCK": plan.block, "THREADS": 32 * warps, "WIDTH": width, "EVEN": plan.even}
        return best_kernel, {**sizes, "num_warps": warps}
    return short_kernel, {
        "BLOCK": plan.block,
        "THREADS": 32 * plan.warps,
        "GROUPS": plan.groups,
        "CAP": plan.cap,
        "SHIFT": shift,
        "RANKED": plan.ranked,
        "EVEN": plan.even,
        "num_warps": plan.warps,
    }


def run_many(call: _Call, plan: Many) -> None:
    x, k, warm, answers, log, same = call
    rows, vocabulary = x.shape
    many_kernel[(rows,)](
        *(x, *warm, rooms(x, 4 * plan.cap + plan.buckets + 4), *answers),
        *(vocabulary, k, x.stride(0), int(log), plan.deviations),
        **many_launch(plan, width_of(x), _SHIFT[x.dtype]),
        **same,
    )


def many_launch(plan: Many, width: int, shift: int) -> dict[str, Any]:
    return {
        "TILE": plan.tile,
        "THREADS": 32 * plan.warps,
        "WIDTH": width,
        "CAP": plan.cap,
        "SHIFT": shift,
        "EVEN": plan.even,
        "SORTED": plan.sorts,
        "BUCKETS": plan.buckets,
        "num_warps": plan.warps,
        "maxnreg": plan.registers,
    }


def run_narrow(call: _Call, plan: Narrow) -> None:
    x, k, warm, answers, log, same = call
    rows, vocabulary = x.shape
    launch = narrow_launch(plan, _SHIFT[x.dtype])
    many_narrow_kernel[(rows,)](
        *(x, *warm, rooms(x, launch["SPACE"]), *answers),
        *(vocabulary, k, x.stride(0), int(log), plan.deviations),
        **launch,
        **same,
    )


def narrow_launch(plan: Narrow, shift: int) -> dict[str, Any]:
    threads = 32 * plan.warps
    return {
        "THREADS": threads,
        "SHIFT": shift,
        "SPARE": plan.spare,
        "SPACE": words_of_sorter(threads),
        "EVEN": plan.even,
        "PAIRS": plan.pairs,
        "num_warps": plan.warps,
        "maxnreg": plan.registers,
    }


def run_small_k(call: _Call, plan: SmallK) -> None:
    x, k, warm, answers, log, same = call
    rows, vocabulary = x.shape
    launch = small_k_launch(plan, _SHIFT[x.dtype])
    room = rooms(x, launch["SPACE"] + plan.numbers * launch["THREADS"])
    many_small_k_kernel[(rows,)](
        *(x, *warm, room, *answers), *(vocabulary, k, x.stride(0), int(log)), **launch, **same
    )


def small_k_launch(plan: SmallK, shift: int) -> dict[str, Any]:
    threads = 32 * plan.warps
    return {
        "WORDS": plan.words,
        "THREADS": threads,
        "NUMBERS": plan.numbers,
        "LISTED": plan.listed,
        "CAP": plan.cap,
        "SHIFT": shift,
        "EVEN": plan.even,
        "SPACE": words_of_lists(plan.listed, plan.cap, threads, shift),
        "num_warps": plan.warps,
        "maxnreg": plan.registers,
    }


def group_of(rows: int, vocabulary: int, k: int, x: Tensor) -> int | None:
    """Size of the groups whose maxima `decided` expects; None if rows are not divided."""
    if vocabulary <= plans.SHORT or vocabulary % width_of(x) or k > plans.RANKED:
        return None
    return plans.long_plan(rows, vocabulary, k, vocabulary, width_of(x), processors(x)).group


@on_their_device
def decided(logits: Tensor, k: int, maxima: Tensor, peaks: Tensor, totals: Tensor) -> Found:
    """The second kernel alone, when the kernel that made the logits wrote the inputs it needs.

    These are the maxima (N, V / group) of groups of neighbours, and the maximum and the sum of
    exp(logit − maximum) of every split, (N, splits). Values are logarithms.
    """
    rows, vocabulary = logits.shape
    answers = _shapes(logits, k, 1.0, None, True)
    plan = plans.long_plan(rows, vocabulary, k, vocabulary, width_of(logits), processors(logits))
    even = logits.stride(0) % width_of(logits) == 0
    plan = plan._replace(groups=maxima.shape[1], splits=peaks.shape[1], even=even)
    launch = launch_of(logits)
    same = {"PER_ROW": False, "PDL": launch, "launch_pdl": launch > 0}
    select((logits, k, (logits, 1.0), answers, True, same), (maxima, peaks, totals), plan)
    return Found(*answers)


def run_long(call: _Call, plan: Long) -> None:
    """The first kernel: group maxima, the maximum and the sum of every split. Then the second."""
    x, _, warm, _, _, same = call
    rows, vocabulary = x.shape
    maxima = x.new_empty((rows, plan.groups), dtype=torch.float32)
    peaks, totals = x.new_empty((2, rows, plan.splits), dtype=torch.float32)
    if plan.lag:
        stream_and_select(call, (maxima, peaks, totals), plan)
        return
    stream_kernel[(rows * plan.splits,)](
        *(x, *warm, maxima, peaks, totals),
        *(vocabulary, x.stride(0), plan.groups, plan.blocks, plan.splits),
        **stream_launch(plan, width_of(x), _SHIFT[x.dtype]),
        **same,
    )
    select(call, (maxima, peaks, totals), plan)


def stream_and_select(call: _Call, parts: tuple[Tensor, Tensor, Tensor], plan: Long) -> None:
    """Both kernels in one."""
    x, k, warm, answers, log, same = call
    rows, vocabulary = x.shape
    read = x.new_empty(rows, dtype=torch.int32)
    early = {name: same[name] for name in ("PDL", "launch_pdl")}
    clear_kernel[(cdiv(rows, CLEARED),)](read, rows, BLOCK=CLEARED, **early)
    launch = both_launch(plan, width_of(x), _SHIFT[x.dtype])
    stream_and_select_kernel[(2 * rows,)](
        *(x, *warm, *parts, rooms(x, launch["SPACE"]), *answers, read),
        *(vocabulary, k, x.stride(0), plan.groups, int(log), rows, plan.lag, plan.blocks),
        **launch,
        **same,
    )


def both_launch(plan: Long, width: int, shift: int) -> dict[str, Any]:
    threads = 32 * plan.select_warps
    return {
        "G": plan.group,
        "WIDTH": width,
        "GROUPS_BLOCK": plan.groups_block,
        "THREADS": threads,
        "LIST": plan.listed,
        "TILE": plan.tile,
        "CAP": plan.cap,
        "SHIFT": shift,
        "EVEN": plan.even,
        "BLOCK": plan.block,
        "SPACE": words_of_lists(plan.listed, plan.cap, threads, shift),
        "num_warps": plan.select_warps,
        "maxnreg": plans.BOTH_REGISTERS[width],
    }


def stream_launch(plan: Long, width: int, shift: int) -> dict[str, Any]:
    return {
        "G": plan.group,
        "BLOCK": plan.block,
        "THREADS": 32 * plan.warps,
        "WIDTH": width,
        "SHIFT": shift,
        "EVEN": plan.even,
        "num_warps": plan.warps,
    }


def select(call: _Call, parts: tuple[Tensor, Tensor, Tensor], plan: Long) -> None:
    x, k, warm, answers, log, same = call
    rows, vocabulary = x.shape
    room = rooms(x, 2 * plan.listed + 4 * plan.cap + plan.buckets + 8)
    select_kernel[(rows,)](
        *(x, *warm, *parts, room, *answers),
        *(vocabulary, k, x.stride(0), plan.groups, plan.splits, int(log)),
        **select_launch(plan, width_of(x), _SHIFT[x.dtype]),
        **same,
    )


def select_launch(plan: Long, width: int, shift: int) -> dict[str, Any]:
    return {
        "G": plan.group,
        "WIDTH": width,
        "GROUPS_BLOCK": plan.groups_block,
        "SPLITS_BLOCK": max(plans.SPLITS, triton.next_power_of_2(plan.splits)),
        "THREADS": 32 * plan.select_warps,
        "SUPER": plan.supers,
        "LIST": plan.listed,
        "TILE": plan.tile,
        "CAP": plan.cap,
        "SHIFT": shift,
        "RANKED": plan.ranked,
        "EVEN": plan.even,
        "SEARCHED": plan.searched,
        "SORTED": plan.sorts,
        "BUCKETS": plan.buckets,
        "NARROW": plan.narrow and shift == 16,
        "num_warps": plan.select_warps,
        "maxnreg": plans.REGISTERS,
    }


def width_of(x: Tensor) -> int:
    """Logits in 16 bytes."""
    return 16 // x.element_size()


def rooms(x: Tensor, size: int) -> Tensor | None:
    """Memory for the lists of every row in the interpreter; a GPU keeps them in shared memory."""
    return None if x.is_cuda else x.new_empty((x.shape[0], size), dtype=torch.int32)


def require(logits: Tensor, k: int) -> None:
    """Raises unless the kernels support these arguments."""
    if logits.dtype not in _SHIFT:
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, got {logits.dtype}")
    if k > MOST:
        raise RangeError(f"the kernels take k up to {MOST}, got {k}")
    if logits.shape[1] > LONGEST:
        raise RangeError(f"the kernels take rows of up to {LONGEST} logits, got {logits.shape[1]}")


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


topk_operator = operator("trapline_topk", _SCHEMA, _shapes)(_softmax_topk)
