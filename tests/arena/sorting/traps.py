"""The traps of the sorting challenge."""

import numpy as np

from sorting.cases import check
from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Stub, Submission

# Lines of the gold solution that several mutants edit.
ANSWER = "    return np.take_along_axis(x, order, axis=1), order"


@trap(
    catches="equal elements in any order",
    severity="critical",
    story="Quicksort is the default and keeps no order.",
    mutant=edits(
        ("keys = -x if descending else x", "keys = -x if descending else x[:, ::-1]"),
        (ANSWER, f"    order = order if descending else x.shape[1] - 1 - order\n{ANSWER}"),
    ),
)
def unstable(submission: Submission, rng: np.random.Generator) -> None:
    x = rng.integers(0, 3, (3, 200)).astype(np.float64)
    check(submission.sort_rows(x), x)


@trap(
    catches="descending by turning the ascending order round",
    severity="major",
    story="Turning round also turns equal elements round.",
    mutant=edits(
        ("keys = -x if descending else x", "keys = x"),
        (".astype(np.int64)", ".astype(np.int64)[:, :: -1 if descending else 1]"),
    ),
)
def reversed_descending(submission: Submission, rng: np.random.Generator) -> None:
    x = np.array([[1.0, 1.0, 2.0, 2.0]])
    check(submission.sort_rows(x, descending=True), x, descending=True)


@trap(
    catches="sorting in place",
    severity="major",
    story="An in-place sort is shorter and destroys what it was given.",
    mutant=edit(ANSWER, "    x[:] = np.sort(x, axis=1)\n    return x, order"),
)
def modifies_input(submission: Submission, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 30))
    _, (after,) = submission.observe("sort_rows", x)
    expect.equal(after, x, "the input afterwards")


@trap(
    catches="one call of the key for each item",
    severity="minor",
    story="A call a comparison costs more than the sort.",
    mutant=edit("np.asarray(key(items))", "np.asarray([key([item])[0] for item in items])"),
)
def key_called_often(submission: Submission, rng: np.random.Generator) -> None:
    key = Stub(lambda items: np.asarray(items))
    submission.sort_by(key, [3, 1, 2])
    expect.that(len(key.calls) == 1, f"the key was called {len(key.calls)} times")


@trap(
    catches="an order kept from an earlier call of the same shape",
    severity="critical",
    story="A memo keyed by shape answers the second question with the first answer.",
    mutant=edits(
        ("import numpy as np\n", "import numpy as np\n\nKEPT = {}\n"),
        (ANSWER, f"    order = KEPT.setdefault((x.shape, descending), order)\n{ANSWER}"),
    ),
)
def remembers_a_shape(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(3):
        x = rng.standard_normal((2, 17))
        check(submission.sort_rows(x), x)
