"""Batched beam search: what is accepted, and the loop over steps."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from trapline.gold import checks
from trapline.gold.beam_search.policy import CANONICAL, Policy, Rules
from trapline.gold.beam_search.search import Hypothesis, Search
from trapline.gold.errors import DTypeError, RangeError, ShapeError

_NO_LIMIT = 2**62


class LanguageModel(Protocol):
    """Anything that knows the log-probabilities of next tokens."""

    def log_probs(self, prefixes: list[list[int]]) -> Any:
        """Log-probabilities (n, V) of every next token after each of n prefixes."""


def beam_search(
    lm: LanguageModel,
    prompts: Iterable[Sequence[int]],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int,
    length_penalty: float = 1.0,
    policy: Policy = CANONICAL,
) -> list[list[Hypothesis]]:
    """Up to `beam_width` continuations of every prompt, best first.

    A hypothesis is (tokens without the prompt, score); its score is the sum of its
    log-probabilities over n^length_penalty, n counting the generated tokens with the end. The model
    is called once a step for the live beams of all prompts; a prompt that has stopped is not asked
    about again.
    """
    checks.integer_between(1, _NO_LIMIT, beam_width=beam_width, max_new_tokens=max_new_tokens)
    checks.integer_between(0, _NO_LIMIT, eos_id=eos_id)
    if not math.isfinite(length_penalty):
        raise RangeError(f"length_penalty must be finite, got {length_penalty}")
    rules = Rules(beam_width, max_new_tokens, eos_id, float(length_penalty), policy)
    searches = [Search(_tokens(prompt), rules) for prompt in prompts]
    while running := [search for search in searches if not search.is_over]:
        _step(lm, running, eos_id)
    return [search.hypotheses() for search in searches]


def _step(lm: LanguageModel, running: list[Search], eos_id: int) -> None:
    """One call for all live beams; every search takes as many rows as it has beams."""
    groups = [search.prefixes() for search in running]
    log_probs = _answer(lm, [prefix for group in groups for prefix in group], eos_id)
    ends = np.cumsum([len(group) for group in groups])
    for search, rows in zip(running, np.split(log_probs, ends[:-1]), strict=True):
        search.advance(rows)


def _answer(lm: LanguageModel, prefixes: list[list[int]], eos_id: int) -> np.ndarray:
    log_probs = np.asarray(lm.log_probs(prefixes), dtype=np.float64)
    if log_probs.ndim != 2 or log_probs.shape[0] != len(prefixes):
        raise ShapeError(f"log_probs gave {log_probs.shape} for {len(prefixes)} prefixes")
    if eos_id >= log_probs.shape[1]:
        raise RangeError(f"eos_id {eos_id} is outside a vocabulary of {log_probs.shape[1]}")
    if not (log_probs < np.inf).all():
        raise RangeError("log_probs gave NaN or +inf")
    return log_probs


def _tokens(prompt: Sequence[int]) -> list[int]:
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise DTypeError(f"a prompt must be made of ints, got {token!r}")
    return [int(token) for token in prompt]
