"""Captures work as a CUDA graph and undoes the effects of its warm-up runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def captured(work: Callable[[], object], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """Captures `work` as a graph; restores the tensors `changed` by the warm-up runs."""
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
