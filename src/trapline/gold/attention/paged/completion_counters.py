"""Counters for kernels whose last program finishes the work of the others.

A program that is done adds one; whoever finds that all others came before it does what is left and
puts the counter back to 0. So counters are 0 between launches and nobody clears them: one launch
instead of two or three.

Two launches that may run at the same time must not share counters. Launches outside graphs take
turns through a ring that is far longer than what a device has in flight. A captured launch keeps
its counters for good: it runs again whenever its graph does.
"""

from threading import Lock

import torch
from torch import Tensor

#: int32 each; a launch takes as many as it has groups of programs, a few hundred.
RING = 1 << 20
KEPT = 1 << 20
_made: dict[torch.device, "Arrivals"] = {}


class Arrivals:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self._ring = torch.zeros(RING, dtype=torch.int32, device=device)
        self._kept = torch.zeros(KEPT, dtype=torch.int32, device=device)
        self._at = self._kept_at = 0
        self._lock = Lock()
        if self._ring.is_cuda:
            # The next launch may come on another stream.
            torch.cuda.current_stream(device).synchronize()

    def take(self, count: int, *, keep: bool) -> Tensor | None:
        """That many counters, all 0; None where there are not as many left."""
        with self._lock:
            return self._take(count, keep)

    def _take(self, count: int, keep: bool) -> Tensor | None:
        if keep:
            begin, self._kept_at = self._kept_at, self._kept_at + count
            return self._kept[begin : begin + count] if begin + count <= KEPT else None
        if count > RING:
            return None
        begin = self._at if self._at + count <= RING else 0
        self._at = begin + count
        return self._ring[begin : begin + count]


def arrivals(count: int, like: Tensor) -> Tensor:
    """Counters on `like`'s device for one launch; also while a graph is captured."""
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    device = like.device
    if device not in _made and not capturing:
        _made[device] = Arrivals(device)
    found = _made[device].take(count, keep=capturing) if device in _made else None
    # Inside a capture this also records that they are cleared, at every replay.
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found
