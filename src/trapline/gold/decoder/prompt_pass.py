"""The pass over prompts of fixed lengths, batch after batch, captured on a GPU.

A short pass finishes sooner than the host can launch its kernels one by one; captured, it is one
launch. Lengths and pool pages stay the same, only the tokens change.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import PooledSequence

#: Tokens; longer passes keep the GPU busy anyway, and a graph would hold their memory.
LONGEST = 4096


class PromptPass:
    """Logits (B, V) after prompts; their keys and values go into the pages of these sequences.

    The sequences must be empty, and their lengths are not advanced.
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
        # The first batch may be the only one, so it is not captured. Running it also makes the
        # host-side tables that a capture cannot make.
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
