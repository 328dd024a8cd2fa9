"""Chooses next tokens for a batch: greedy, or sampled with temperature, top-k, top-p and min-p.

Every row has its own settings and random numbers: the n-th number of a seed is a hash of (seed, n),
computed on the device. So a row's text does not depend on the rest of the batch, there is no
generator state, and nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from trapline.gold import checks
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.softmax_topk.api import TopK, softmax_topk

#: Candidates that almost always contain the nucleus; where they do not, all are ranked.
NUCLEUS = 1024
#: Returned instead of a token if a row's logits have no softmax.
NO_TOKEN = -1
#: Logits of up to 10⁸ can be divided by it in float32.
SMALLEST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """Settings of one row; temperature 0 is greedy, ties go to the lower token."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise DTypeError(
                    f"{name} must be one number, got {value!r}; "
                    "prompts that differ take a list of Sampling"
                )
        if not 0.0 <= self.temperature < float("inf"):
            raise RangeError(f"temperature must be 0 or positive, got {self.temperature}")
        if 0.0 < self.temperature < SMALLEST_TEMPERATURE:
            raise RangeError(
                f"temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, "
                f"got {self.temperature}"
            )
        checks.integers(seed=self.seed, top_k=self.top_k or 0)
        if self.top_k is not None and self.top_k < 1:
            raise RangeError(f"top_k must be at least 1, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise RangeError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise RangeError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def sampling_per_prompt(
    sampling: Sampling | Sequence[Sampling] | None, count: int
) -> list[Sampling]:
    """One setting a prompt; a single one serves all, with seed + i for prompt i."""
    if sampling is None or isinstance(sampling, Sampling):
        shared = sampling or Sampling()
        return [replace(shared, seed=shared.seed + number) for number in range(count)]
    if not isinstance(sampling, Sequence):
        raise DTypeError(f"sampling must be a Sampling or a list of them, got {sampling!r}")
    settings = list(sampling)
    for one in settings:
        if not isinstance(one, Sampling):
            raise DTypeError(f"sampling must be a Sampling or a list of them, got {one!r}")
    if len(settings) != count:
        raise RangeError(f"got {len(settings)} samplings for {count} prompts; give one for each")
    return settings


class SamplingTensors(NamedTuple):
    """Settings of a batch as tensors (B,)."""

    temperature: Tensor  # 1 where greedy: its candidates are the same
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


class TokenSampler:
    """Chooses tokens for the rows of one fixed batch."""

    def __init__(self, ways: Sequence[Sampling], vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._candidates = max((self._needed(way) for way in ways), default=1)
        #: Whether a nucleus may exceed the candidates; only then the result is checked.
        self._uncertain = any(
            not way.is_greedy and way.top_k is None and self._needed(way) < vocabulary
            for way in ways
        )
        self._ways = _as_tensors(ways, vocabulary, device)
        self.all_greedy = all(way.is_greedy for way in ways)

    def __len__(self) -> int:
        return len(self._ways.seed)

    def __call__(self, logits: Tensor, made: Tensor) -> Tensor:
        """Next tokens (B,) for logits (B, V), `made` (B,) tokens after the prompt.

        `NO_TOKEN` where a row has NaN or +inf or only −inf, so that callers need no extra check.
        """
        if self.all_greedy:
            return greedy(logits)
        chosen, fits = self._draw(logits.float(), made, self._candidates)
        if self._uncertain and not bool(fits.all()):
            chosen, _ = self._draw(logits.float(), made, self._vocabulary)
        return chosen

    def _needed(self, way: Sampling) -> int:
        """Candidates that a row usually needs."""
        if way.is_greedy:
            return 1
        if way.top_k is not None:
            return min(way.top_k, self._vocabulary)
        return self._vocabulary if way.top_p == 1.0 else min(NUCLEUS, self._vocabulary)

    def _draw(self, logits: Tensor, made: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
        """Tokens, and whether each row's nucleus lies within its candidates."""
        ways = self._ways
        top = ranked(logits, candidates, ways.temperature)
        weights = top.values.double().exp()  # over all V, best first
        rank = torch.arange(candidates, device=logits.device)
        weights = weights.masked_fill(rank >= ways.top_k[:, None], 0.0)
        limited = ways.top_k < self._vocabulary
        mass = torch.where(limited, weights.sum(dim=1), 1.0)
        fits = weights.sum(dim=1) >= mass * ways.top_p - 1e-9
        weights = weights / mass[:, None]
        before = weights.cumsum(dim=1) - weights
        kept = (before < ways.top_p[:, None]) & (weights >= ways.min_p[:, None] * weights[:, :1])
        reached = (weights * kept).cumsum(dim=1)
        target = uniforms(ways.seed, made) * reached[:, -1]
        place = (reached <= target[:, None]).sum(dim=1).clamp(max=candidates - 1)
        # Rounding may move the target past the end: take the last kept candidate.
        place = torch.minimum(place, kept.sum(dim=1) - 1).clamp(min=0)
        place = place.masked_fill(ways.greedy, 0)
        chosen = top.indices.gather(1, place[:, None])[:, 0]
        return _or_none(chosen, top.lse), fits | ways.greedy | limited


def ranked(logits: Tensor, count: int, temperature: Tensor | float = 1.0) -> TopK:
    """The `count` likeliest tokens of each row with their log-probabilities, unchecked.

    Kernels rank up to `NUCLEUS` candidates; torch sorts the whole vocabulary.
    """
    return softmax_topk(
        logits,
        count,
        temperature=temperature,
        log_probs=True,
        check=False,
        impl="torch" if count > NUCLEUS else None,
    )


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token (B,) of each row, the lower of equal ones; `NO_TOKEN` if none."""
    best = softmax_topk(logits.float(), 1, check=False)
    return _or_none(best.indices[:, 0], best.lse)


def uniforms(seed: Tensor, number: Tensor) -> Tensor:
    """The number-th random number in [0, 1) of each seed, float64; the same on every device."""
    bits = _mixed(_mixed(seed) + number * _ODD)
    return _shifted(bits, 11).double() * 2.0**-53


#: Multipliers and shifts of splitmix64's finaliser, as signed 64-bit numbers that wrap around.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _mixed(x: Tensor) -> Tensor:
    x = x + _ODD
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift."""
    rest: int = (1 << (64 - by)) - 1
    return (x >> by) & rest


def _or_none(tokens: Tensor, lse: Tensor) -> Tensor:
    return tokens.masked_fill(~torch.isfinite(lse), NO_TOKEN)


def _as_tensors(ways: Sequence[Sampling], vocabulary: int, device: torch.device) -> SamplingTensors:
    def tensor(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingTensors(
        tensor([way.temperature or 1.0 for way in ways], torch.float32),
        tensor([way.is_greedy for way in ways], torch.bool),
        tensor([min(way.top_k or vocabulary, vocabulary) for way in ways], torch.int64),
        tensor([way.top_p for way in ways], torch.float64),
        tensor([way.min_p for way in ways], torch.float64),
        tensor([signed_seed(way.seed) for way in ways], torch.int64),
    )


def signed_seed(seed: int) -> int:
    """Any integer as a 64-bit one."""
    return (int(seed) + 2**63) % 2**64 - 2**63
