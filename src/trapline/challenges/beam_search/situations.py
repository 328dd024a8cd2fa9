"""What the traps share: tokens, prompts, one prompt against one table."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.table import Asked, Table

VOCABULARY = 9
BAD = (ValueError, TypeError)
#: Where the bugs of the blind corpus were seen.
BLIND = "an answer written from this prompt alone"


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Distinct token ids in random order."""
    return [int(t) for t in rng.permutation(VOCABULARY)[:count]]


def rising_tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Distinct token ids, the lower ones first, for where the order of ids decides."""
    return sorted(tokens(rng, count))


def prompt_of(rng: np.random.Generator, length: int = 3, first: int = 100) -> lm.Prefix:
    """A prompt of tokens that the model never generates, so that none of them is EOS."""
    return (first, *(int(t) for t in rng.integers(200, 300, length - 1)))


def one(
    submission: Submission,
    rng: np.random.Generator,
    table: Table,
    *,
    prompt: lm.Prefix | None = None,
    **settings: Any,
) -> Asked:
    """One prompt, one table, compared with the oracle."""
    prompt = prompt_of(rng) if prompt is None else prompt
    return lm.run_tables(submission, VOCABULARY, {prompt: table}, **settings)


def by_sum(
    submission: Submission, rng: np.random.Generator, table: Table, **settings: Any
) -> Asked:
    """`one`, with length_penalty = 0: a score is the sum of its log-probabilities."""
    return one(submission, rng, table, **settings, length_penalty=0.0)


def best(asked: Asked, hypothesis: list[int], score: float) -> None:
    """The first hypothesis of the first prompt is this one, with exactly this score."""
    expect.that(bool(asked.hypotheses[0]), "no hypothesis at all")
    got = asked.hypotheses[0][0]
    expect.that(got == (hypothesis, score), f"the best is {got}, expected {hypothesis} {score}")


def ordinary_search(submission: Submission, rng: np.random.Generator) -> None:
    """Two steps of W = 3 without ties, early stops, masked tokens or unusual arguments."""
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0, E: -5.0}, (A,): {E: -2.5}, (B,): {E: -1.0}}
    asked = one(submission, rng, table, beam_width=3, max_new_tokens=2, eos_id=E)
    best(asked, [B, E], -1.5)
