"""Arguments that several traps of the backward pass are built from."""

import numpy as np

from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import Saved, differentiates, draw, saved
from trapline.challenges.flash_attention_forward.cases import Shape, attends

#: Where the bugs of the blind corpus were seen.
BLIND = "an answer written from this prompt alone"
#: The forward challenge asks for the same forward pass.
BLIND_FORWARD = "an answer written from the prompt of the forward challenge alone"


def with_logits(
    rng: np.random.Generator, logits: list[float], T: int, causal: bool, width: int = 4
) -> Saved:
    """Arguments (one head, float64) whose scaled scores are logits[s] for each query.

    The scale of width 4 is ½, and one coordinate carries the logit. Of width 16 the root of the
    scale is a power of two as well: scores are exact where each of q and k is scaled by it.
    """
    S = len(logits)
    q, k = rng.standard_normal((1, 1, T, width)), np.zeros((1, 1, S, width))
    q[..., 0] = width**0.5
    k[0, 0, :, 0] = logits
    dout, v = rng.standard_normal((1, 1, T, width)), rng.standard_normal((1, 1, S, width))
    return saved(dout, q, k, v, causal)


def grouped(submission: Submission, rng: np.random.Generator) -> None:
    """Four query heads on two key heads."""
    differentiates(submission, draw(Shape(H=4, G=2, T=5, S=5), rng, False), tile=3)


def ordinary(submission: Submission, rng: np.random.Generator) -> None:
    """One head, four queries and keys, one tile, every key visible, float64; both passes."""
    arguments = draw(Shape(T=4, S=4), rng, False)
    attends(submission, *arguments[1:4], tile=4)
    differentiates(submission, arguments, tile=4)


def one_key(submission: Submission, rng: np.random.Generator) -> None:
    """One query and one key: the sum of the weights is 1."""
    attends(submission, *Shape(T=1, S=1).draw(rng), tile=4)


def both_passes(
    submission: Submission, rng: np.random.Generator, length: int, tile: int, *, causal: bool
) -> None:
    """A forward call and a backward one with the same inputs, as many keys as queries."""
    arguments = draw(Shape(T=length, S=length), rng, causal)
    attends(submission, *arguments[1:4], causal=causal, tile=tile)
    differentiates(submission, arguments, causal=causal, tile=tile)
