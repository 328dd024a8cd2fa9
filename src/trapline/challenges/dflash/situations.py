"""What the traps share: tokens, dtypes, refusals."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.gold.tree_decoding import oracle

VOCABULARY = 7
#: Where a bug of the blind corpus was seen.
WRITTEN = "an answer written from this prompt alone"
BAD = (ValueError, TypeError)


def distinct(rng: np.random.Generator, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Different token ids in random order."""
    return [int(t) for t in rng.permutation(vocabulary)[:count]]


def rising(rng: np.random.Generator, count: int) -> list[int]:
    """Different token ids, lower ones first, for where the order of ids decides."""
    return sorted(distinct(rng, count))


def refused(submission: Submission, entry: str, *args: Any, **settings: Any) -> None:
    """The call raises ValueError or TypeError."""
    expect.raises(BAD, submission.call, entry, args, settings)


def float_type(rng: np.random.Generator) -> Any:
    return np.float32 if rng.integers(2) else np.float64


def cache(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Keys or values of this shape."""
    return rng.standard_normal(shape).astype(float_type(rng))


def story_of(
    rng: np.random.Generator, length: int = 12
) -> tuple[tuple[int, ...], list[int], int, oracle.Law]:
    """A prompt, the target's continuation, an EOS that it does not generate, and the target."""
    eos = int(rng.integers(VOCABULARY)) or 1  # an EOS of id 0 has a trap of its own
    others = [token for token in range(VOCABULARY) if token != eos]
    prompt = tuple(int(rng.choice(others)) for _ in range(3))
    script = [int(rng.choice(others)) for _ in range(length)]
    return prompt, script, eos, table.scripted_law(VOCABULARY, prompt, script)
