"""Beam search on a decoder: beams are forks that share pages, and a prompt is computed once."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trapline.gold.beam_search.api import beam_search
from trapline.gold.beam_search.search import Beam
from trapline.gold.decoder.graphs import Running, StaticStep
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.rows import follow

PAGE = 16


def search(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int | Iterable[int],
    **options: Any,
) -> list[list[Beam]]:
    """`beam_search` with a decoder as its model; options are the same."""
    longest = max(map(len, prompts), default=1) + max_new_tokens
    if longest > decoder.config.context:
        raise RangeError(f"{longest} positions are more than the model's {decoder.config.context}")
    model = BeamModel(decoder, prompts, beam_width, max_new_tokens)
    return beam_search(
        model,
        prompts,
        beam_width=beam_width,
        max_new_tokens=max_new_tokens,
        eos_id=eos_id,
        **options,
    )


class BeamModel:
    """The decoder as `beam_search` asks a model with a cache (`start`, `follow`)."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        beam_width: int,
        max_new_tokens: int,
    ) -> None:
        self._decoder = decoder
        # A prompt's pages are shared; what a beam writes is its own, and so is the page it is in.
        own = beam_width * (-(-max_new_tokens // PAGE) + 1)
        pages = sum(-(-len(prompt) // PAGE) + own for prompt in prompts)
        longest = max(map(len, prompts), default=1) + max_new_tokens
        dtype, device = decoder.norm.weight.dtype, decoder.device
        self.pool = Pool(decoder.config, max(pages, 1), PAGE, dtype, device)
        rows = max(len(prompts) * beam_width, 1)
        self._step = StaticStep(decoder, self.pool, rows, -(-longest // PAGE))
        self._rows: list[PooledSequence] = []

    @torch.no_grad()
    def start(self, prompts: list[list[int]]) -> np.ndarray:
        """Log-probabilities (n, V) after each prompt, all in one packed pass."""
        if not all(prompts):
            raise RangeError("a prompt is empty")
        self._rows = [self.pool.open() for _ in prompts]
        return _log_probs(self._decoder.step(prompts, self._rows))

    def follow(self, parents: list[int], tokens: list[int]) -> np.ndarray:
        """(n, V) after rows `parents` of the last answer, each continued by its token."""
        by_number = {row.seq: row for row in self._rows}
        forks = _Forks(by_number)
        numbers = follow(forks, [row.seq for row in self._rows], parents)
        self._rows = [by_number[number] for number in numbers]
        # All pages that must be copied before a beam writes into them, at once.
        copies = [
            pair for row in self._rows for pair in self.pool.book.reserve(row.seq, row.length, 1)
        ]
        self.pool.copy(copies)
        self._step.load(
            [Running(row, token, 0) for row, token in zip(self._rows, tokens, strict=True)]
        )
        answer = _log_probs(self._step.logits()[: len(tokens)])
        for row in self._rows:
            row.advance(1)
        return answer


class _Forks:
    """Sequences by their numbers, as `follow` names them."""

    def __init__(self, rows: dict[int, PooledSequence]) -> None:
        self._rows = rows

    def fork(self, seq: int) -> int:
        twin = self._rows[seq].fork()
        self._rows[twin.seq] = twin
        return twin.seq

    def free(self, seq: int) -> None:
        self._rows.pop(seq).free()


def _log_probs(logits: Tensor) -> np.ndarray:
    return np.asarray(torch.log_softmax(logits.double(), dim=-1).cpu())
