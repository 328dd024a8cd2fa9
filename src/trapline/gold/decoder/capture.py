"""Recording a piece of work as a CUDA graph without leaving a trace of the rehearsals."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def captured(work: Callable[[], object], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """The work as a graph. The runs before it compile; what they `changed` is put back."""
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
