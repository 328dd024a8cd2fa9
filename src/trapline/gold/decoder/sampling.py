"""Choosing the next token: greedy, or drawn with temperature, top-k, top-p and min-p."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trapline.gold.errors import RangeError
from trapline.gold.softmax_topk.api import softmax_topk


@dataclass(frozen=True)
class Sampling:
    """How one row is sampled; temperature 0 is greedy, ties to the lower token."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise RangeError(f"temperature must be 0 or positive, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise RangeError(f"top_k must be at least 1, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise RangeError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise RangeError(f"min_p must be in [0, 1], got {self.min_p}")


class Sampler:
    """One row's choices. Its random stream is its own: other rows do not disturb it."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._stream = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token for logits (V,)."""
        if bool(torch.isnan(logits).any()):
            raise RangeError("the model's logits hold NaN")
        if self.sampling.temperature == 0.0:
            return int(softmax_topk(logits.float()[None], 1).indices)
        candidates, weights = self._candidates(logits.float())
        place = torch.multinomial(weights, 1, generator=self._stream)
        return int(candidates[place])

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that may be drawn, most likely first, and their probabilities over all tokens."""
        vocabulary = logits.shape[-1]
        k = min(self.sampling.top_k or vocabulary, vocabulary)
        top = softmax_topk(logits[None], k, temperature=self.sampling.temperature)
        weights, tokens = top.values[0].cpu(), top.indices[0].cpu()
        if self.sampling.top_k is not None:
            weights = weights / weights.sum()
        before = weights.cumsum(0) - weights
        kept = (before < self.sampling.top_p) & (weights >= self.sampling.min_p * weights[0])
        return tokens[kept], weights[kept]
