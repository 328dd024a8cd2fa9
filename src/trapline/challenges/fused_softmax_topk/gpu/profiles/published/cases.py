"""The published prompt for a fused CUDA kernel: what its words promise, and no more.

It names no order of the winners, no rule for ties and no range of k. So winners are compared as a
set, ties may go either way, and k is 32, which every published launcher offers.
"""

from typing import Any

import numpy as np

from trapline.arena.gpu.checks import Rng
from trapline.arena.gpu.contract import Entry, Output
from trapline.arena.judge import expect
from trapline.arena.judge.traps import case
from trapline.arena.process.proxy import Submission

Array = np.ndarray
K = 32
#: Relative error of a probability: float32, and sums in any order.
TOLERANCE = 1e-4


def _outputs(logits: Array, k: int) -> tuple[Output, ...]:
    shape = (*logits.shape[:2], k)
    return Output(shape, "float32"), Output(shape, "int64")


ENTRIES = {"softmax_topk": Entry(_outputs)}


def logits_of(rng: Rng, *shape: int) -> Array:
    return (3.0 * rng.standard_normal(shape)).astype(np.float32)


def check(answer: Any, logits: Array) -> None:
    """The indices are those of the k largest logits, each with its probability."""
    probs, indices = answer
    V = logits.shape[-1]
    expect.that(
        bool(np.all((indices >= 0) & (indices < V))),
        f"an index is {_first_outside(indices, V)}; the vocabulary has {V} entries",
    )
    ordered = np.sort(indices, axis=-1)
    expect.that(bool(np.all(ordered[..., 1:] != ordered[..., :-1])), "an index comes twice")
    wide = logits.astype(np.float64)
    chosen = np.take_along_axis(wide, indices, axis=-1)
    least = np.sort(wide, axis=-1)[..., -K]
    below = np.argwhere(chosen.min(axis=-1) < least)
    expect.that(
        not len(below),
        f"{len(below)} of {least.size} rows hold an entry that is not among the {K} largest",
    )
    weights = np.exp(wide - wide.max(axis=-1, keepdims=True))
    right = np.take_along_axis(weights / weights.sum(axis=-1, keepdims=True), indices, axis=-1)
    off = np.abs(probs - right) > TOLERANCE * right + 1e-30
    expect.that(
        not np.any(off) and bool(np.all(np.isfinite(probs))),
        f"{np.count_nonzero(off | ~np.isfinite(probs))} of {off.size} probabilities are off by "
        f"more than {TOLERANCE:g} of their value",
    )


def _first_outside(indices: Array, V: int) -> int:
    outside = indices[(indices < 0) | (indices >= V)]
    return int(outside[0]) if outside.size else 0


def ask(submission: Submission, logits: Array) -> None:
    check(submission.softmax_topk(logits, K), logits)


@case
def one_row(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, 1, 1, 1024))


@case
def batch_and_time(submission: Submission, rng: Rng) -> None:
    for _ in range(2):  # the same shape, other values
        ask(submission, logits_of(rng, 2, 3, 1000))


@case
def large_vocabulary(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, 2, 2, 50257))
