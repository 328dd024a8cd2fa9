"""Logit bias and penalties: what a row's own text changes about its next token.

The order is that of transformers: the bias is added, then the repetition penalty scales the logits
of tokens in prompt and answer, then presence and frequency penalties lower those of the answer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trapline.gold.errors import RangeError

if TYPE_CHECKING:
    from trapline.gold.decoder.sampling import Sampling


class History(NamedTuple):
    """The text of one row so far."""

    prompt: Sequence[int]
    answer: Sequence[int]


class BatchPenalties:
    """Bias and penalties of a fixed batch; counts the tokens of its answers on the device."""

    def __init__(
        self,
        ways: Sequence["Sampling"],
        histories: Sequence[History],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._bias = _bias(ways, device)
        self._counted: Tensor | None = None
        if any(way.has_penalties for way in ways):
            if len(histories) != len(ways):
                raise RangeError(f"penalties of {len(ways)} rows need as many histories")
            self._counted = _counts([history.answer for history in histories], vocabulary, device)
            self._prompts = _counts([history.prompt for history in histories], vocabulary, device)
            self._repetition, self._presence, self._frequency = (
                torch.tensor(
                    [[getattr(way, name)] for way in ways], dtype=torch.float32, device=device
                )
                for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
            )

    def __call__(self, logits: Tensor) -> Tensor:
        """Changed logits (B, V) in float32; the given ones stay."""
        logits = biased(logits, self._bias)
        if self._counted is None:
            return logits
        return penalised(
            logits,
            in_text=self._prompts + self._counted > 0,
            answered=self._counted,
            repetition=self._repetition,
            presence=self._presence,
            frequency=self._frequency,
        )

    def count(self, tokens: Tensor) -> None:
        """Adds the tokens (B,) that were chosen; negative ones do not count."""
        if self._counted is not None:
            once = (tokens >= 0).to(self._counted.dtype)[:, None]
            self._counted.scatter_add_(1, tokens.clamp(min=0)[:, None], once)


def penalised(
    logits: Tensor,
    *,
    in_text: Tensor,
    answered: Tensor,
    repetition: Tensor | float,
    presence: Tensor | float,
    frequency: Tensor | float,
) -> Tensor:
    """Penalties on logits (…, V); `answered` counts each token in the answer."""
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_text, scaled, logits)
    return logits - presence * (answered > 0) - frequency * answered


def penalised_nodes(
    logits: Tensor, way: "Sampling", history: History, drafted: Tensor, seen: Tensor
) -> Tensor:
    """Logits (N+1, V) of one drafted tree, each node with the text that leads to it.

    The history ends with the root. `drafted` (N,) are the nodes' tokens, negative for padding;
    `seen` (N+1, N+1) says which of root and nodes each of them continues.
    """
    device, width = logits.device, logits.shape[-1]
    logits = biased(logits, _bias([way] * len(logits), device))
    if not way.has_penalties:
        return logits
    nodes = torch.nn.functional.one_hot(drafted.clamp(min=0), width).to(logits.dtype)
    branch = seen[:, 1:].to(logits.dtype) @ (nodes * (drafted >= 0)[:, None])
    answered = _counts([history.answer], width, device) + branch
    return penalised(
        logits,
        in_text=_counts([history.prompt], width, device) + answered > 0,
        answered=answered,
        repetition=way.repetition_penalty,
        presence=way.presence_penalty,
        frequency=way.frequency_penalty,
    )


class _Bias(NamedTuple):
    """(n,) values, and the row and token of each."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


def _bias(ways: Sequence["Sampling"], device: torch.device) -> _Bias | None:
    entries = [
        (row, token, value)
        for row, way in enumerate(ways)
        for token, value in (way.logit_bias or {}).items()
    ]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return _Bias(
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def biased(logits: Tensor, bias: _Bias | None) -> Tensor:
    """Logits (B, V) in float32 with the bias added; the given ones stay."""
    if bias is None:
        return logits.float()
    place = bias.rows, bias.tokens
    return logits.float().index_put(place, bias.values, accumulate=True)


def _counts(texts: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """How often each token occurs, (B, V) in float32."""
    counts = [
        torch.bincount(torch.tensor(list(text), dtype=torch.long, device="cpu"), minlength=width)
        for text in texts
    ]
    return torch.stack(counts).to(device, torch.float32)
