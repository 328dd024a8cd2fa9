"""What traps of several themes share."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    PAGED,
    QUANTISED,
    Rng,
    Twin,
    check_attention,
    prefill,
    twins,
)

BAD = (ValueError, TypeError)
#: Where the bugs of the blind corpus were seen.
BLIND = "an answer written from this prompt alone"


def claimed_bytes(twin: Twin) -> int:
    """The bytes that the cache reports."""
    claim = twin.cache.nbytes()
    expect.that(isinstance(claim, int | np.integer), f"nbytes() is a {type(claim).__name__}")
    return int(claim)


def three_quarters(rng: Rng, bits: int) -> np.ndarray:
    """Rows (2, 2, 8) with a step of exactly 1 and elements three quarters above whole numbers."""
    top = 2 ** (bits - 1) - 1
    rows = rng.integers(1 - top, top - 1, (2, 2, 8)) + 0.75
    rows[..., 0] = top
    return rows


# Controls: the nearest situations without a bug's trigger.


def as_many_heads(submission: Submission, rng: Rng) -> None:
    """Attention with H = G."""
    twin = Twin(submission, rng, "dense", layers=1)
    seq = twin.add(5)
    k, v = twin.model.view(seq, 0)
    q = twin.queries(3)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


def empty_before(submission: Submission, rng: Rng) -> None:
    """A prefill of a layer that holds nothing."""
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 6, 3)


def one_chunk(submission: Submission, rng: Rng) -> None:
    """A prefill whose chunk is the whole prompt."""
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 4, 4)


def never_forked(submission: Submission, rng: Rng) -> None:
    """Two sequences that share nothing."""
    for twin in twins(submission, rng, PAGED):
        first, second = twin.add(5), twin.add(5)
        twin.append(first, 2)
        twin.append(second, 2)
        twin.check()


def cut_between_pages(submission: Submission, rng: Rng) -> None:
    """truncate at the end of a page."""
    for twin in twins(submission, rng, PAGED, layers=1):
        twin.truncate(twin.add(12), 8)
        twin.check()


def kept_in_order(submission: Submission, rng: Rng) -> None:
    """keep of the first positions, in their order."""
    for twin in twins(submission, rng, EACH):
        twin.keep(twin.add(5), [0, 1, 2])
        twin.check()


def layers_in_step(submission: Submission, rng: Rng) -> None:
    """All layers at one length."""
    for twin in twins(submission, rng, EACH):
        twin.add(3)
        twin.check()


def rows_of_one_size(submission: Submission, rng: Rng) -> None:
    """All rows with the same largest magnitude."""
    for twin in twins(submission, rng, QUANTISED, layers=1):
        rows = np.ones((3, 2, 4)) * rng.choice([-1.0, 1.0], (3, 2, 4))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


def zeros_alone(submission: Submission, rng: Rng) -> None:
    """Rows of zeros: every scale and every number of levels gives them back."""
    for twin in twins(submission, rng, QUANTISED, layers=1):
        rows = np.zeros((3, 2, 4))
        twin.put(twin.add(), 0, rows, rows)
        twin.check()
