"""Bugs of the formula: sums, the derivative of the softmax, scale, weights made again."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import agrees, differentiates, draw, triple
from trapline.challenges.flash_attention_backward.situations import grouped, with_logits
from trapline.challenges.flash_attention_forward.cases import Shape

# --- sums over groups, tiles, rows ----------------------------------------------------------------


@trap(
    "dk-of-last-head-only",
    catches="dk keeps the last query head of a group instead of the sum over the group",
    severity="critical",
    story="Key heads are shared in the forward pass, so their gradient is a sum; an assignment per "
    "head overwrites it, and tests with H = G never see it.",
)
def dk_last_head(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    "dv-of-last-head-only",
    catches="dv keeps the last query head of a group instead of the sum over the group",
    severity="critical",
    story="The same overwrite on the values' side; some tests of the published field looked at a "
    "few elements of dv only.",
)
def dv_last_head(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    "dk-averaged-over-group",
    catches="dk is the mean over the group instead of the sum",
    severity="critical",
    story="Averaging looks like good manners; the learning rate of every key projection drops.",
)
def dk_averaged(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    "dv-averaged-over-group",
    catches="dv is the mean over the group instead of the sum",
    severity="critical",
    story="As for dk: the forward pass copied the head, so the backward pass must add.",
)
def dv_averaged(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    "dq-of-last-key-tile-only",
    catches="dq holds the contribution of the last tile of keys only",
    severity="critical",
    story="With keys in the outer loop dq is touched once per key tile and must accumulate.",
)
def dq_last_tile(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=8), rng, False), tile=4)


@trap(
    "dk-of-last-query-tile-only",
    catches="dk holds the contribution of the last tile of queries only",
    severity="critical",
    story="One tile of queries is all that a small test has.",
)
def dk_last_tile(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=4), rng, False), tile=4)


@trap(
    "dv-of-last-query-tile-only",
    catches="dv holds the contribution of the last tile of queries only",
    severity="critical",
    story="One tile of queries is all that a small test has.",
)
def dv_last_tile(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=4), rng, False), tile=4)


# --- the softmax's derivative ---------------------------------------------------------------------


@trap(
    "delta-missing",
    catches="dS = P·dP without the row sum D = rowsum(dO·O)",
    severity="critical",
    story="The softmax's Jacobian is diag(p) − ppᵀ; the second half is the one that gets lost.",
)
def delta_missing(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=5), rng, False))


@trap(
    "delta-of-first-rows",
    catches="every tile of queries uses the D of the first rows",
    severity="critical",
    story="A vector indexed by the row inside the tile instead of the row in the sequence.",
)
def delta_first_rows(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=4), rng, False), tile=4)


@trap(
    "delta-of-first-head",
    catches="all heads use the D of the first",
    severity="critical",
    story="D has one number per row and head; a stride too few and head 0 serves all.",
)
def delta_first_head(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(H=3, G=3, T=4, S=4), rng, True), causal=True)


@trap(
    "delta-averaged",
    catches="D is the mean over the width instead of the sum",
    severity="critical",
    story="mean for sum in a one-line reduction; D = 1 hides it.",
)
def delta_averaged(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=6), rng, False))


@trap(
    "delta-over-one-tile-of-keys",
    catches="D is summed over the keys of the current tile only",
    severity="critical",
    story="Σ p·dp over all keys is what the formula says; inside a tiled loop it becomes a sum "
    "over the tile, right whenever one tile holds all keys.",
)
def delta_one_tile(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=5, S=9), rng, False)
    for tile in (16, 4):
        differentiates(submission, arguments, tile=tile)


@trap(
    "delta-with-wrong-sign",
    catches="dS has the opposite sign, so that dq and dk point uphill",
    severity="critical",
    story="dv is right, and a test that looks at dv alone is content.",
)
def delta_sign(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, True), causal=True)


# --- scale ----------------------------------------------------------------------------------------


@trap(
    "dq-without-scale",
    catches="dq lacks the factor D^-½",
    severity="critical",
    story="The scale enters the scores, so it leaves through both dq and dk.",
)
def dq_without_scale(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    "dk-without-scale",
    catches="dk lacks the factor D^-½",
    severity="critical",
    story="Kernels that keep a scaled q get dk right by luck and lose it when q is loaded afresh.",
)
def dk_without_scale(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    "dk-scaled-twice",
    catches="dk is scaled once through q and once more at the end",
    severity="critical",
    story="q was scaled on loading, and then the gradient was scaled as the formula says.",
)
def dk_scaled_twice(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    "weights-of-unscaled-scores",
    catches="the weights are recomputed from unscaled scores",
    severity="critical",
    story="Forward and backward must take the same path to a score, or probabilities exceed one.",
)
def weights_unscaled(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6, D=16), rng, False))


# --- the weights made again -----------------------------------------------------------------------


@trap(
    "weights-not-normalised",
    catches="weights are recomputed with a tile's maximum and without lse",
    severity="critical",
    story="exp(s − max) looks like the forward pass; without the sum it is no probability.",
)
def weights_not_normalised(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6), rng, False), tile=3)


@trap(
    "weights-in-base-two",
    catches="lse is taken for a base-2 logarithm",
    severity="critical",
    story="Kernels keep lse in base 2 and share it with a backward pass of another author.",
)
def weights_base_two(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6), rng, False))


@trap(
    "weights-by-division",
    catches="exp(s) / exp(lse) overflows where exp(s − lse) does not",
    severity="critical",
    story="The same number on paper; with scores of a thousand it is inf / inf.",
)
def weights_by_division(submission: Submission, rng: np.random.Generator) -> None:
    for shift in (3000.0, -3000.0):
        logits = [shift, shift - 1.0, shift + 1.0, shift, shift - 2.0]
        differentiates(submission, with_logits(rng, logits, 3, False), tile=2)


def more_queries_than_keys(submission: Submission, rng: np.random.Generator, tile: int) -> None:
    """Nine queries, four keys, causal: five rows see nothing, and their dout must not matter."""
    arguments = draw(Shape(H=2, G=1, T=9, S=4), rng, True)
    arguments[0][:, :, :5] *= 100.0
    answer = submission.flash_attention_backward(*arguments, causal=True, tile=tile)
    dq = expect.array(triple(answer)[0], shape=(1, 2, 9, 4), dtype=np.float64, what="dq")
    expect.equal(dq[:, :, :5], np.zeros((1, 2, 5, 4)), "dq of an empty row")
    agrees(answer, arguments, causal=True)


@trap(
    "empty-rows-nan",
    catches="rows with lse = −inf turn into NaN gradients",
    severity="critical",
    story="−inf − (−inf) again, this time from the saved lse; a NaN in one row reaches all of dk "
    "and dv.",
)
def empty_rows_nan(submission: Submission, rng: np.random.Generator) -> None:
    for tile in (3, 16):
        more_queries_than_keys(submission, rng, tile)


@trap(
    "empty-rows-infinite",
    catches="a finite mask minus a very negative lse: exp overflows in empty rows",
    severity="critical",
    story="exp(s − lse) with lse near −inf is inf; the mask has to win before the subtraction.",
)
def empty_rows_infinite(submission: Submission, rng: np.random.Generator) -> None:
    more_queries_than_keys(submission, rng, 8)
