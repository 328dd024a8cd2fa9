"""Bugs of sampled verification."""

from typing import Any

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    WRITTEN,
    float_type,
)

# Parts of the gold solution that several mutants edit.
PICKS = "    choices = [pick(row, uniform) for row, uniform in zip(probs, uniforms, strict=True)]\n"
EXCEEDING = "    exceeding = np.flatnonzero(np.cumsum(row) > uniform)\n"
LAST = "    return int(np.flatnonzero(row > 0.0)[-1])\n"

#: Each child is accepted by its own number, and the bonus is drawn after the last one.
_WALKED = (
    "    path, node = [], -1\n"
    "    for child, (parent, token) in enumerate(zip(parents, tokens, strict=True)):\n"
    "        if parent == node and uniforms[child + 1] < probs[node + 1, token]:\n"
    "            path.append(child)\n"
    "            node = child\n"
)
_BONUS = "    return path, pick(probs[node + 1], uniforms[node + 1])\n"


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
    catches="cumulative probabilities are formed in float32, also where the laws are float64",
    severity="major",
    story="In a large vocabulary their rounding moves the draw by many tokens.",
    mutant=edit(EXCEEDING, EXCEEDING.replace("(row)", "(row, dtype=np.float32)")),
    also=[edit(EXCEEDING, EXCEEDING.replace("(row)", "(row.astype(np.float32))"))],
    seen=WRITTEN,
)
def cumulative_sum_in_single(submission: Submission, rng: np.random.Generator) -> None:
    """Behind a sum of 0.5, float32 rounds each of these steps in the same direction."""
    law = np.array([0.5, *[1e-5] * 50000])
    want = int(rng.integers(20000, 40000))
    number = float(np.cumsum(law)[want - 1] + 0.5 * law[want])
    sampled(submission, [], [], [law.tolist()], [number], ([], want))


@trap(
    catches="a child is accepted or rejected by a draw of its own instead of the node's one sample",
    severity="major",
    story="A separate draw for each child biases the output (by more than a tenth in a small "
    "study) while looking like rejection sampling.",
    mutant=insert_after(
        PICKS,
        "    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):\n"
        "        if uniforms[node + 1] < probs[parent + 1, token]:\n"
        "            choices[parent + 1] = int(token)\n",
    ),
    also=[edits((PICKS, _WALKED), ("    return verify_tree(tokens, parents, choices)\n", _BONUS))],
)
def biased_by_redrawing(submission: Submission, rng: np.random.Generator) -> None:
    # Children 0 and 1 of the root; its sample says 2, whatever the children's numbers are.
    law = [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    small = float(rng.integers(1, 8)) / 64
    sampled(submission, [0, 1], [-1, -1], law, [0.75, small, small], ([], 2), float_type(rng))


@trap(
    catches="the pick is the most likely token, not the sample",
    severity="major",
    story="Argmax matching at a temperature above 0: output that looks greedy.",
    mutant=edit(PICKS, "    choices = probs.argmax(axis=1).tolist()\n"),
)
def greedy_instead_of_sampled(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    sampled(submission, [2], [-1], law, [0.875, 0.125], ([0], 0), float_type(rng))


@trap(
    catches="the root's number decides at every node",
    severity="critical",
    story="Then the samples along a path are not independent.",
    mutant=edit(PICKS, PICKS.replace("pick(row, uniform)", "pick(row, uniforms[0])")),
    seen=WRITTEN,
)
def one_number_for_all(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5], [0.5, 0.5]]
    sampled(submission, [0], [-1], law, [0.25, 0.75], ([0], 1), float_type(rng))


@trap(
    catches="the nodes of one depth share a number",
    severity="major",
    story="The walk counts its steps and uses the count as an index.",
    mutant=edit(
        PICKS,
        "    depths = [0]\n    for parent in parents:\n"
        "        depths.append(depths[parent + 1] + 1)\n"
        "    numbers = [uniforms[depth] for depth in depths]\n"
        "    choices = [pick(row, u) for row, u in zip(probs, numbers, strict=True)]\n",
    ),
    seen=WRITTEN,
)
def numbers_by_depth(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5]] * 4
    # Root → 0, 1; the first child → 0. The walk ends at the last node, whose number is 0.125.
    numbers = [0.25, 0.25, 0.75, 0.125]
    sampled(submission, [0, 1, 0], [-1, -1, 0], law, numbers, ([0, 2], 0), float_type(rng))


