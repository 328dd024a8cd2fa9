"""Softmax and top-k on a CPU: `topk.c`, where a C compiler is available."""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.c_library import load, run_in_threads
from trapline.gold.c_pointer import in_cpu_memory
from trapline.gold.errors import ShapeError

SOURCE = Path(__file__).with_name("topk.c")
#: Supported dtypes, as in the C file.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: A thread with fewer logits than this finishes before another one has started.
_LOGITS_A_THREAD = 1 << 15
#: Least number of candidate keys; when the list is full, all but the k best are dropped.
_LEAST_ROOM = 128
#: Logits per group, of which the maximum is kept, and per block, as in the C file.
_GROUP, _BLOCK = 64, 4096


class _Job(ctypes.Structure):
    """`struct job` of the C source."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("logits", "temperatures", "scratch")),
        *((n, ctypes.c_void_p) for n in ("values", "log_probs", "indices", "lse", "row_max")),
        *((n, ctypes.c_long) for n in ("kind", "stride", "width", "room", "group_room", "k")),
        *((n, ctypes.c_long) for n in ("rows", "next", "threads")),
    )


class Ranked(NamedTuple):
    values: Tensor  # (N, K) float32, best first
    log_probs: Tensor  # (N, K) float32
    indices: Tensor  # (N, K) int64
    lse: Tensor  # (N,) float32
    row_max: Tensor  # (N,) float32


def unavailable() -> str | None:
    """Why the compiled top-k is not available, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def ranked(logits: Tensor, k: int, temperature: Tensor, threads: int) -> Ranked:
    """The k largest of each row of (N, V), ties to the lower index, and the softmax over all V.

    Rows are contiguous; the stride between them is free. V is below 2³². A row without a softmax
    gives NaN.
    """
    library = _library()
    assert not isinstance(library, str), library
    rows, width = logits.shape
    count = max(1, min(threads, rows, rows * width // _LOGITS_A_THREAD))
    room, group_room = max(2 * k, _LEAST_ROOM), cdiv(width, _BLOCK) * (_BLOCK // _GROUP)
    scratch = _empty((count, room + group_room), np.int64)
    values, log_probs = _empty((rows, k), np.float32), _empty((rows, k), np.float32)
    indices = _empty((rows, k), np.int64)
    lse, row_max = _empty((rows,), np.float32), _empty((rows,), np.float32)
    results = Ranked(values, log_probs, indices, lse, row_max)
    tensors = logits, temperature, scratch, *results
    if (
        logits.dtype not in KINDS
        or (rows and logits.stride(1) != 1)
        or (temperature.shape, temperature.dtype) != ((rows,), torch.float32)
        or not temperature.is_contiguous()
        or not 1 <= k <= width
        or not in_cpu_memory(*tensors)
    ):
        raise ShapeError(
            f"compiled C cannot take the {k} largest of {logits.dtype} {tuple(logits.shape)} with"
            f" strides {logits.stride()} and {temperature.dtype} {tuple(temperature.shape)} as"
            f" temperatures on {logits.device}"
        )
    job = _Job(
        *(one.data_ptr() for one in tensors),
        *(KINDS[logits.dtype], logits.stride(0), width, room, group_room, k, rows, 0, 0),
    )
    run_in_threads(library.softmax_topk, job, count)
    return results


def _empty(shape: tuple[int, ...], dtype: type) -> Tensor:
    """A tensor that is not filled, in a third of the time of `torch.empty`."""
    return torch.from_numpy(np.empty(shape, dtype))


@cache
def _library() -> ctypes.CDLL | str:
    return load(SOURCE, softmax_topk=[ctypes.c_void_p])
