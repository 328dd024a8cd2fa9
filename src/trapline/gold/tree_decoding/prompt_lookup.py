"""Prompt lookup: drafts what followed the latest earlier occurrence of the text's ending."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trapline.gold import checks

#: Log-probabilities of drafted tokens and of all others.
_SURE, _ELSE = 0.0, -torch.inf


class PromptLookup:
    """Drafts the continuation of the latest earlier occurrence of the longest matching ending."""

    target_layers: tuple[int, ...] = ()

    def __init__(
        self, vocab: int, *, block: int = 8, longest: int = 3, device: torch.device | str = "cpu"
    ) -> None:
        checks.integer_between(1, 4096, block=block, longest=longest)
        self.vocab, self._block, self._longest, self._device = vocab, block, longest, device

    def refuses(self, prompt: Sequence[int]) -> str | None:  # noqa: ARG002 - any prompt is accepted
        """None: any prompt can be continued."""
        return None

    def draft(self, rows: Sequence[Any]) -> Tensor:
        """One certain token per depth as far as the occurrence goes, −inf elsewhere."""
        shape = (len(rows), self._block, self.vocab)
        log_q = torch.full(shape, _ELSE, dtype=torch.float32, device=self._device)
        for number, row in enumerate(rows):
            row.fresh = []
            guess = lookup(row.tokens, self._block, self._longest)
            depths = torch.arange(len(guess), device="cpu")
            log_q[number, depths, torch.tensor(guess, dtype=torch.long, device="cpu")] = _SURE
        return log_q


def lookup(tokens: Sequence[int], count: int, longest: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier occurrence of the text's ending."""
    text = list(tokens)
    for width in range(min(longest, len(text) - 1), 0, -1):
        ending = text[-width:]
        for start in range(len(text) - width - 1, -1, -1):
            if text[start : start + width] == ending:
                return text[start + width : start + width + count]
    return []
