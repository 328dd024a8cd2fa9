"""The contract of fused_softmax_topk, and its measures."""

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trapline.arena.judge import expect
from trapline.arena.judge.remembered import remembered
from trapline.arena.judge.traps import Call, Precision, case, robustness
from trapline.arena.process.proxy import Submission
from trapline.gold.softmax_topk import oracle

Rng = np.random.Generator
Array = np.ndarray
softmax_topk = remembered(oracle.softmax_topk)
DTYPES = (np.float16, np.float32, np.float64)
REFUSAL = (ValueError, TypeError)
#: Longer than any likely tile, and not a multiple of one.
LONG = 40009
#: Rows whose answers are checked where memory is measured.
CHECKED_ROWS = 64


def logits_of(rng: Rng, shape: tuple[int, int], dtype: Any = np.float64) -> Array:
    """Logits as a model gives them: spread over a few units, no two of them equal in float64."""
    return (3.0 * rng.standard_normal(shape)).astype(dtype)


def check(answer: Any, logits: Array, k: int) -> None:
    """The answer is right for these logits."""
    probs, indices = pair(answer)
    want = softmax_topk(logits, k)
    indices = expect.array(indices, shape=(len(logits), k), dtype=np.int64, what="indices")
    probs = expect.array(probs, shape=(len(logits), k), dtype=logits.dtype, what="probs")
    expect.equal(indices, want.indices, "indices")
    info = np.finfo(logits.dtype)
    slack = _relative_slack(logits, want.indices) * want.probs
    # Below the smallest normal number a probability may be rounded or flushed to 0; float16 is
    # computed in something wider, where this does not happen.
    flushed = info.smallest_subnormal if logits.dtype == np.float16 else info.smallest_normal
    distance = np.abs(probs.astype(np.float64) - want.probs)
    good = distance <= slack + 2 * float(flushed)
    if not np.all(good):
        row, place = (int(i) for i in np.argwhere(~good)[0])
        got, exact = probs[row, place], want.probs[row, place]
        expect.that(False, f"probs[{row}, {place}] is {got}, expected {exact:.9g}")


def _relative_slack(logits: Array, indices: Array) -> Array:
    """What a sound algorithm may lose: rounding x − m, the exponential, and the sum.

    float16 is computed in float32 or better, so only the last rounding is its own.
    """
    wide = logits.astype(np.float64)
    inner = np.finfo(np.float64 if logits.dtype == np.float64 else np.float32).eps
    with np.errstate(over="ignore", invalid="ignore"):
        distance = wide.max(axis=1, keepdims=True, initial=-np.inf) - np.take_along_axis(
            wide, indices, axis=1
        )
    distance = np.minimum(np.nan_to_num(distance, posinf=1e4), 1e4)
    roundings = 32 + 2 * distance + 4 * np.sqrt(logits.shape[1])
    return np.asarray(inner * roundings + np.finfo(logits.dtype).eps)


def pair(answer: Any) -> tuple[Any, Any]:
    """The answer is a pair."""
    expect.that(
        isinstance(answer, tuple | list) and len(answer) == 2,
        "softmax_topk did not return (probs, indices)",
    )
    return answer[0], answer[1]


def ask(submission: Submission, logits: Array, k: int) -> None:
    """The submission's answer to these logits is right."""
    check(submission.softmax_topk(logits, k), logits, k)


def overlapping(rng: Rng, rows: int, vocabulary: int, dtype: Any = np.float32) -> Array:
    """(N, V) logits that take N + V numbers to hold: row i is row 0 moved by i.

    The same two numbers lead every row by far, so that the best two do not depend on rounding.
    """
    base = (3.0 * rng.standard_normal(rows + vocabulary - 1)).astype(dtype)
    base[rng.choice(np.arange(rows - 1, vocabulary), 2, replace=False)] = 24.0, 20.0
    return sliding_window_view(base, vocabulary)


def judged(entry: str, answer: Any) -> Any:  # noqa: ARG001 - there is one entry
    """What two answers are compared by: not how a submission left its arguments."""
    observed = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], tuple)
    return answer[0] if observed else answer


