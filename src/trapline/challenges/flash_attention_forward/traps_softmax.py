"""Bugs of the online softmax and its tiles."""

import numpy as np

from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.situations import with_logits

# --- the online softmax ---------------------------------------------------------------------------


@trap(
    "rescale-direction",
    catches="exp(m_new − m_old) instead of exp(m_old − m_new) when the running maximum grows",
    severity="critical",
    story="A published comparison calls this the most common bug of open implementations and says "
    "that forward tests cannot see it. They can, as soon as there are two tiles.",
)
def rescale_direction(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([0.0, 1.0, 3.0], 4), 5, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    "output-not-rescaled",
    catches="the accumulated output keeps the weight of an outdated maximum",
    severity="critical",
    story="The sum is corrected and the output next to it is not; with one tile nothing shows.",
)
def output_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([-1.0, 2.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    "sum-not-rescaled",
    catches="the running sum keeps the weight of an outdated maximum",
    severity="critical",
    story="The output is corrected and the denominator is not: rows no longer sum to one.",
)
def sum_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([-2.0, 2.0], 4), 3, np.float64)
    inputs[2][...] = 1.0
    attends(submission, *inputs, tile=4)


@trap(
    "running-maximum-forgotten",
    catches="each tile subtracts its own maximum, so a later, lower tile overflows the correction",
    severity="critical",
    story="Mathematically the same, and right on random data; a strong first key (an attention "
    "sink) followed by ordinary ones overflows.",
)
def running_maximum_forgotten(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([2000.0, 0.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    "maximum-shared-by-rows",
    catches="one maximum for a whole tile, so that rows with low scores underflow",
    severity="critical",
    story="max() without an axis: right while all rows have scores of the same size, then one loud "
    "query silences its neighbours.",
)
def maximum_shared(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = with_logits(rng, np.array([2000.0, 1999.0, 2001.0, 2000.0]), 3, np.float64)
    q[0, 0, 1] = 0.0
    attends(submission, q, k, v, tile=2)


@trap(
    "fully-masked-tile-nan",
    catches="−inf − (−inf) = NaN for a row whose first tile is masked whole",
    severity="critical",
    story="The hazard every grader of this task asks about: rows that have seen no key yet share a "
    "tile with rows that have.",
)
def fully_masked_tile(submission: Submission, rng: np.random.Generator) -> None:
    for T, S, tile in ((12, 5, 8), (9, 3, 4), (6, 6, 2)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=tile)


@trap(
    "exponent-without-maximum",
    catches="exp of raw logits overflows",
    severity="critical",
    story="Logits of ±10⁴ come from untrained or quantised models; a softmax without its maximum "
    "answers NaN there and is right everywhere else.",
)
def exponent_without_maximum(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([1e4, -1e4, 9999.0, 0.0, 9998.0, 1e4]), 3, np.float32)
    attends(submission, *inputs, tile=2)


@trap(
    "maximum-starts-at-zero",
    catches="a running maximum that starts at 0 instead of −inf",
    severity="critical",
    story="Zero looks like a harmless start; rows whose logits are all far below it underflow to "
    "nothing.",
)
def maximum_starts_at_zero(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([-1e4, -1e4 - 1, -1e4 + 1, -1e4, -1e4 - 2]), 3, np.float32)
    attends(submission, *inputs, tile=2)


@trap(
    "tiles-averaged",
    catches="every tile is normalised by itself and the tiles are averaged",
    severity="critical",
    story="The tile size becomes part of the result: right only when all keys fit in one tile, as "
    "they do in small tests.",
)
def tiles_averaged(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([0.0, 0.0, 4.0, 4.0, 4.0]), 3, np.float64)
    for tile in (5, 2, 1):
        attends(submission, *inputs, tile=tile)


# --- tiles and edges ------------------------------------------------------------------------------


@trap(
    "last-key-tile-dropped",
    catches="keys behind the last whole tile are never read",
    severity="critical",
    story="Lengths in tests are powers of two; 300 keys in tiles of 97 are not.",
)
def last_key_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=3, S=300).draw(rng), tile=97)


@trap(
    "last-query-tile-dropped",
    catches="queries behind the last whole tile stay zero",
    severity="critical",
    story="The same off-by-a-tile on the other axis: 300 queries in tiles of 97.",
)
def last_query_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=300, S=3).draw(rng), tile=97)


@trap(
    "tile-larger-than-sequence-refused",
    catches="a tile larger than the sequence is refused or answered wrongly",
    severity="major",
    story="A default tile of 64 meets a prompt of five tokens on the first day of use.",
)
def tile_larger(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=5, S=5).draw(rng), causal=causal, tile=100)


@trap(
    "tile-must-be-power-of-two",
    catches="tiles that are no power of two are refused",
    severity="minor",
    story="A habit from kernels, where it is a rule, carried into an interface without it.",
)
def tile_any_size(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape(T=11, S=11).draw(rng)
    for tile in (3, 7):
        attends(submission, *inputs, causal=True, tile=tile)


@trap(
    "padded-keys-counted",
    catches="the zeros that fill up the last tile take part in the softmax",
    severity="critical",
    story="A tail is padded with zeros, a zero key has logit 0, and 0 is a large logit in a row "
    "whose real ones are negative.",
)
def padded_keys(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, np.full(5, -6.0), 3, np.float64), tile=4)
