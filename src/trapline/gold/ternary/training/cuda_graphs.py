"""A training step as two CUDA graphs, with one launch each instead of hundreds.

The first computes loss and gradients, the second updates the weights. The host reads the loss in
between, so that a step can be skipped.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_WARM_UP = 3


class CapturedGradients:
    """Captures `loss`, its backward pass and gradient clipping for windows of one shape.

    Each call rewrites the parameters' `.grad` in the same memory; nothing else may replace them.
    """

    def __init__(
        self,
        loss: Callable[[Tensor], Tensor],
        windows: Tensor,
        parameters: Iterable[nn.Parameter],
        clip: float,
    ) -> None:
        self._windows = windows.clone()
        self._parameters = list(parameters)
        with torch.cuda.device_of(windows):  # type: ignore[no-untyped-call]
            self._capture(loss, clip)

    def _capture(self, loss: Callable[[Tensor], Tensor], clip: float) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._both(loss, clip)
        torch.cuda.current_stream().wait_stream(side)
        self._forget()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._found = self._both(loss, clip)

    def __call__(self, windows: Tensor) -> Tensor:
        """The loss, and the norm of the gradients before clipping."""
        self._windows.copy_(windows)
        self._graph.replay()
        return self._found

    def _both(self, loss: Callable[[Tensor], Tensor], clip: float) -> Tensor:
        self._forget()
        found = loss(self._windows)
        found.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters, clip)
        return torch.stack((found.detach().float(), norm.float()))

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class CapturedMove:
    """Captures the steps of all optimisers. Rates must be tensors: a graph freezes numbers."""

    def __init__(self, optimisers: list[Any], device: torch.device) -> None:
        self._optimisers, self._device = optimisers, device
        self._plain_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._plain_steps < _WARM_UP:
            # An optimiser allocates its state in the first step, outside the graph's memory.
            self._plain_steps += 1
            self._all()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self._device), torch.cuda.graph(self._graph):
                self._all()
        self._graph.replay()

    def _all(self) -> None:
        for optimiser in self._optimisers:
            optimiser.step()