@case
def matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        for rows, vocabulary, k in ((3, 10, 4), (1, 1, 1), (2, 257, 31), (5, 64, 64)):
            ask(submission, logits_of(rng, (rows, vocabulary), dtype), k)


@case
def large_vocabulary(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 50257), np.float32), 50)


@case
def probabilities_sum_to_one(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (4, 300))
    probs, indices = pair(submission.softmax_topk(logits, 300))
    expect.array(probs, shape=(4, 300), dtype=np.float64, what="probs")
    expect.close(probs.sum(axis=1), np.ones(4), atol=1e-12, what="the sum of all probabilities")
    everywhere = np.broadcast_to(np.arange(300), (4, 300))
    expect.equal(np.sort(indices, axis=1), np.array(everywhere), "the sorted indices")


@case
def a_shift_changes_nothing(submission: Submission, rng: Rng) -> None:
    """Integers plus a power of two: the shifted logits are exact, and so is the ranking."""
    logits = rng.integers(-20, 20, (3, 40)).astype(np.float64)
    for shift in (0.0, 2.0**20, -(2.0**40)):
        check(submission.softmax_topk(logits + shift, 12), logits, 12)


@case
def rows_are_independent(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (6, 50)) * np.array([1.0, 100.0, 1e-3, 30.0, 0.0, 5.0])[:, None]
    order = rng.permutation(6)
    ask(submission, logits, 7)
    ask(submission, logits[order], 7)


@case
def equal_logits_in_index_order(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, rng.integers(-2, 3, (4, 60)).astype(dtype), 25)


@case
def minus_infinity_has_probability_zero(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (3, 20), dtype)
        logits[:, rng.permutation(20)[:15]] = -np.inf
        ask(submission, logits, 9)


@case
def no_rows(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, logits_of(rng, (0, 7), dtype), 3)


@robustness
def bad_input_is_refused(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (3, 6))
    for k in (0, -1, 7):
        expect.raises(ValueError, submission.softmax_topk, logits, k)
    for bad in (np.nan, np.inf):
        wrong = logits.copy()
        wrong[1, 4] = bad
        expect.raises(ValueError, submission.softmax_topk, wrong, 2)
    wrong = logits.copy()
    wrong[2] = -np.inf
    expect.raises(ValueError, submission.softmax_topk, wrong, 2)
    for other in (logits[0], logits.astype(np.int64), logits.astype(np.complex128)):
        expect.raises(REFUSAL, submission.softmax_topk, other, 2)


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32 and float16 over a vocabulary of real size."""
    measured = []
    for dtype in (np.float32, np.float16):
        logits = logits_of(rng, (4, 20000), dtype)
        probs, _ = pair(submission.softmax_topk(logits, 40))
        want = oracle.softmax_topk(logits, 40)
        measured.append(Precision(probs, want.probs, _careful(logits, want.indices)))
    return measured


def _careful(logits: Array, indices: Array) -> Array:
    """Max first, then a pairwise sum, in float32."""
    wide = logits.astype(np.float32)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    probs = np.take_along_axis(weights, indices, axis=1) / weights.sum(axis=1, keepdims=True)
    return np.asarray(probs.astype(logits.dtype))


def speed(submission: Submission, rng: Rng) -> Call:  # noqa: ARG001 - needs no set-up
    """Eight rows of a large vocabulary."""
    logits = logits_of(rng, (8, 32000), np.float32)
    return Call("softmax_topk", (logits, 50), check=lambda answer: check(answer, logits, 50))


def memory(submission: Submission, rng: Rng, size: int) -> Call:  # noqa: ARG001 - as above
    """N and V grow together: N · V as size², an answer and a tile hardly at all.

    The rows overlap in memory, so that what arrives stays small. Some of them are checked.
    """
    logits = overlapping(rng, size, 4 * size)
    rows = rng.choice(size, min(size, CHECKED_ROWS), replace=False)

    def check_some(answer: Any) -> None:
        probs, indices = pair(answer)
        indices = expect.array(indices, shape=(size, 8), dtype=np.int64, what="indices")
        probs = expect.array(probs, shape=(size, 8), dtype=logits.dtype, what="probs")
        check((probs[rows], indices[rows]), logits[rows], 8)

    return Call("softmax_topk", (logits, 8), check=check_some)
