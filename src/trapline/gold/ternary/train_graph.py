"""Loss and gradients of a batch as one CUDA graph: a launch instead of some hundred."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_WARM_UP = 3


class CapturedGradients:
    """Calls `loss` and its backward pass for windows of one shape, always in the same memory.

    The gradients are the parameters' own `.grad`, written anew by each call: an optimiser reads
    them, and nothing may replace them in between.
    """

    def __init__(
        self, loss: Callable[[Tensor], Tensor], windows: Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        self._windows = windows.clone()
        parameters = list(parameters)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                _forget(parameters)
                loss(self._windows).backward()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_stream(side)
        _forget(parameters)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            found = loss(self._windows)
            found.backward()  # type: ignore[no-untyped-call]
        self._loss = found.detach()

    def __call__(self, windows: Tensor) -> Tensor:
        self._windows.copy_(windows)
        self._graph.replay()
        return self._loss


def _forget(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
