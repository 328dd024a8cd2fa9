"""Chooses next tokens for a batch: greedy, or sampled with temperature, top-k, top-p and min-p.

Every row has its own settings and random numbers: the n-th number of a seed is a hash of (seed, n),
computed on the device. So a row's text does not depend on the rest of the batch, there is no
generator state, and nothing waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trapline.gold import checks
from trapline.gold.decoder.penalties import BatchPenalties, History
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.softmax_topk.api import SMALLEST_TEMPERATURE, TopK, softmax_topk

#: Candidates that almost always contain the nucleus; where they do not, all are ranked.
NUCLEUS = 1024
#: Returned instead of a token if a row's logits have no softmax.
NO_TOKEN = -1
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Sampling:
    """Settings of one row; temperature 0 is greedy, ties go to the lower token.

    `logit_bias` is added to the logits of single tokens (−inf bans one). `repetition_penalty`
    divides positive logits and multiplies negative ones of all tokens of prompt and answer.
    `presence_penalty` is subtracted from the logit of every token of the answer,
    `frequency_penalty` once for each time that it occurs there.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
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
        checks.integers(seed=self.seed, top_k=0 if self.top_k is None else self.top_k)
        if self.top_k is not None and self.top_k < 1:
            raise RangeError(f"top_k must be at least 1, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise RangeError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise RangeError(f"min_p must be in [0, 1], got {self.min_p}")
        self._check_penalties()

    def _check_penalties(self) -> None:
        for name in PENALTIES:
            if not math.isfinite(value := getattr(self, name)):
                raise RangeError(f"{name} must be finite, got {value}")
        if self.repetition_penalty <= 0.0:
            raise RangeError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the text so far."""
        return tuple(getattr(self, name) for name in PENALTIES) != (1.0, 0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        return self.has_penalties or bool(self.logit_bias)

    @property
    def without_penalties(self) -> "Sampling":
        """The same draw, for logits that are changed already."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, Mapping):
        raise DTypeError(f"logit_bias must map token ids to numbers, got {bias!r}")
    for token, value in bias.items():
        checks.integers(**{"a token of logit_bias": token})
        if not isinstance(value, Real) or math.isnan(value) or value == math.inf:
            raise RangeError(f"logit_bias of token {token} must be finite or −inf, got {value!r}")


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


class Logprobs(NamedTuple):
    """Log-probabilities of a batch: of the chosen tokens (B,), and of the likeliest ones (B, k)."""

    chosen: Tensor
    top: Tensor
    top_tokens: Tensor


class TokenSampler:
    """Chooses tokens for the rows of one fixed batch.

    Penalties need the `histories` of all rows; the sampler adds each token that it chooses. With
    `logprobs`, the number of likeliest tokens, `latest` has the model's log-probabilities of the
    latest choice: before bias, penalties and temperature.
    """

    def __init__(
        self,
        ways: Sequence[Sampling],
        vocabulary: int,
        device: torch.device,
        *,
        histories: Sequence[History] = (),
        logprobs: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._candidates = max((self._needed(way) for way in ways), default=1)
        #: Whether a nucleus may exceed the candidates; only then the result is checked.
        self._uncertain = any(
            not way.is_greedy and way.top_k is None and self._needed(way) < vocabulary
            for way in ways
        )
        self._ways = _as_tensors(ways, vocabulary, device)
        self._penalties: BatchPenalties | None = None
        if any(way.changes_logits for way in ways):
            self._penalties = BatchPenalties(ways, histories, vocabulary, device)
        self._logprobs = logprobs
        self.latest: Logprobs | None = None
        self._all_greedy = all(way.is_greedy for way in ways)

    def __len__(self) -> int:
        return len(self._ways.seed)

    @property
    def is_argmax(self) -> bool:
        """Whether every choice is the likeliest token and nothing else is asked."""
        return self._all_greedy and self._penalties is None and self._logprobs is None

    def __call__(self, logits: Tensor, made: Tensor) -> Tensor:
        """Next tokens (B,) for logits (B, V), `made` (B,) tokens after the prompt.

        `NO_TOKEN` where a row has NaN or +inf or only −inf, so that callers need no extra check.
        """
        changed = logits if self._penalties is None else self._penalties(logits)
        chosen = self._choose(changed, made)
        if self._penalties is not None:
            self._penalties.count(chosen)
        if self._logprobs is not None:
            self.latest = _logprobs(logits.float(), chosen, min(self._logprobs, self._vocabulary))
        return chosen

    def _choose(self, logits: Tensor, made: Tensor) -> Tensor:
        if self._all_greedy:
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


def _logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    top = ranked(logits, max(count, 1))
    own = logits.gather(1, chosen.clamp(min=0)[:, None])[:, 0] - top.lse
    return Logprobs(own, top.values[:, :count], top.indices[:, :count])


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
