"""Bugs of what is returned, whatever was computed."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import Rng, ask, logits_of


def _returned(probs: str, indices: str) -> Mutant:
    return edit("    return probs, indices\n", f"    return {probs}, {indices}\n")


@trap(
    catches="the pair comes back as (indices, probs)",
    severity="major",
    story="Libraries differ in the order; a caller of this one samples from indices.",
    mutant=_returned("indices", "probs"),
)
def probs_and_indices_exchanged(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)), 4)


def three_rows(submission: Submission, rng: Rng) -> None:
    """Neither axis has length one."""
    ask(submission, logits_of(rng, (3, 30)), 4)


@trap(
    catches="an axis of length one is dropped: a single row, or k = 1, comes back with one axis",
    severity="major",
    story="squeeze() drops every axis of length one, not only the one that was added.",
    mutant=_returned("probs.squeeze()", "indices.squeeze()"),
    also=[
        _returned("tuple(x[0] if rows == 1 else x for x in (probs", "indices))"),
        _returned("tuple(x[:, 0] if k == 1 else x for x in (probs", "indices))"),
    ],
    control=three_rows,
)
def answer_squeezed(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (1, 30)), 4)
    ask(submission, logits_of(rng, (3, 30)), 1)


@trap(
    catches="probabilities are rounded to so many decimal places",
    severity="major",
    story="Made for reading; of 50 000 tokens most are then impossible.",
    mutant=_returned("np.round(probs, 6)", "indices"),
    also=[_returned(f"np.round(probs, {places})", "indices") for places in (3, 4, 5, 8)],
)
def probabilities_rounded(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)) * np.linspace(1.0, 3.0, 30), 12)
