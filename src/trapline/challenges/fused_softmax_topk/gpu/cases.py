"""The contract of fused_softmax_topk on the GPU, and its measures."""

from typing import Any

import numpy as np

from trapline.arena.gpu.checks import FLOAT32_EPS, Rng, near, noise, padded, repeats_bit_for_bit
from trapline.arena.gpu.contract import Entry, Output, Timed, dtype_name, rounded
from trapline.arena.judge import expect
from trapline.arena.judge.traps import Precision, case
from trapline.arena.process.proxy import Submission
from trapline.gold.softmax_topk import oracle

Array = np.ndarray
DTYPES = ("float32", "float16")
#: Not a multiple of any power of two, and longer than what one program holds.
LONG = 5003


def _outputs(logits: Array, k: int) -> tuple[Output, ...]:
    shape = (len(logits), k)
    return Output(shape, dtype_name(logits)), Output(shape, "int64")


ENTRIES = {"softmax_topk": Entry(_outputs)}


def logits_of(rng: Rng, shape: tuple[int, int], dtype: str = "float32") -> Array:
    """Logits as a model gives them: spread over a few units."""
    return rounded(3.0 * rng.standard_normal(shape), dtype)


def check(answer: Any, logits: Array, k: int) -> None:
    """The answer is right for these logits."""
    probs, indices = answer
    want = oracle.softmax_topk(logits, k)
    expect.equal(indices, want.indices, "indices")
    wide = np.asarray(logits, np.float64)
    best = wide.max(axis=1, keepdims=True, initial=-np.inf)
    distance = np.minimum(best - np.take_along_axis(wide, want.indices, axis=1), 1e4)
    # Rounding x − max, the exponential, and the sum.
    inner = FLOAT32_EPS * (32 + 2 * distance + 4 * np.sqrt(logits.shape[1]))
    near(probs, want.probs, dtype=dtype_name(logits), slack=inner * want.probs, what="probs")


def ask(submission: Submission, logits: Array, k: int) -> None:
    """The submission's answer to these logits is right."""
    check(submission.softmax_topk(logits, k), logits, k)


@case
def matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        for rows, vocabulary, k in ((3, 10, 4), (1, 1, 1), (1, 257, 7), (1, 16, 16)):
            ask(submission, logits_of(rng, (rows, vocabulary), dtype), k)


@case
def matches_float64_in_bfloat16(submission: Submission, rng: Rng) -> None:
    for rows, vocabulary, k in ((3, 10, 4), (2, 257, 31), (2, 50257, 64)):
        ask(submission, logits_of(rng, (rows, vocabulary), "bfloat16"), k)


@case
def large_vocabulary(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, LONG)), 8)
    ask(submission, logits_of(rng, (1, 50257)), 2)


@case
def the_largest_k(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (1, 300)), 256)
    ask(submission, logits_of(rng, (1, 256)), 256)


@case
def rows_are_independent(submission: Submission, rng: Rng) -> None:
    scales = np.array([1.0, 100.0, 1e-3, 30.0], np.float32)[:, None]
    ask(submission, logits_of(rng, (4, 50)) * scales, 7)


@case
def equal_logits_in_index_order(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, rounded(rng.integers(-2, 3, (2, 200)), dtype), 25)


@case
def minus_infinity_has_probability_zero(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (2, 20), dtype)
        logits[:, rng.permutation(20)[:15]] = -np.inf
        ask(submission, logits, 9)


@case
def padded_rows(submission: Submission, rng: Rng) -> None:
    ask(submission, padded(logits_of(rng, (3, 37))), 5)
    ask(submission, padded(logits_of(rng, (2, 64), "float16"), 8), 5)


@case
def no_rows(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (0, 7)), 3)


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    repeats_bit_for_bit(submission, "softmax_topk", logits_of(rng, (2, 3001)), 16)


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32 and float16 over a vocabulary of real size."""
    measured = []
    for dtype in DTYPES:
        logits = logits_of(rng, (8, 4 * LONG), dtype)
        probs, _ = submission.softmax_topk(logits, 40)
        want = oracle.softmax_topk(logits, 40)
        measured.append(Precision(probs, want.probs, _careful(logits, want.indices)))
    return measured


def _careful(logits: Array, indices: Array) -> Array:
    """Max first, then a pairwise sum, in float32."""
    wide = logits.astype(np.float32)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    probs = np.take_along_axis(weights, indices, axis=1) / weights.sum(axis=1, keepdims=True)
    return np.asarray(probs.astype(logits.dtype))


def _timed(rows: int, vocabulary: int, k: int) -> Timed:

    def make(rng: Rng) -> tuple[Any, ...]:
        return noise(rng, (rows, vocabulary), "float32", scale=3.0), k

    return Timed(
        name=f"{rows}×{vocabulary} float32, k {k}",
        entry="softmax_topk",
        make=make,
        light={
            "read": 4.0 * rows * vocabulary,
            "write": 12.0 * rows * k,
            # Two maxima, a difference, its scale, an exponential, a sum.
            "vector": 6.0 * rows * vocabulary,
        },
    )


def timed() -> list[Timed]:
    """A large batch, a large vocabulary, a few rows.

    In float32 there are hardly any ties, which torch breaks in any order.
    """
    return [
        _timed(2048, 32000, 64),
        _timed(256, 128256, 50),
        _timed(32, 50257, 8),
    ]
