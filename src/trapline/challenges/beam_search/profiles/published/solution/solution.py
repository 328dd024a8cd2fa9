"""Beam search in which finished and live beams share the places by length-penalised score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Beam:
    """A continuation that holds a place."""

    tokens: tuple[int, ...]
    total: float
    ended: bool

    def score(self, penalty: float) -> float:
        """The sum of log-probabilities over the number of generated tokens to the penalty."""
        length = len(self.tokens)
        return self.total / length**penalty


def beam_search(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int,
    length_penalty: float = 0.6,
) -> list[list[tuple[list[int], float]]]:
    """The beams that hold the places of each prompt in the end, best first."""
    return [
        _search(lm, list(prompt), beam_width, max_new_tokens, eos_id, length_penalty)
        for prompt in prompts
    ]


def _search(
    lm: Any, prompt: list[int], width: int, steps: int, eos_id: int, penalty: float
) -> list[tuple[list[int], float]]:
    beams = [Beam((), 0.0, False)]
    for _ in range(steps):
        live = [beam for beam in beams if not beam.ended]
        if not live:
            break
        pool = [beam for beam in beams if beam.ended]
        rows = np.asarray(lm.log_probs([prompt + list(beam.tokens) for beam in live]))
        for beam, row in zip(live, rows, strict=True):
            pool += _continued(beam, row, 2 * width, eos_id)
        pool.sort(key=lambda beam: -beam.score(penalty))
        beams = pool[:width]
    ranked = sorted(beams, key=lambda beam: -beam.score(penalty))
    return [(list(beam.tokens), beam.score(penalty)) for beam in ranked if beam.tokens]


def _continued(beam: Beam, row: np.ndarray, count: int, eos_id: int) -> list[Beam]:
    """The most likely continuations of a live beam."""
    best = np.argsort(-row, kind="stable")[:count].tolist()
    return [
        Beam((*beam.tokens, token), beam.total + float(row[token]), token == eos_id)
        for token in best
    ]
