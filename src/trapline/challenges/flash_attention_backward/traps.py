"""Bugs that the backward pass of tiled attention really gets, each in its smallest situation."""

from typing import Any

import numpy as np

from trapline.arena import expect
from trapline.arena.proxy import Submission
from trapline.arena.traps import trap
from trapline.challenges.flash_attention_backward.cases import (
    NAMES,
    Saved,
    agrees,
    differentiates,
    draw,
    saved,
    triple,
)
from trapline.challenges.flash_attention_forward.cases import (
    REFUSALS,
    Shape,
    attends,
    pair,
    weighed,
)


def with_logits(rng: np.random.Generator, logits: list[float], T: int, causal: bool) -> Saved:
    """Arguments (one head, width 4, float64) whose scaled scores are logits[s] for each query.

    The scale of width 4 is ½, and one coordinate carries the logit.
    """
    S = len(logits)
    q, k = rng.standard_normal((1, 1, T, 4)), np.zeros((1, 1, S, 4))
    q[..., 0] = 2.0
    k[0, 0, :, 0] = logits
    dout, v = rng.standard_normal((1, 1, T, 4)), rng.standard_normal((1, 1, S, 4))
    return saved(dout, q, k, v, causal)


# --- sums over groups, tiles, rows ----------------------------------------------------------------


def grouped(submission: Submission, rng: np.random.Generator) -> None:
    """Four query heads on two key heads."""
    differentiates(submission, draw(Shape(H=4, G=2, T=5, S=5), rng, False), tile=3)


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


# --- causal ---------------------------------------------------------------------------------------


def causal_square(submission: Submission, rng: np.random.Generator) -> None:
    """Eight positions in tiles of four."""
    differentiates(submission, draw(Shape(T=8, S=8), rng, True), causal=True, tile=4)


@trap(
    "mask-missing",
    catches="the backward pass forgets the causal mask",
    severity="critical",
    story="Skipping hidden tiles is there, the mask inside the diagonal tile is not.",
)
def mask_missing(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    "mask-hides-own-key",
    catches="the backward mask hides the diagonal",
    severity="critical",
    story="≥ for > in one of two masks that must be the same.",
)
def mask_own_key(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    "mask-sees-next-key",
    catches="the backward mask shows one key of the future",
    severity="critical",
    story="Gradients flow into a key that the forward pass never used.",
)
def mask_next_key(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    "mask-aligned-top-left",
    catches="the backward mask is aligned to the first key, the forward one to the last",
    severity="critical",
    story="Square training never shows it; training on a cached prefix does.",
)
def mask_top_left(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((2, 6), (3, 8), (6, 2)):
        differentiates(submission, draw(Shape(T=T, S=S), rng, True), causal=True, tile=4)


@trap(
    "mask-zeroes-scores",
    catches="hidden scores are set to 0 instead of −inf, so hidden keys get weight exp(−lse)",
    severity="critical",
    story="Known from kernels' tails: it is the weight that must be zero, not the score.",
)
def mask_zeroes_scores(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    "mask-above-real-logits",
    catches="a finite mask that is larger than real logits gives hidden keys huge weights",
    severity="critical",
    story="With all real logits at −3·10⁴, a mask of −10⁴ becomes exp(2·10⁴).",
)
def mask_above(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e4, -3e9):
        arguments = with_logits(rng, [low] * 6, 6, True)
        differentiates(submission, arguments, causal=True, tile=3)


@trap(
    "break-instead-of-continue",
    catches="the loop over queries ends at the first hidden tile although later rows see the keys",
    severity="critical",
    story="Called fragile in the published field: with keys outside and queries inside, the hidden "
    "tiles come first.",
)
def break_in_loop(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=12, S=12), rng, True), causal=True, tile=4)


