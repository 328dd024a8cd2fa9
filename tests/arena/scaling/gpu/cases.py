"""What scaling must do, and the shape on which attacks on the clock are raced."""

import numpy as np

from trapline.arena.gpu.checks import near
from trapline.arena.gpu.contract import Entry, Output, Timed
from trapline.arena.gpu.memory import device_here
from trapline.arena.judge.traps import case

ENTRIES = {"scaled": Entry(lambda x, by: (Output(x.shape, "float32"),))}
SHAPES = ((1, 1), (3, 5), (64, 33), (7, 256))
#: Rows and columns of the race: megabytes on a GPU, little where host memory stands in for it.
SIDE = {"cuda": 2048, "cpu": 96}


def drawn(rng, shape):
    draw = rng.standard_normal
    return draw(shape).astype(np.float32), draw(shape[0]).astype(np.float32)


def ask(submission, x, by):
    near(submission.scaled(x, by), x * by[:, None], dtype="float32", what="y")


@case
def scales(submission, rng):
    for shape in SHAPES:
        ask(submission, *drawn(rng, shape))


@case
def scales_again(submission, rng):
    """Same shape and storage, other values: an answer kept from the last call is a wrong one."""
    for _ in range(16):
        ask(submission, *drawn(rng, (16, 64)))


@case
def asked_twice(submission, rng):
    """The very same question: the output must be written again."""
    x, by = drawn(rng, (24, 24))
    for _ in range(2):
        ask(submission, x, by)


@case
def one_value_changes(submission, rng):
    """All values but one are those of the last call."""
    x, by = drawn(rng, (32, 40))
    for _ in range(2):
        ask(submission, x, by)
        x[17, 23] += 4.0


def raced():
    """Not called `timed`: a race needs no speed of light and no baselines."""
    shape = (SIDE[device_here()],) * 2
    return Timed("race", "scaled", lambda rng: drawn(rng, shape), {})
