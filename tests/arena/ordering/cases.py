"""What sorting must do, and what is measured of it."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Call, case

TIMED = 16384


@case
def sorts(submission, rng):
    for count in (1, 2, 7, 64, 100, 1000):
        values = rng.standard_normal(count)
        expect.equal(submission.sort(values), np.sort(values))


@case
def sorts_again(submission, rng):
    """Same length, other values: an answer kept from the last call is a wrong one."""
    for _ in range(8):
        values = rng.standard_normal(257)
        expect.equal(submission.sort(values), np.sort(values))


@case
def empty(submission, rng):
    expect.equal(submission.sort(np.empty(0)), np.empty(0))


@case
def counts_inversions(submission, rng):
    for count in (1, 2, 50, 200):
        values = rng.standard_normal(count)
        want = int(np.count_nonzero(np.triu(values[:, None] > values[None, :])))
        expect.equal(submission.inversions(values), want)


@case
def refuses_a_matrix(submission, rng):
    expect.raises((ValueError, TypeError), lambda: submission.sort(rng.standard_normal((3, 3))))


def speed(submission, rng):
    return _call(rng.standard_normal(TIMED))


def memory(submission, rng, size):
    return _call(rng.standard_normal(size))


def _call(values):
    return Call("sort", (values,), check=lambda got: expect.equal(got, np.sort(values)))
