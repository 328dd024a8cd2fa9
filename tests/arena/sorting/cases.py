"""The contract of the sorting challenge."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Call, Precision, case
from trapline.arena.process.proxy import Stub, Submission


def sorted_rows(x: np.ndarray, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The slow and obvious way."""
    order = np.zeros(x.shape, np.int64)
    for i, row in enumerate(x.tolist()):
        keys = [-value for value in row] if descending else row
        order[i] = sorted(range(len(row)), key=keys.__getitem__)
    return np.take_along_axis(x, order, axis=1), order


def check(answer: object, x: np.ndarray, descending: bool = False) -> None:
    """The answer is the pair that the slow way gives."""
    values, order = sorted_rows(x, descending)
    expect.that(isinstance(answer, tuple) and len(answer) == 2, "not a pair")
    expect.equal(answer[0], values, "values")
    expect.equal(answer[1], order, "order")


@case
def rows(submission: Submission, rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float64):
        x = rng.standard_normal((5, 40)).astype(dtype)
        check(submission.sort_rows(x), x)
        check(submission.sort_rows(x, descending=True), x, descending=True)


@case
def empty(submission: Submission, rng: np.random.Generator) -> None:
    for shape in ((0, 3), (3, 0)):
        check(submission.sort_rows(np.zeros(shape)), np.zeros(shape))


@case
def refuses_other_ranks(submission: Submission, rng: np.random.Generator) -> None:
    expect.raises(ValueError, lambda: submission.sort_rows(np.zeros(3)))
    expect.raises(ValueError, lambda: submission.sort_rows(np.zeros((2, 3, 4))))


@case
def by_key(submission: Submission, rng: np.random.Generator) -> None:
    items = rng.integers(0, 100, 20).tolist()
    key = Stub(lambda items: np.asarray([item % 7 for item in items]))
    answer = submission.sort_by(key, items)
    expect.equal(answer, sorted(items, key=lambda item: item % 7), "items")


def precision(submission: Submission, rng: np.random.Generator) -> list[Precision]:
    x = rng.standard_normal((4, 50)).astype(np.float32)
    values, _ = submission.sort_rows(x)
    return [Precision(values, np.sort(x.astype(np.float64), axis=1), np.sort(x, axis=1))]


def speed(submission: Submission, rng: np.random.Generator) -> Call:
    x = rng.standard_normal((60, 500))
    return Call("sort_rows", (x,), check=lambda answer: check(answer, x))


def memory(submission: Submission, rng: np.random.Generator, size: int) -> Call:
    x = rng.standard_normal((2, size // 2))
    return Call("sort_rows", (x,), check=lambda answer: expect.equal(answer[0], np.sort(x)))