@trap(
    "diagonal-tile-skipped",
    catches="a tile in which only the last row sees only the first key is skipped",
    severity="critical",
    story="An off-by-one in the skip condition that aligned square problems never touch.",
)
def diagonal_tile(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((8, 9), (7, 8), (8, 8)):
        for tile in (4, 1):
            differentiates(submission, draw(Shape(T=T, S=S), rng, True), causal=True, tile=tile)


# --- tiles and lengths ----------------------------------------------------------------------------


@trap(
    "last-key-tile-dropped",
    catches="keys behind the last whole tile get no gradient",
    severity="critical",
    story="300 keys in tiles of 97 leave nine.",
)
def last_key_tile(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=3, S=300), rng, False), tile=97)


@trap(
    "last-query-tile-dropped",
    catches="queries behind the last whole tile neither get nor give gradients",
    severity="critical",
    story="300 queries in tiles of 97 leave nine.",
)
def last_query_tile(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=300, S=3), rng, False), tile=97)


@trap(
    "tile-larger-than-sequence-refused",
    catches="a tile larger than the sequence is refused or answered wrongly",
    severity="major",
    story="The default tile of 64 meets five tokens.",
)
def tile_larger(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        differentiates(submission, draw(Shape(T=5, S=5), rng, causal), causal=causal, tile=100)


@trap(
    "as-many-keys-as-queries",
    catches="keys beyond the number of queries get no gradient",
    severity="critical",
    story="Self-attention tests have T = S; cross-attention does not.",
)
def as_many_keys(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=3, S=10), rng, False), tile=2)


# --- heads and batches ----------------------------------------------------------------------------


@trap(
    "groups-by-tiling",
    catches="the backward pass pairs query head h with kv head h mod G",
    severity="critical",
    story="np.tile for np.repeat, in one of two places.",
)
def groups_by_tiling(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    "groups-by-wrong-divisor",
    catches="the backward pass pairs query head h with kv head h // G",
    severity="critical",
    story="H = 4, G = 2 hides it, because there H/G = G.",
)
def groups_wrong_divisor(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(H=6, G=3, T=4, S=4), rng, False), tile=3)


@trap(
    "batch-shares-values",
    catches="all rows of a batch read the values of the first",
    severity="critical",
    story="Tests with B = 1 never notice.",
)
def batch_shares(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(B=3, T=4, S=4), rng, True), causal=True)


# --- state ----------------------------------------------------------------------------------------


@trap(
    "needs-its-own-forward",
    catches="the backward pass uses what its own last forward call left behind",
    severity="critical",
    story="Fine in a script that calls one after the other; wrong with two layers, with activation "
    "checkpoints, or when out and lse come from another implementation.",
)
def needs_own_forward(submission: Submission, rng: np.random.Generator) -> None:
    first, second = (draw(Shape(T=6, S=6), rng, True) for _ in range(2))
    for arguments in (first, second):
        attends(submission, *arguments[1:4], causal=True)
    differentiates(submission, first, causal=True, tile=4)
    differentiates(submission.fresh(), second, causal=True, tile=4)


@trap(
    "gradients-pile-up",
    catches="a buffer kept between calls still holds the last gradients",
    severity="critical",
    story="A workspace reused to save an allocation, and not cleared.",
)
def gradients_pile_up(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=5, S=5), rng, False)
    for _ in range(3):
        differentiates(submission, arguments)


# --- arrays as they come --------------------------------------------------------------------------


def arguments_survive(submission: Submission, arguments: Saved) -> None:
    """After a call, every argument is what it was."""
    _, after = submission.observe("flash_attention_backward", *arguments, causal=True, tile=4)
    names = ("dout", "q", "k", "v", "out", "lse")
    for name, left, given in zip(names, after, arguments, strict=True):
        expect.equal(left, given, f"{name} after the call")


@trap(
    "out-overwritten",
    catches="out serves as scratch for dO·O",
    severity="critical",
    story="out is saved for the caller too; an in-place product saves memory and ruins it.",
)
def out_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    arguments_survive(submission, draw(Shape(H=2, G=1, T=6, S=6), rng, True))


