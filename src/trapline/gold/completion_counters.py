"""Counters for kernels whose last program finishes the work of the others.

A program that is done adds one. The program that finds all others done does the rest and sets the
counter back to 0, so counters are 0 between launches: one launch instead of two or three.

Two launches that may run at the same time must not share counters. Launches outside graphs take
turns through a ring far longer than what a device has in flight. A captured launch keeps its
counters, because it runs again whenever its graph does.
"""

from threading import Lock

import torch
from torch import Tensor

from trapline.gold.launch_tape import note_counters

#: Number of int32 counters; a launch takes one per group of programs, a few hundred.
RING_SIZE = 1 << 20
KEPT_SIZE = 1 << 20
_made: dict[torch.device, "CompletionCounters"] = {}


class CompletionCounters:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self._ring = torch.zeros(RING_SIZE, dtype=torch.int32, device=device)
        self._kept = torch.zeros(KEPT_SIZE, dtype=torch.int32, device=device)
        self._ring_address, self._kept_address = self._ring.data_ptr(), self._kept.data_ptr()
        self._at = self._kept_at = 0
        self._lock = Lock()
        if self._ring.is_cuda:
            # The next launch may come on another stream.
            torch.cuda.current_stream(device).synchronize()

    def take(self, count: int, *, keep: bool) -> Tensor | None:
        """`count` counters, all 0, or None if there are not enough left."""
        begin = self._begin(count, keep)
        counters = self._kept if keep else self._ring
        return None if begin is None else counters[begin : begin + count]

    def address(self, count: int, *, keep: bool) -> int | None:
        """The address of what `take` returns, which costs more."""
        begin = self._begin(count, keep)
        start = self._kept_address if keep else self._ring_address
        return None if begin is None else start + 4 * begin

    def _begin(self, count: int, keep: bool) -> int | None:
        with self._lock:
            if keep:
                begin, self._kept_at = self._kept_at, self._kept_at + count
                return begin if begin + count <= KEPT_SIZE else None
            if count > RING_SIZE:
                return None
            begin = self._at if self._at + count <= RING_SIZE else 0
            self._at = begin + count
            return begin


def completion_counters(count: int, like: Tensor) -> Tensor:
    """Counters on `like`'s device for one launch, also while a graph is captured."""
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    device = like.device
    if device not in _made and not capturing:
        _made[device] = CompletionCounters(device)
    found = _made[device].take(count, keep=capturing) if device in _made else None
    if found is None:
        # Inside a capture this also records clearing them at every replay.
        return torch.zeros(count, dtype=torch.int32, device=device)
    note_counters(found)
    return found


def counters_of(device: torch.device) -> CompletionCounters:
    """The counters of a device that has some."""
    return _made[device]
