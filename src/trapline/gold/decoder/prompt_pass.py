"""Prompts of the same lengths, one batch after the other: their pass, on a GPU captured.

A short pass is over sooner than the host has started its kernels one by one. Captured it is one
start. Lengths and places in the pool stay, the tokens change.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import PooledSequence

#: Longer passes keep a GPU busy while the host goes ahead; a graph would only hold their memory.
LONGEST = 4096


class PromptPass:
    """Logits (B, V) after prompts that lie in these sequences, empty before and as they were after.

    Their keys and values are in the pool then.
    """

    def __init__(self, decoder: Network, places: Sequence[PooledSequence], lengths: list[int]):
        self._decoder = decoder
        self._packing = decoder.pack(lengths, places)
        self._ids = torch.zeros(sum(lengths), dtype=torch.long, device=decoder.device)
        self._last = torch.tensor(list(accumulate(lengths)), device=decoder.device) - 1
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._ids.copy_(self._decoder.tokens(prompts))
        # The first batch may be the only one: recording it would cost more than it gives. And what
        # a pass asks the host for, it has asked for before it is recorded.
        if self._logits is None or not self._ids.is_cuda or len(self._ids) > LONGEST:
            self._remember()
        else:
            self._graph = self._graph or captured(self._remember, [])
            self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _remember(self) -> None:
        self._logits = self._through()

    def _through(self) -> Tensor:
        hidden = self._decoder.through(self._ids, self._packing).last
        return self._decoder.logits(hidden[self._last])