@trap(
    "lse-overwritten",
    catches="−inf in lse is replaced in place",
    severity="major",
    story="Cleaning up an argument instead of a copy: the second backward call sees rows that look "
    "visible.",
)
def lse_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    arguments_survive(submission, draw(Shape(H=2, G=1, T=8, S=5), rng, True))


@trap(
    "dout-scaled-in-place",
    catches="dout is scaled in place",
    severity="critical",
    story="An upstream gradient feeds other branches as well.",
)
def dout_scaled(submission: Submission, rng: np.random.Generator) -> None:
    # Width 3: dividing by its scale again does not give back every number.
    arguments_survive(submission, draw(Shape(T=64, S=64, D=3), rng, True))


@trap(
    "strides-of-dout-ignored",
    catches="dout is read as if it were contiguous",
    severity="critical",
    story="The gradient of a transposed view is a transposed view, that of a sum is one number "
    "with strides of zero.",
)
def strides_ignored(submission: Submission, rng: np.random.Generator) -> None:
    plain = [rng.standard_normal((2, 6, 3, 4)) for _ in range(4)]
    dout, q, k, v = (x.transpose(0, 2, 1, 3) for x in plain)
    differentiates(submission, saved(dout, q, k, v, True), causal=True, tile=4)
    ones = np.broadcast_to(np.float64(1.5), q.shape)
    differentiates(submission, saved(ones, q, k, v, True), causal=True, tile=4)
    flipped = dout[:, :, ::-2], q[:, :, ::2], k[:, ::-1], v[..., ::-1]
    differentiates(submission, saved(*flipped, False), tile=2)


@trap(
    "double-through-single",
    catches="float64 gradients pass through float32",
    severity="major",
    story="Gradients checked against finite differences stop at 1e-7 for no visible reason.",
)
def double_through_single(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=6, S=6), rng, False), tile=4)


@trap(
    "axes-of-one-squeezed",
    catches="an axis of size one disappears on the way",
    severity="major",
    story="squeeze() tidies up the axis that was meant, and every other that happens to be one.",
)
def axes_of_one(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        for shape in (Shape(T=1, S=1, D=1), Shape(T=3, S=1, D=2), Shape(T=1, S=3, D=1)):
            differentiates(submission, draw(shape, rng, causal), causal=causal, tile=2)


@trap(
    "gradients-in-double",
    catches="float32 inputs give float64 gradients",
    severity="minor",
    story="An allocation without a dtype; the optimiser's state doubles.",
)
def gradients_in_double(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=5, S=5), rng, False, np.float32), tile=4)


def memory_rise(submission: Submission, rng: np.random.Generator) -> tuple[int, int]:
    """By how many bytes memory rises for 4608 queries and keys, and how many pairs these are."""
    q, k, v = Shape(T=4608, S=4608).draw(rng, np.float32)
    dout = rng.standard_normal(q.shape).astype(q.dtype)
    saved_pair = blockwise(q, k, v)
    answer, rise = weighed(
        submission, "flash_attention_backward", dout, q, k, v, *saved_pair, causal=True, tile=64
    )
    for name, got in zip(NAMES, triple(answer), strict=True):
        expect.array(got, shape=q.shape, dtype=q.dtype, what=name)
    # The weights of a row sum to one, so dv sums to dout.
    total = triple(answer)[2].astype(np.float64).sum(axis=2)
    expect.close(total, dout.sum(axis=2, dtype=np.float64), atol=0.1, what="dv summed over keys")
    return rise, q.shape[2] * k.shape[2]