@trap(
    catches="the sample is drawn among the children's tokens only",
    severity="major",
    story="A token that the drafter did not propose can then never be generated.",
    mutant=insert_before(
        PICKS,
        "    for row in range(len(probs)):\n"
        "        below = [t for t, p in zip(tokens, parents, strict=True) if p + 1 == row]\n"
        "        if below:\n"
        "            kept = probs[row, below]\n"
        "            probs[row] = 0.0\n"
        "            probs[row, below] = kept / kept.sum()\n",
    ),
)
def only_children_sampled(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
    sampled(submission, [0], [-1], law, [0.625, 0.25], ([], 2), float_type(rng))


@trap(
    catches="the cumulative sum runs over tokens sorted by probability",
    severity="major",
    story="How top-p is written; the contract goes by token order.",
    mutant=edit(
        EXCEEDING,
        "    order = np.argsort(-row, kind='stable')\n"
        "    exceeding = order[np.cumsum(row[order]) > uniform]\n",
    ),
)
def sorted_by_probability(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.125, 0.25, 0.625]]
    sampled(submission, [], [], law, [0.25], ([], 1), float_type(rng))


@trap(
    catches="a number equal to a cumulative probability picks the token below it",
    severity="minor",
    story="`searchsorted` from the left: reaching is not exceeding.",
    mutant=edit(EXCEEDING, EXCEEDING.replace("> uniform", ">= uniform")),
    seen=WRITTEN,
)
def boundary_belongs_below(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.25, 0.5], [0.5, 0.5, 0.0]]
    sampled(submission, [1], [-1], law, [0.25, 0.5], ([0], 1), float_type(rng))


@trap(
    catches="the number 0 picks a first token of probability 0",
    severity="major",
    story="A uniform number of exactly 0 comes once in sixteen million draws and then yields an "
    "impossible token.",
    mutant=edit(
        EXCEEDING,
        EXCEEDING.replace("> uniform", ">= uniform if not uniform else np.cumsum(row) > uniform"),
    ),
)
def impossible_token_at_zero(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.0, 0.0, 0.5, 0.5]]
    sampled(submission, [], [], law, [0.0], ([], 2), float_type(rng))


TENTHS = [0.1] * 10 + [0.0, 0.0]
ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@trap(
    catches="when rounding leaves the total below the number, an impossible token is picked",
    severity="major",
    story="Ten times 0.1 is less than 1 in binary; a clipped or wrapped index then yields an "
    "impossible token.",
    mutant=edit(LAST, "    return len(row) - 1\n"),
    seen=WRITTEN,
)
def rounding_falls_off_the_end(submission: Submission, rng: np.random.Generator) -> None:
    # Ten tenths equal that number, so that another bug, which takes reaching for exceeding, hides
    # this one there.
    gap = 2.0 ** -float(rng.integers(46, 50))
    sampled(submission, [], [], [[0.5, 0.5 - gap, 0.0]], [1.0 - gap / 2], ([], 1))
    sampled(submission, [], [], [TENTHS], [ALMOST_ONE], ([], 9))


@trap(
    catches="when rounding leaves the total below the number, the first token is picked",
    severity="major",
    story="argmax over an all-false array is 0.",
    mutant=edit(LAST, "    return 0\n"),
)
def rounding_starts_again(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [9], [-1], [TENTHS, TENTHS], [ALMOST_ONE, 0.0], ([0], 0))
