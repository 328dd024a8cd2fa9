"""Small bugs of scaling."""

import numpy as np
from scaling.gpu.cases import ask, drawn

from trapline.arena.gpu.checks import leaves_inputs_alone
from trapline.arena.judge.traps import edit, trap


@trap(
    catches="x is overwritten",
    severity="major",
    story="Scaling in place saves a tensor, and the caller still needs it.",
    mutant=edit("y.copy_(x * by[:, None])", "y.copy_(x.mul_(by[:, None]))"),
)
def input_overwritten(submission, rng):
    leaves_inputs_alone(submission, "scaled", *drawn(rng, (4, 6)))


@trap(
    catches="negative factors lose their sign",
    severity="critical",
    story="A norm was taken for the factor.",
    mutant=edit("by[:, None]", "by[:, None].abs()"),
)
def sign_lost(submission, rng):
    x, by = drawn(rng, (6, 9))
    ask(submission, x, -np.abs(by))
