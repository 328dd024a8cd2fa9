"""The CPU's softmax and top-k: `topk_cpu.c`. Without a compiler `fast` takes torch instead."""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trapline.gold.native import at, built, spread

SOURCE = Path(__file__).with_name("topk_cpu.c")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LOG2_E = 1.4426950408889634
#: Fewer logits than this a thread are done before another thread has started.
_LOGITS_A_THREAD = 1 << 15
#: Keys of elements that may be among the best: when there is space for no more, all but k go.
_LEAST_ROOM = 128


class Ranked(NamedTuple):
    values: Tensor  # (N, K) float32, best first
    indices: Tensor  # (N, K) int64
    totals: Tensor  # (N,) float64: Σ exp((x − max) / temperature)


def unavailable() -> str | None:
    """Why there is no compiled top-k here, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def takes(logits: Tensor) -> bool:
    """Whether the C code reads this dtype and width."""
    return logits.dtype in _KINDS and logits.shape[1] < (1 << 32)


def ranked(logits: Tensor, k: int, temperature: Tensor) -> Ranked:
    """The k largest of each row of (N, V), ties to the lower index, and the sums behind softmax."""
    library = _library()
    assert not isinstance(library, str), library
    rows, width = logits.shape
    flat = logits if logits.stride(1) == 1 else logits.contiguous()
    scales = (_LOG2_E / temperature.double()).float().numpy()
    values, indices = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
    totals = torch.empty(rows, dtype=torch.float64)
    count = max(1, min(torch.get_num_threads(), rows, rows * width // _LOGITS_A_THREAD))
    room = max(2 * k, _LEAST_ROOM)
    kept = np.empty((count, room), dtype=np.uint64)
    start = ctypes.c_void_p(flat.data_ptr())
    outputs = [at(part.numpy()) for part in (values, indices, totals)]

    def part(number: int) -> None:
        first, last = rows * number // count, rows * (number + 1) // count
        library.softmax_topk(
            *(start, _KINDS[flat.dtype], flat.stride(0), width, at(scales)),
            *(at(kept[number]), room, k, *outputs, first, last),
        )

    spread(part, count)
    return Ranked(values, indices, totals)


@cache
def _library() -> ctypes.CDLL | str:
    library = built(SOURCE)
    if isinstance(library, str):
        return library
    long, pointer = ctypes.c_long, ctypes.c_void_p
    library.softmax_topk.argtypes = [
        *(pointer, long, long, long, pointer, pointer, long, long),
        *(pointer, pointer, pointer, long, long),
    ]
    library.softmax_topk.restype = None
    return library
