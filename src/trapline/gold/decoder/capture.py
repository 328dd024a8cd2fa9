"""CUDA graphs without the effects of their warm-up runs, and copies that nothing waits for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def captured(
    work: Callable[[], object], changed: Sequence[Tensor], device: torch.device
) -> torch.cuda.CUDAGraph:
    """Captures `work` on a device as a graph; restores the tensors `changed` by warm-up runs."""
    with torch.cuda.device(device):
        return _captured_here(work, changed)


def _captured_here(work: Callable[[], object], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    before = [tensor.clone() for tensor in changed]
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class HostCopy(NamedTuple):
    """Values on their way to the host."""

    values: Tensor
    done: torch.cuda.Event | None

    def read(self) -> list[Any]:
        """The values; waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        return list(self.values.tolist())


def host_copy(values: Tensor) -> HostCopy:
    """Starts a copy to the host."""
    if not values.is_cuda:
        return HostCopy(values, None)
    landed = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    landed.copy_(values, non_blocking=True)
    done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(values.device))
    return HostCopy(landed, done)
