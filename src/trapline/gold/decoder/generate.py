"""Generation: batched prompts of different lengths; finished rows leave, waiting ones enter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from trapline.gold.decoder.cache import SequenceCache
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.sampling import Sampler, Sampling
from trapline.gold.errors import RangeError


class Token(NamedTuple):
    """One new token of one prompt, as it is streamed."""

    prompt: int
    token: int
    last: bool


@dataclass
class _Row:
    """A prompt at work."""

    number: int
    new: list[int]
    cache: SequenceCache
    sampler: Sampler
    tokens: list[int] = field(default_factory=list)


def stream(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch: int = 32,
) -> Iterator[Token]:
    """Yields tokens as they come. At most `batch` prompts run at once; others wait their turn."""
    _check(decoder, prompts, max_new_tokens, stop_ids, batch)
    ways = _per_prompt(sampling or Sampling(), len(prompts))
    waiting = [
        _Row(number, list(prompt), decoder.new_cache(), Sampler(way))
        for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
    ][::-1]
    running: list[_Row] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        made = _step(decoder, running, max_new_tokens, stop_ids)
        yield from (token for _, token in made)
        running = [row for row, token in made if not token.last]


def _step(
    decoder: Decoder, rows: list[_Row], max_new_tokens: int, stop_ids: Sequence[int]
) -> list[tuple[_Row, Token]]:
    with torch.no_grad():
        logits = decoder.step([row.new for row in rows], [row.cache for row in rows])
    made = []
    for row, one in zip(rows, logits, strict=True):
        token = row.sampler.choose(one)
        row.tokens.append(token)
        row.new = [token]
        last = token in stop_ids or len(row.tokens) >= max_new_tokens
        made.append((row, Token(row.number, token, last)))
    return made


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch: int = 32,
) -> list[list[int]]:
    """The new tokens of each prompt, its stop token included."""
    answers: list[list[int]] = [[] for _ in prompts]
    for token in stream(
        decoder,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        batch=batch,
    ):
        answers[token.prompt].append(token.token)
    return answers


class BeamModel:
    """The decoder as `beam_search` asks for it: log-probabilities of prefixes, one call a step.

    Each prefix continues a cache of the step before: its own parent's, copied where several
    beams share one.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._caches: dict[tuple[int, ...], SequenceCache] = {}

    def log_probs(self, prefixes: list[list[int]]) -> np.ndarray:
        """(n, V) in float64."""
        keys = [tuple(prefix) for prefix in prefixes]
        caches = [self._continued(key) for key in keys]
        new = [key[cache.length :] for key, cache in zip(keys, caches, strict=True)]
        with torch.no_grad():
            logits = self._decoder.step(new, caches)
        self._caches = dict(zip(keys, caches, strict=True))
        return np.asarray(torch.log_softmax(logits.double(), dim=-1).cpu())

    def _continued(self, key: tuple[int, ...]) -> SequenceCache:
        parent = self._caches.get(key[:-1])
        return parent.fork() if parent is not None else self._decoder.new_cache()


def _per_prompt(sampling: Sampling | Sequence[Sampling], count: int) -> list[Sampling]:
    ways = [sampling] * count if isinstance(sampling, Sampling) else list(sampling)
    if len(ways) != count:
        raise RangeError(f"{len(ways)} samplings for {count} prompts")
    return ways


def _check(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    batch: int,
) -> None:
    """Refuses before anything is computed."""
    if max_new_tokens < 1 or batch < 1:
        raise RangeError("max_new_tokens and batch must be at least 1")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise RangeError(f"prompt {number} is empty")
        total = len(prompt) + max_new_tokens
        if total > decoder.config.context:
            raise RangeError(
                f"prompt {number} needs {total} positions, the model has {decoder.config.context}"
            )
    for stop in stop_ids:
        if not 0 <= stop < decoder.config.vocab:
            raise RangeError(f"stop token {stop} is outside the vocabulary")
