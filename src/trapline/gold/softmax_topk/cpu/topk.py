"""Softmax and top-k on a CPU: `topk.c`, where a C compiler is available."""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trapline.gold.arithmetic import LOG2_E, cdiv
from trapline.gold.c_library import address, load, run_in_threads
from trapline.gold.errors import ShapeError

SOURCE = Path(__file__).with_name("topk.c")
#: Supported dtypes; 16-bit logits are passed as integers of the same bits.
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
#: A thread with fewer logits than this finishes before another one has started.
_LOGITS_A_THREAD = 1 << 15
#: Least number of candidate keys; when the list is full, all but the k best are dropped.
_LEAST_ROOM = 128
#: Logits per group, of which the maximum is kept, and per block, as in the C file.
_GROUP, _BLOCK = 64, 4096


class _Job(ctypes.Structure):
    """`struct job` of the C source."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("logits", "scales", "keys", "groups")),
        *((n, ctypes.c_void_p) for n in ("values", "indices", "totals")),
        *((n, ctypes.c_long) for n in ("kind", "stride", "width", "room", "group_room", "k")),
        *((n, ctypes.c_long) for n in ("rows", "next", "threads")),
    )


class Ranked(NamedTuple):
    values: np.ndarray  # (N, K) float32, best first
    indices: np.ndarray  # (N, K) int64
    totals: np.ndarray  # (N,) float64: Σ exp((x − max) / temperature)


def unavailable() -> str | None:
    """Why the compiled top-k is not available, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def ranked(logits: np.ndarray, kind: str, k: int, temperature: np.ndarray, threads: int) -> Ranked:
    """The k largest of each row of (N, V), ties to the lower index, and the sums behind softmax.

    Rows are contiguous; the stride between them is free. V is below 2³².
    """
    library = _library()
    assert not isinstance(library, str), library
    rows, width = logits.shape
    if (
        logits.itemsize != (4 if kind == "float32" else 2)
        or (rows and logits.strides[1] != logits.itemsize)
        or temperature.shape != (rows,)
        or not 1 <= k <= width
    ):
        raise ShapeError(
            f"compiled C cannot take the {k} largest of {logits.dtype} {logits.shape} as {kind}"
            f" with strides {logits.strides} and temperatures {temperature.shape}"
        )
    stride = logits.strides[0] // logits.itemsize
    scales = (LOG2_E / temperature.astype(np.float64)).astype(np.float32)
    values, indices = np.empty((rows, k), np.float32), np.empty((rows, k), np.int64)
    totals = np.empty(rows, np.float64)
    count = max(1, min(threads, rows, rows * width // _LOGITS_A_THREAD))
    room = max(2 * k, _LEAST_ROOM)
    kept = np.empty((count, room), np.uint64)
    groups = np.empty((count, cdiv(width, _BLOCK) * (_BLOCK // _GROUP)), np.uint64)
    job = _Job(
        *(address(one) for one in (logits, scales, kept, groups, values, indices, totals)),
        *(KINDS[kind], stride, width, room, groups.shape[1], k, rows, 0, 0),
    )
    run_in_threads(library.softmax_topk, job, count)
    return Ranked(values, indices, totals)


@cache
def _library() -> ctypes.CDLL | str:
    return load(SOURCE, softmax_topk=[ctypes.c_void_p])
