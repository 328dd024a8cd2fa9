"""Bugs of one place in the backward pass that reads another head than the others."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.situations import ordinary
from trapline.challenges.flash_attention_backward.solution_lines import UNBOUNDED
from trapline.challenges.flash_attention_forward.cases import Shape

_HEADS = ("h % G", "h // G", "0")
_WEIGHTS = "_weights(q[b, h, rows], k[b, g], lse[b, h, rows]"
_DQ = "dscores @ k[b, g, cols]"
_DWEIGHTS = "dout[b, h, rows] @ v[b, g, cols].T"
_DSCORES = "dweights - delta[b, h, rows, None]"


def _groups(submission: Submission, rng: np.random.Generator) -> None:
    """Six query heads on three heads of keys: no two wrong numbers agree throughout."""
    differentiates(submission, draw(Shape(H=6, G=3, T=4, S=4), rng, False), tile=4)


@trap(
    catches="one product of the backward pass reads the keys of another head than the forward pass",
    severity="major",
    story="The keys are read for the scores and for dq; one of the two places is wrong.",
    mutant=edit(_DQ, "dscores @ k[b, h % G, cols]"),
    also=[
        *(edit(_DQ, f"dscores @ k[b, {head}, cols]") for head in _HEADS[1:]),
        *(edit(_WEIGHTS, _WEIGHTS.replace("g]", f"{head}]")) for head in _HEADS),
        *(edits((_WEIGHTS, _WEIGHTS.replace("g]", f"{head}]")), UNBOUNDED) for head in _HEADS),
    ],
    control=ordinary,
)
def backward_keys_of_another_head(submission: Submission, rng: np.random.Generator) -> None:
    _groups(submission, rng)


@trap(
    catches="the backward pass reads the values of another head than the forward pass",
    severity="major",
    story="One of several places that find the kv head of a query head is wrong.",
    mutant=edit(_DWEIGHTS, _DWEIGHTS.replace("g,", "h % G,")),
    also=[edit(_DWEIGHTS, _DWEIGHTS.replace("g,", f"{head},")) for head in _HEADS[1:]],
    control=ordinary,
)
def backward_values_of_another_head(submission: Submission, rng: np.random.Generator) -> None:
    _groups(submission, rng)


@trap(
    catches="q, dout, lse or D of a query head is read at the number of its key/value head",
    severity="major",
    story="Two indices of heads in one loop; with H = G they are the same.",
    mutant=edit("dscores.T @ q[b, h, rows]", "dscores.T @ q[b, g, rows]"),
    also=[
        edit("weights.T @ dout[b, h, rows]", "weights.T @ dout[b, g, rows]"),
        edit(_DWEIGHTS, _DWEIGHTS.replace("h,", "g,")),
        edit(_DSCORES, _DSCORES.replace("h,", "g,")),
        edit(_WEIGHTS, _WEIGHTS.replace("lse[b, h", "lse[b, g")),
        edits((_WEIGHTS, _WEIGHTS.replace("lse[b, h", "lse[b, g")), UNBOUNDED),
        edit(_WEIGHTS, _WEIGHTS.replace("q[b, h", "q[b, g")),
        edits((_WEIGHTS, _WEIGHTS.replace("q[b, h", "q[b, g")), UNBOUNDED),
    ],
    control=ordinary,
)
def query_head_taken_for_key_head(submission: Submission, rng: np.random.Generator) -> None:
    _groups(submission, rng)
