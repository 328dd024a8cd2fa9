"""The traps of the sorting challenge."""

import numpy as np

from sorting.cases import check
from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Stub, Submission


@trap(
    "unstable",
    catches="equal elements in any order",
    severity="critical",
    story="Quicksort is the default and keeps no order.",
)
def unstable(submission: Submission, rng: np.random.Generator) -> None:
    x = rng.integers(0, 3, (3, 200)).astype(np.float64)
    check(submission.sort_rows(x), x)


@trap(
    "reversed-descending",
    catches="descending by turning the ascending order round",
    severity="major",
    story="Turning round also turns equal elements round.",
)
def reversed_descending(submission: Submission, rng: np.random.Generator) -> None:
    x = np.array([[1.0, 1.0, 2.0, 2.0]])
    check(submission.sort_rows(x, descending=True), x, descending=True)


@trap(
    "modifies-input",
    catches="sorting in place",
    severity="major",
    story="An in-place sort is shorter and destroys what it was given.",
)
def modifies_input(submission: Submission, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 30))
    _, (after,) = submission.observe("sort_rows", x)
    expect.equal(after, x, "the input afterwards")


@trap(
    "key-called-often",
    catches="one call of the key for each item",
    severity="minor",
    story="A call a comparison costs more than the sort.",
)
def key_called_often(submission: Submission, rng: np.random.Generator) -> None:
    key = Stub(lambda items: np.asarray(items))
    submission.sort_by(key, [3, 1, 2])
    expect.that(len(key.calls) == 1, f"the key was called {len(key.calls)} times")


@trap(
    "remembers-a-shape",
    catches="an order kept from an earlier call of the same shape",
    severity="critical",
    story="A memo keyed by shape answers the second question with the first answer.",
)
def remembers_a_shape(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(3):
        x = rng.standard_normal((2, 17))
        check(submission.sort_rows(x), x)
