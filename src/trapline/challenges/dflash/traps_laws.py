"""Bugs of sampled verification: whose law, whose number, and what is picked at its ends."""

import numpy as np

from trapline.arena.judge.traps import edit, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash.situations import WRITTEN, float_type
from trapline.challenges.dflash.traps_sampling import EXCEEDING, LAST, PICKS, sampled

_SAMPLED = "    return verify_tree(tokens, parents, choices)\n"
_DEPTHS = (
    "    depths = [0]\n    for parent in parents:\n        depths.append(depths[parent + 1] + 1)\n"
)


@trap(
    catches="a pick is drawn from another row's law: the row before, a row a depth, or the root's",
    severity="major",
    story="Row 0 is the root's and row i + 1 is node i's; a walk that counts its steps, or forgets "
    "the root, reads another law.",
    mutant=insert_before(PICKS, "    probs = probs[[0, *range(len(probs) - 1)]]\n"),
    also=[
        insert_before(PICKS, _DEPTHS + "    probs = probs[depths]\n"),
        insert_before(PICKS, "    probs = probs[[0] * len(probs)]\n"),
        insert_before(PICKS, "    probs = probs[[*range(1, len(probs)), 0]]\n"),
    ],
)
def law_of_another_row(submission: Submission, rng: np.random.Generator) -> None:
    # Root → 0, 1; node 1 → 2. The picks are 1, 3, 2 and 0, in the order of the rows.
    law = np.full((4, 4), 0.0625)
    law[np.arange(4), [1, 3, 2, 0]] = 0.8125
    tree = [0, 1, 2], [-1, -1, 1]
    sampled(submission, *tree, law.tolist(), [0.5] * 4, ([1, 2], 0), float_type(rng))


@trap(
    catches="a row uses the number of its parent's row",
    severity="major",
    story="The number is taken before the step to the child, and used after it.",
    mutant=insert_before(
        PICKS, "    uniforms = [uniforms[above] for above in (0, *(p + 1 for p in parents))]\n"
    ),
)
def number_of_the_parent(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5]] * 4
    # Root → 0; node 0 → 0, 1. The number of the root would lead to node 1.
    numbers = [0.125, 0.75, 0.25, 0.25]
    sampled(submission, [0, 0, 1], [-1, 0, 0], law, numbers, ([0, 2], 0), float_type(rng))


@trap(
    catches="the path is sampled, but the bonus is the most likely token",
    severity="major",
    story="The walk draws its picks; what follows the last of them comes from an argmax.",
    mutant=insert_before(
        _SAMPLED,
        "    path, _ = verify_tree(tokens, parents, choices)\n"
        "    return path, int(probs[path[-1] + 1 if path else 0].argmax())\n",
    ),
)
def bonus_not_sampled(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    sampled(submission, [2], [-1], law, [0.875, 0.125], ([0], 0), float_type(rng))


_RESIDUAL = (
    "    path, bonus = verify_tree(tokens, parents, choices)\n"
    "    last = path[-1] if path else -1\n"
    "    law = probs[last + 1].copy()\n"
    "    law[[t for t, p in zip(tokens, parents, strict=True) if p == last]] = 0.0\n"
)


@trap(
    catches="the bonus is drawn from the law without the tokens of the rejected children",
    severity="major",
    story="Rejection sampling draws from what is left; here the pick was drawn from the whole law, "
    "and a second draw changes the law of the output.",
    mutant=insert_before(
        _SAMPLED,
        _RESIDUAL
        + "    return path, pick(law / law.sum(), uniforms[last + 1]) if law.any() else bonus\n",
    ),
    also=[
        insert_before(
            _SAMPLED,
            _RESIDUAL + "    return path, pick(law, uniforms[last + 1]) if law.any() else bonus\n",
        )
    ],
)
def bonus_from_the_residual(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]
    sampled(submission, [0], [-1], law, [0.625, 0.25], ([], 1), float_type(rng))


@trap(
    catches="when rounding leaves the total below the number, the most likely token is picked",
    severity="minor",
    story="The contract names the last possible token.",
    mutant=edit(LAST, "    return int(row.argmax())\n"),
    seen=WRITTEN,
)
def rounding_picks_the_likeliest(submission: Submission, rng: np.random.Generator) -> None:
    gap = 2.0 ** -float(rng.integers(18, 22))
    law = [[0.25, 0.5, 0.25 - gap, 0.0]]
    sampled(submission, [], [], law, [1.0 - gap / 2], ([], 2))


@trap(
    catches="a token of small probability is never picked: a tolerance takes it for impossible",
    severity="minor",
    story="A small number is added before the comparison, or probabilities below one count as 0.",
    mutant=edit(EXCEEDING, EXCEEDING.replace("> uniform", "> uniform + 1e-9")),
    also=[insert_before(EXCEEDING, "    row = np.where(row < 1e-8, 0.0, row)\n")],
)
def small_probability_never_picked(submission: Submission, rng: np.random.Generator) -> None:
    small = 2.0 ** -float(rng.integers(40, 50))
    sampled(submission, [], [], [[small, 0.5, 0.5 - small]], [0.0], ([], 0))