def blockwise(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of a square problem in its own dtype, a block of rows at a time."""
    outs, lses = [], []
    for end in range(256, q.shape[2] + 1, 256):
        scores = q[:, :, end - 256 : end] @ k[:, :, :end].swapaxes(2, 3) * q.shape[3] ** -0.5
        weights = np.tril(np.exp(scores), k=end - 256)
        total = weights.sum(axis=3)
        outs.append(weights @ v[:, :, :end] / total[..., None])
        lses.append(np.log(total))
    return np.concatenate(outs, axis=2), np.concatenate(lses, axis=2)


@trap(
    "score-matrix-in-memory",
    catches="memory that grows as T·S: weights and their gradients are held whole",
    severity="critical",
    story="4608 queries and keys have 81 MiB of weights; half of that is far more than tiles and "
    "gradients need.",
)
def score_matrix(submission: Submission, rng: np.random.Generator) -> None:
    rise, pairs = memory_rise(submission, rng)
    expect.that(rise < 2 * pairs, f"memory rose by {rise >> 20} MiB, all weights are {pairs >> 18}")


@trap(
    "mask-for-all-pairs",
    catches="the weights are tiled, but the causal mask is made for all T·S pairs at once",
    severity="major",
    story="One byte a pair is still quadratic: at 128k tokens the mask alone has 16 GiB.",
)
def mask_for_all_pairs(submission: Submission, rng: np.random.Generator) -> None:
    rise, pairs = memory_rise(submission, rng)
    expect.that(rise < pairs // 2, f"memory rose by {rise >> 20} MiB, a mask has {pairs >> 20}")


# --- nothing there --------------------------------------------------------------------------------


@trap(
    "no-keys",
    catches="S = 0 raises instead of giving zeros and empty arrays",
    severity="major",
    story="A tile clamped to the number of keys is a step of zero.",
)
def no_keys(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        differentiates(submission, draw(Shape(T=3, S=0), rng, causal), causal=causal, tile=4)


@trap(
    "no-queries",
    catches="T = 0 raises or gives NaN instead of zeros for dk and dv",
    severity="major",
    story="A well-known kernel gave NaN for zero queries.",
)
def no_queries(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        differentiates(submission, draw(Shape(T=0, S=3), rng, causal), causal=causal, tile=4)


@trap(
    "no-batch",
    catches="B = 0 raises (stacking nothing) instead of giving empty arrays",
    severity="minor",
    story="The last rank of a sharded run gets an empty batch.",
)
def no_batch(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(B=0, H=2, G=2), rng, False), tile=4)


# --- what must be refused -------------------------------------------------------------------------


@trap(
    "uneven-groups-accepted",
    catches="H that is no multiple of G is not refused with ValueError",
    severity="major",
    story="Integer division rounds, and a head's gradient lands on the wrong key head.",
)
def uneven_groups(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, _, _, out, lse = draw(Shape(H=3, G=3), rng, False)
    _, k, v = Shape(G=2).draw(rng)
    expect.raises(ValueError, lambda: submission.flash_attention_backward(dout, q, k, v, out, lse))
    expect.raises(ValueError, lambda: submission.flash_attention(q, k, v))


@trap(
    "negative-tile-accepted",
    catches="a negative tile makes every loop empty and gives zero gradients",
    severity="minor",
    story="range(0, T, -3) is legal and empty: a model that quietly does not learn.",
)
def negative_tile(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(), rng, False)
    for tile in (-3, 0):
        expect.raises(
            REFUSALS,
            lambda tile=tile: submission.flash_attention_backward(*arguments, tile=tile),  # type: ignore[misc]
        )


@trap(
    "dout-of-other-shape-accepted",
    catches="a dout that does not fit q is broadcast or cut off instead of refused",
    severity="minor",
    story="Padded gradients against unpadded inputs: slicing hides the mismatch.",
)
def dout_shape(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(B=2, T=6, S=6), rng, False)
    for other in (dout[:1], dout[:, :, :1], dout[..., :1]):
        expect.raises(
            REFUSALS,
            lambda other=other: submission.flash_attention_backward(other, q, k, v, out, lse),  # type: ignore[misc]
        )


@trap(
    "out-of-other-shape-accepted",
    catches="an out that does not fit q is broadcast instead of refused",
    severity="minor",
    story="A width or a length of 1 broadcasts without a word.",
)
def out_shape(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(T=6, S=6), rng, False)
    for other in (out[:, :, :1], out[..., :1]):
        expect.raises(
            REFUSALS,
            lambda other=other: submission.flash_attention_backward(dout, q, k, v, other, lse),  # type: ignore[misc]
        )


@trap(
    "lse-of-other-shape-accepted",
    catches="an lse longer than q is accepted and cut off",
    severity="minor",
    story="lse padded to a multiple of the tile, as some kernels save it, is another layout.",
)
def lse_shape(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(H=2, G=2, T=6, S=6), rng, False)
    padded, doubled = np.pad(lse, ((0, 0), (0, 0), (0, 2))), np.concatenate([lse, lse])
    for other in (padded, doubled, lse.swapaxes(1, 2), lse[..., None]):
        expect.raises(
            REFUSALS,
            lambda other=other: submission.flash_attention_backward(dout, q, k, v, out, other),  # type: ignore[misc]
        )


@trap(
    "integers-accepted",
    catches="integer gradients are accepted",
    severity="minor",
    story="np.ones with an integer dtype as upstream gradient passes every multiplication.",
)
def integers_accepted(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, out, lse = draw(Shape(), rng, False)
    ones = np.ones(q.shape, np.int64)
    expect.raises(REFUSALS, lambda: submission.flash_attention_backward(ones, q, k, v, out, lse))


# --- the forward pass it rests on -----------------------------------------------------------------


@trap(
    "forward-rescale-direction",
    catches="exp(m_new − m_old) instead of exp(m_old − m_new) in the forward pass",
    severity="critical",
    story="Said to show only in the backward pass. It shows in out and in lse, with two tiles.",
)
def forward_rescale(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [0.0, 0.0, 1.0, 1.0, 3.0, 3.0], 3, False)
    attends(submission, q, k, v, tile=2)


@trap(
    "forward-maximum-shared-by-rows",
    catches="one maximum for a whole tile of queries, so that rows with low scores underflow",
    severity="critical",
    story="max() without an axis: one loud query silences its neighbours, and their lse is −inf.",
)
def forward_shared_maximum(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [2000.0, 1999.0, 2001.0], 3, False)
    q[0, 0, 1] = 0.0
    attends(submission, q, k, v, tile=2)


@trap(
    "forward-empty-rows-nan",
    catches="NaN in out or lse of rows that see no key",
    severity="critical",
    story="−inf − (−inf) where empty and other rows share a tile; the backward pass inherits it.",
)
def forward_empty_rows(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=9, S=4).draw(rng), causal=True, tile=8)


@trap(
    "forward-lse-without-maximum",
    catches="lse lacks the maximum that was taken out",
    severity="critical",
    story="out is right, and the backward pass that trusts lse is not.",
)
def forward_lse(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [5.0, 4.0, 5.0, 3.0], 2, False)
    attends(submission, q, k, v, tile=2)


@trap(
    "forward-mask-aligned-top-left",
    catches="the forward mask is aligned to the first key",
    severity="critical",
    story="Two queries on six keys: query 0 must see five.",
)
def forward_top_left(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=2, S=6).draw(rng), causal=True, tile=4)


@trap(
    "forward-finite-mask",
    catches="−1e9 as mask: a row without keys becomes the mean of all values",
    severity="critical",
    story="A finite sentinel minus itself is 0, so a fully masked row gets equal weights.",
)
def forward_finite_mask(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=7, S=4).draw(rng)
    out, lse = pair(submission.flash_attention(q, k, v + 3.0, causal=True, tile=8))
    expect.array(lse, shape=(1, 1, 7), dtype=np.float64, what="lse")
    expect.array(out, shape=(1, 1, 7, 4), dtype=np.float64, what="out")
    expect.equal(out[:, :, :3], np.zeros((1, 1, 3, 4)), "an empty row")
    expect.that(bool(np.all(lse[..., :3] == -np.inf)), "lse of an empty row is not −inf")


# --- the ends of the numbers ----------------------------------------------------------------------


def finite(answer: Any, arguments: Saved) -> None:
    """Gradients of the right shapes and dtypes, without infinities and NaN."""
    for name, got, like in zip(NAMES, triple(answer), arguments[1:4], strict=True):
        expect.array(got, shape=like.shape, dtype=like.dtype, what=name)
        expect.that(bool(np.isfinite(got).all()), f"{name} is not finite")


@trap(
    "huge-scores-overflow",
    catches="exp(s − lse) overflows where s and lse are rounded apart by more than 88",
    severity="major",
    story="float32 numbers near 10¹² are 65536 apart; a saved lse one step below a score made "
    "again in another order turns a probability into inf.",
)
def huge_scores(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=128, S=8, D=3).draw(rng, np.float32)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    arguments = saved(dout, 1e6 * q, 1e6 * k, v, False)
    finite(submission.flash_attention_backward(*arguments, tile=16), arguments)


@trap(
    "empty-rows-overflow",
    catches="dout of a row without keys overflows in a product before its weight 0 is applied",
    severity="major",
    story="Nobody fills the gradient of a padded row; 0 · inf is NaN, and it reaches all of dk.",
)
def empty_rows_overflow(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(H=2, G=1, T=7, S=4).draw(rng, np.float32)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    dout[:, :, :3] = 3e38
    arguments = saved(dout, q, k, np.abs(v) + np.float32(1.0), True)
    for tile in (2, 16):
        differentiates(submission, arguments, causal=True, tile=tile)


@trap(
    "scores-below-sentinel",
    catches="−1e30 stands for −inf somewhere, and rows with finite scores below it count as empty",
    severity="major",
    story="lse < −1e30 is a common test for an empty row; the constant comes from another dtype's "
    "range.",
)
def scores_below_sentinel(submission: Submission, rng: np.random.Generator) -> None:
    # Every key is hopelessly behind the first, so that it gets all of dout.
    arguments = with_logits(rng, [-1e200 * s for s in range(1, 7)], 6, True)
    want = np.zeros((1, 1, 6, 4))
    want[:, :, 0] = arguments[0].sum(axis=2)
    for tile in (4, 16):
        answer = submission.flash_attention_backward(*arguments, causal=True, tile=tile)
        finite(answer, arguments)
        expect.close(answer[2], want, atol=1e-12, what="dv")


@trap(
    "zero-output-taken-for-empty-row",
    catches="a row whose out is 0 is taken for one that sees no key",
    severity="major",
    story="An empty row has out 0, but so has every row over values that are zero: a layer whose "
    "value projection starts at zero would never learn.",
)
def zero_output(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, _, _ = draw(Shape(H=2, G=1, T=6, S=6), rng, True)
    differentiates(submission, saved(dout, q, k, 0 * v, True), causal=True, tile=4)


@trap(
    "small-weights-dropped",
    catches="weights below 1e-8 are set to 0, also in float64",
    severity="minor",
    story="A threshold that float32 cannot feel; in float64 it costs half of the digits.",
)
def small_weights(submission: Submission, rng: np.random.Generator) -> None:
    arguments = with_logits(rng, [0.0, -19.0, -19.5, -20.0], 3, False)
    differentiates(submission, arguments, tile=2)


@trap(
    "integers-in-saved-accepted",
    catches="an integer out or lse is accepted, because only dout is looked at",
    severity="minor",
    story="Saved arrays are trusted as one's own, but they may come from anywhere.",
)
def integers_in_saved(submission: Submission, rng: np.random.Generator) -> None:
    *inputs, out, lse = draw(Shape(), rng, False)
    for kept in ((np.rint(out).astype(np.int64), lse), (out, np.rint(lse).astype(np.int64))):
        expect.raises(
            REFUSALS,
            lambda kept=kept: submission.flash_attention_backward(*inputs, *kept),  # type: ignore[misc]
        )
