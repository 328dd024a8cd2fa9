"""Beam search on a decoder: beams share pages, and each prompt is computed once."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.beam_search.api import Candidates, beam_search, checked_rules
from trapline.gold.beam_search.search import Beam
from trapline.gold.decoder.beams_device import DeviceSearch
from trapline.gold.decoder.graphed_step import GraphedStep, StepRow
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.penalties import BatchPenalties, History
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.decoder.sampling import Sampling, ranked
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.reorder import follow

PAGE = 16


def search(
    decoder: Network,
    prompts: Sequence[Sequence[int]],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int | Iterable[int],
    **options: Any,
) -> list[list[Beam]]:
    """`beam_search` with a decoder as its model, with the same options."""
    searcher = Searcher(
        decoder, beam_width=beam_width, max_new_tokens=max_new_tokens, eos_id=eos_id, **options
    )
    return searcher(prompts)


class Searcher:
    """`search` for one batch after another with the same options.

    Batches with the same prompt lengths share pages, buffers and, on a GPU, captured graphs. The
    decoder's weights must not change between calls.
    """

    def __init__(
        self,
        decoder: Network,
        *,
        beam_width: int,
        max_new_tokens: int,
        eos_id: int | Iterable[int],
        **options: Any,
    ) -> None:
        self._decoder, self._options = decoder, options
        ends = list(eos_id) if isinstance(eos_id, Iterable) else [eos_id]
        self._width, self._new, self._ends = beam_width, max_new_tokens, ends
        self._rules, self._count = checked_rules(beam_width, max_new_tokens, ends, **options)
        self._kept: tuple[tuple[list[int], bool], BeamModel | DeviceSearch] | None = None

    def __call__(
        self, prompts: Sequence[Sequence[int]], ways: Sequence[Sampling] = ()
    ) -> list[list[Beam]]:
        """Up to `n_best` continuations of every prompt, best first.

        `ways`, one a prompt, change the logits by their bias and penalties.
        """
        context = self._decoder.config.context
        longest = max(map(len, prompts), default=1) + self._new
        if longest > context:
            raise RangeError(f"{longest} positions are more than the model's {context}")
        if not prompts:
            return []
        changing = [way for way in ways if way.changes_logits]
        model = self._model(prompts, on_device=not changing)
        if isinstance(model, DeviceSearch):
            return model(prompts, self._count)
        model.ways = list(ways) if changing else []
        return beam_search(
            model,
            prompts,
            beam_width=self._width,
            max_new_tokens=self._new,
            eos_id=self._ends,
            **self._options,
        )

    def _model(
        self, prompts: Sequence[Sequence[int]], *, on_device: bool = True
    ) -> "BeamModel | DeviceSearch":
        # The search on the device is built for beams that share a prompt: at least two.
        on_device = on_device and self._decoder.device.type != "cpu" and self._width > 1
        key = [len(prompt) for prompt in prompts], on_device
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # frees its pages before new ones are allocated
            made: BeamModel | DeviceSearch
            if on_device:
                made = DeviceSearch(self._decoder, key[0], self._rules)
            else:
                given = prompts, self._width, self._new
                made = BeamModel(self._decoder, *given, eos_ids=self._ends)
            self._kept = key, made
        return self._kept[1]


class BeamModel:
    """The decoder as a model with a cache (`start`, `follow`) for `beam_search`.

    Returns only the candidates that a search of this width can need, selected on the device. May be
    used for one search after another.
    """

    def __init__(
        self,
        decoder: Network,
        prompts: Sequence[Sequence[int]],
        beam_width: int,
        max_new_tokens: int,
        *,
        eos_ids: Sequence[int],
    ) -> None:
        self._decoder = decoder
        vocabulary = decoder.config.vocab
        if not all(0 <= end < vocabulary for end in eos_ids):
            raise RangeError(f"eos_id {list(eos_ids)} is outside the vocabulary of {vocabulary}")
        self._ends = torch.tensor(sorted(set(eos_ids)), device=decoder.device)
        self._end_ids = np.array(sorted(set(eos_ids)))
        self._kept = min((1 + len(self._ends)) * max(beam_width, 1), vocabulary)
        # Beams share the prompt's pages; each has its own pages for the tokens that it adds.
        own = beam_width * (cdiv(max_new_tokens, PAGE) + 1)
        pages = sum(cdiv(len(prompt), PAGE) + own for prompt in prompts)
        longest = max(map(len, prompts), default=1) + max_new_tokens
        dtype, device = decoder.norm.weight.dtype, decoder.device
        self.pool = Pool(decoder.config, max(pages, 1), PAGE, dtype, device)
        rows = max(len(prompts) * beam_width, 1)
        self._step = GraphedStep(decoder, self.pool, rows, cdiv(longest, PAGE))
        self._rows: list[PooledSequence] = []
        #: Bias and penalties of each prompt; empty if there are none.
        self.ways: list[Sampling] = []
        self._texts: list[_Text] = []

    @torch.no_grad()
    def start(self, prompts: list[list[int]]) -> Candidates:
        """Candidates after each prompt, from one packed pass."""
        if not all(prompts):
            raise RangeError("a prompt is empty")
        for row in self._rows:
            row.free()
        self._rows = [self.pool.open() for _ in prompts]
        if self.ways:
            self._texts = [
                _Text(way, prompt, []) for way, prompt in zip(self.ways, prompts, strict=True)
            ]
        return self._candidates(self._decoder.step(prompts, self._rows))

    @torch.no_grad()
    def follow(self, parents: list[int], tokens: list[int]) -> Candidates:
        """Candidates after rows `parents` of the last result, each extended by its token."""
        if self.ways:
            self._texts = [
                self._texts[parent].with_token(token)
                for parent, token in zip(parents, tokens, strict=True)
            ]
        by_number = {row.seq: row for row in self._rows}
        forks = _Forks(by_number)
        numbers = follow(forks, [row.seq for row in self._rows], parents)
        self._rows = [by_number[number] for number in numbers]
        # Copies all shared pages that beams are about to write to, at once.
        copies = [
            pair for row in self._rows for pair in self.pool.book.reserve(row.seq, row.length, 1)
        ]
        self.pool.copy(copies)
        self._step.load(
            [StepRow(row, token, 0) for row, token in zip(self._rows, tokens, strict=True)]
        )
        answer = self._candidates(self._step.logits()[: len(tokens)])
        for row in self._rows:
            row.advance(1)
        return answer

    def _candidates(self, logits: Tensor) -> Candidates:
        """The best of each row and all end tokens, in one transfer to the host."""
        logits = logits.float()
        if self.ways:
            logits = BatchPenalties(
                [text.way for text in self._texts],
                [History(text.prompt, text.answer) for text in self._texts],
                self._decoder.config.vocab,
                logits.device,
            )(logits)
        top = ranked(logits, self._kept)
        ends = logits[:, self._ends] - top.lse[:, None]
        packed = torch.cat((top.values.double(), top.indices.double(), ends.double()), dim=1)
        values, indices, at_end = np.split(
            packed.cpu().numpy(), [self._kept, 2 * self._kept], axis=1
        )
        indices = indices.astype(np.int64)
        tokens = np.union1d(indices, self._end_ids)
        table = np.full((len(values), len(tokens)), -np.inf)
        np.put_along_axis(table, np.searchsorted(tokens, indices), values, axis=1)
        table[:, np.searchsorted(tokens, self._end_ids)] = at_end
        return Candidates(table, tokens)


class _Text(NamedTuple):
    """The text of one beam, and its penalties."""

    way: Sampling
    prompt: list[int]
    answer: list[int]

    def with_token(self, token: int) -> "_Text":
        return self._replace(answer=[*self.answer, token])


class _Forks:
    """Sequences by number, as `follow` expects them."""

    def __init__(self, rows: dict[int, PooledSequence]) -> None:
        self._rows = rows

    def fork(self, seq: int) -> int:
        twin = self._rows[seq].fork()
        self._rows[twin.seq] = twin
        return twin.seq

    def free(self, seq: int) -> None:
        self._rows.pop(seq).free()
