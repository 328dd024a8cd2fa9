"""Bugs of sampled verification."""

from typing import Any

import numpy as np

from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    float_type,
    refused,
)


def sampled(
    submission: Submission,
    tokens: list[int],
    parents: list[int],
    probs: list[list[float]],
    uniforms: list[float],
    want: tuple[list[int], int],
    dtype: Any = np.float64,
) -> None:
    law = np.array(probs, dtype=dtype)
    numbers = np.array(uniforms, dtype=dtype)
    tree = np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)
    table.same_verdict(submission.verify_sampled(*tree, law, numbers), want)


@trap(
    "biased-by-redrawing",
    catches="a child is accepted or rejected by a draw of its own instead of the node's one sample",
    severity="critical",
    story="Drawing anew for each child biases the output by more than a tenth in a small study, "
    "while looking like rejection sampling.",
)
def biased_by_redrawing(submission: Submission, rng: np.random.Generator) -> None:
    # Children 0 and 1 of the root; its sample says 2, whatever the children's numbers are.
    law = [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    small = float(rng.integers(1, 8)) / 64
    sampled(submission, [0, 1], [-1, -1], law, [0.75, small, small], ([], 2), float_type(rng))


@trap(
    "greedy-instead-of-sampled",
    catches="the pick is the most likely token, not the sample",
    severity="critical",
    story="Argmax matching at a temperature above 0: output that looks greedy.",
)
def greedy_instead(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    sampled(submission, [2], [-1], law, [0.875, 0.125], ([0], 0), float_type(rng))


@trap(
    "one-number-for-all",
    catches="the root's number decides at every node",
    severity="critical",
    story="Then the samples along a path are not independent.",
)
def one_number(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5], [0.5, 0.5]]
    sampled(submission, [0], [-1], law, [0.25, 0.75], ([0], 1), float_type(rng))


@trap(
    "numbers-by-depth",
    catches="the nodes of one depth share a number",
    severity="critical",
    story="The walk counts its steps and uses the count as an index.",
)
def numbers_by_depth(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5]] * 3
    sampled(submission, [0, 1], [-1, -1], law, [0.75, 0.25, 0.875], ([1], 1), float_type(rng))


@trap(
    "only-children-sampled",
    catches="the sample is drawn among the children's tokens only",
    severity="critical",
    story="What the drafter did not think of can then never be said.",
)
def only_children(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
    sampled(submission, [0], [-1], law, [0.625, 0.25], ([], 2), float_type(rng))


@trap(
    "sorted-by-probability",
    catches="the cumulative sum runs over tokens sorted by probability",
    severity="major",
    story="How top-p is written; the contract goes by token order.",
)
def sorted_by_probability(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.125, 0.25, 0.625]]
    sampled(submission, [], [], law, [0.25], ([], 1), float_type(rng))


@trap(
    "boundary-belongs-below",
    catches="a number equal to a cumulative probability picks the token below it",
    severity="minor",
    story="`searchsorted` from the left: reaching is not exceeding.",
)
def boundary(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.25, 0.5], [0.5, 0.5, 0.0]]
    sampled(submission, [1], [-1], law, [0.25, 0.5], ([0], 1), float_type(rng))


@trap(
    "impossible-token-at-zero",
    catches="the number 0 picks a first token of probability 0",
    severity="major",
    story="A number of exactly 0 comes once in sixteen million draws and says the unsayable.",
)
def impossible_at_zero(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.0, 0.0, 0.5, 0.5]]
    sampled(submission, [], [], law, [0.0], ([], 2), float_type(rng))


TENTHS = [0.1] * 10 + [0.0, 0.0]
ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@trap(
    "rounding-falls-off-the-end",
    catches="when rounding leaves the total below the number, an impossible token is picked",
    severity="major",
    story="Ten times 0.1 is less than 1 in binary; a clipped or wrapped index says an impossible "
    "token.",
)
def off_the_end(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [], [], [TENTHS], [ALMOST_ONE], ([], 9))


@trap(
    "rounding-starts-again",
    catches="when rounding leaves the total below the number, the first token is picked",
    severity="major",
    story="argmax over an all-false array is 0.",
)
def starts_again(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [9], [-1], [TENTHS, TENTHS], [ALMOST_ONE, 0.0], ([0], 0))


@trap(
    "bad-laws-accepted",
    catches="negative or NaN probabilities, or numbers outside [0, 1), are accepted",
    severity="minor",
    story="A number of exactly 1 comes from rounding to float32, and exceeds every sum.",
)
def bad_laws(submission: Submission, rng: np.random.Generator) -> None:
    tokens, parents = np.array([1]), np.array([-1])
    law = np.array([[0.5, 0.5], [0.5, 0.5]])
    place = int(rng.integers(2)), int(rng.integers(2))
    for bad in (-0.25, np.nan):
        spoilt = law.copy()
        spoilt[place] = bad
        fair = np.array([0.25, 0.25])
        refused(submission, "verify_sampled", tokens, parents, spoilt, fair)
    for number in (1.0, -0.125, np.nan):
        spoilt = np.array([0.25, 0.25])
        spoilt[place[0]] = number
        refused(submission, "verify_sampled", tokens, parents, law, spoilt)
    one = np.array([0.25])
    refused(submission, "verify_sampled", tokens, parents, law, one)
