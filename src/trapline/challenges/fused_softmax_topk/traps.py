"""The traps of fused_softmax_topk: one named bug each, in the smallest situation that shows it."""

from functools import partial

import numpy as np

from trapline.arena import expect
from trapline.arena.proxy import Submission
from trapline.arena.traps import trap
from trapline.challenges.fused_softmax_topk.cases import (
    DTYPES,
    REFUSAL,
    Rng,
    ask,
    check,
    logits_of,
    overlapping,
)

#: Longer than any tile that anybody is likely to choose, and a multiple of nothing.
LONG = 40009
#: Bytes by which allocators may differ from run to run; the temporaries in question are larger.
GROWTH = 2_000_000

# --- the softmax ----------------------------------------------------------------------------------


@trap(
    "exp-overflow",
    catches="exp of the raw logits: inf / inf from a logit of 89 on in float32",
    severity="critical",
    story="The textbook formula without the maximum; logits of untrained heads reach hundreds.",
)
def exp_overflow(submission: Submission, rng: Rng) -> None:
    for dtype, offset in ((np.float16, 2e4), (np.float32, 1e4), (np.float64, 1e4)):
        ask(submission, (logits_of(rng, (2, 30)) + offset).astype(dtype), 5)


@trap(
    "normalised-over-k",
    catches="probabilities divided by the sum of the k kept ones",
    severity="critical",
    story="Right for sampling among the k, wrong as a probability; both were called 'probs'.",
)
def normalised_over_k(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (3, 40)), 4)


@trap(
    "rescale-direction",
    catches="the running sum multiplied by exp(new − old) when the maximum rises",
    severity="critical",
    story="Said to be invisible in the output; it is visible as soon as a later tile is larger.",
)
def rescale_direction(submission: Submission, rng: Rng) -> None:
    rising = np.linspace(-8.0, 8.0, LONG)[None] + 0.01 * rng.standard_normal((1, LONG))
    ask(submission, rising, 4)


@trap(
    "rescale-missing",
    catches="the running sum kept as it is when the maximum rises",
    severity="critical",
    story="Works on rows whose maximum is in the first tile, as in sorted test data.",
)
def rescale_missing(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, LONG), np.float32)
    logits[0, -1] = 20.0
    ask(submission, logits, 4)


@trap(
    "masked-first-tile",
    catches="−inf − (−inf) = NaN when everything so far is −inf",
    severity="critical",
    story="Grammar masks forbid the whole beginning of a vocabulary; the row became NaN.",
)
def masked_first_tile(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (2, LONG), dtype)
        logits[:, : LONG - 30] = -np.inf
        ask(submission, logits, 5)


@trap(
    "masked-later-tile",
    catches="a tile of −inf after finite ones that spoils the sum",
    severity="major",
    story="The end of a padded vocabulary is masked; a maximum over the tile alone met −inf.",
)
def masked_later_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG), np.float32)
    logits[:, 30:] = -np.inf
    ask(submission, logits, 40)


@trap(
    "lse-absorbed",
    catches="exp(x − (m + log Σ)): the logarithm vanishes beside a large m, the sum is above 1",
    severity="major",
    story="A log-sum-exp kept as one number has no room for log 2 beside 1e17.",
)
def lse_absorbed(submission: Submission, rng: Rng) -> None:
    for dtype, size in ((np.float64, 1e17), (np.float32, 1e17)):
        logits = np.zeros((2, 9), dtype)
        logits[:, rng.permutation(9)[:3]] = size
        logits[1] *= -1.0
        ask(submission, logits, 5)


@trap(
    "extreme-range",
    catches="differences of finite logits that leave the range and become NaN",
    severity="major",
    story="Finite masks (the lowest number of a dtype) instead of −inf.",
)
def extreme_range(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        info = np.finfo(dtype)
        logits = np.full((2, 12), info.min, dtype)
        logits[0, rng.integers(12)] = info.max
        ask(submission, logits, 6)


@trap(
    "float16-sum",
    catches="float16 sums, which stop growing at 2048 and overflow at 65504",
    severity="critical",
    story="Half-precision kernels without a wide accumulator: flat rows had probability 1/2048.",
)
def float16_sum(submission: Submission, rng: Rng) -> None:
    logits = np.full((1, 70001), rng.integers(-4, 5), np.float16)
    ask(submission, logits, 3)


@trap(
    "float16-differences",
    catches="x − m and its exponential rounded to float16",
    severity="major",
    story="One rounding to 11 bits before the exponential costs a percent after it.",
)
def float16_differences(submission: Submission, rng: Rng) -> None:
    logits = np.linspace(-9.0, 9.0, 300).astype(np.float16)[None]
    logits = np.repeat(logits, 4, axis=0)
    ask(submission, rng.permuted(logits, axis=1) + np.float16(0), 250)
    # Half of the sum comes from differences that lie half a float16 step from the next one.
    flat = np.full((1, 70001), 0.0038, np.float16)
    flat[0, 0] = 11.0  # first, so that it is the maximum for every tile
    ask(submission, flat, 3)


@trap(
    "float64-in-float32",
    catches="float64 probabilities computed in float32",
    severity="major",
    story="One cast for the kernel, none back: seven digits in a sixteen-digit answer.",
)
def float64_in_float32(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 50)), 10)


@trap(
    "dtype-widened",
    catches="float32 or float64 probabilities for narrower logits",
    severity="major",
    story="The accumulator's dtype leaked into the answer and doubled its bytes.",
)
def dtype_widened(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float16, np.float32):
        ask(submission, logits_of(rng, (2, 20), dtype), 3)


# --- the ranking ----------------------------------------------------------------------------------


@trap(
    "k-above-a-register-limit",
    catches="a fixed list of 32 candidates whatever k is",
    severity="critical",
    story="A graded kernel held its heap in registers and supported k ≤ 32; nothing said so.",
)
def k_above_a_register_limit(submission: Submission, rng: Rng) -> None:
    for k in (33, 257, 1025):
        ask(submission, logits_of(rng, (2, 1500), np.float32), k)


@trap(
    "short-list-per-tile",
    catches="a few candidates kept a tile: too few when all the best stand together",
    severity="critical",
    story="Local lists shorter than k are right on shuffled data; skewed rows lost their best.",
)
def short_list_per_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG), np.float32)
    for row, start in enumerate((100, LONG - 200)):
        logits[row, start : start + 64] += 50.0
    ask(submission, logits, 64)


@trap(
    "short-list-per-lane",
    catches="a few candidates kept for every 32nd element: too few when the best share a lane",
    severity="critical",
    story="Each lane of a warp kept its own short list; one lane held all the best.",
)
def short_list_per_lane(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, 4096), np.float32)
    logits[0, rng.integers(32) :: 32] += 50.0
    ask(submission, logits, 100)


@trap(
    "rows-of-a-block-merged",
    catches="candidates of one row kept when the next begins",
    severity="critical",
    story="A graded kernel merged the heaps of all warps of a block, though each had another row.",
)
def rows_of_a_block_merged(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (9, 30)) - 40.0 * np.arange(9)[:, None]
    ask(submission, logits, 6)


@trap(
    "maximum-of-another-row",
    catches="one maximum for the whole block of rows: quiet rows underflow to 0 / 0",
    severity="critical",
    story="The maximum was taken over all of the block instead of over each row.",
)
def maximum_of_another_row(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (4, 30)) + np.array([0.0, 3000.0, -3000.0, 10.0])[:, None]
    ask(submission, logits, 4)


@trap(
    "ties-to-the-higher-index",
    catches="equal logits in falling index order",
    severity="major",
    story="argsort()[::-1] reverses ties as well.",
)
def ties_to_the_higher_index(submission: Submission, rng: Rng) -> None:
    logits = np.repeat(rng.permutation(10).astype(np.float64), 3)[None]
    ask(submission, logits, 30)


@trap(
    "ties-across-tiles",
    catches="a later equal that displaces an earlier one when tiles are merged",
    severity="major",
    story="Merging with ≥ instead of >: the answer depended on the tile size.",
)
def ties_across_tiles(submission: Submission, rng: Rng) -> None:
    logits = np.zeros((1, LONG), np.float32)
    logits[0, rng.integers(0, LONG, 5)] = 1.0
    ask(submission, logits, 12)


@trap(
    "ties-at-the-cut",
    catches="an arbitrary choice among equals where k cuts through them",
    severity="major",
    story="Partitioning returns some of the equals; two runs gave two answers.",
)
def ties_at_the_cut(submission: Submission, rng: Rng) -> None:
    logits = np.full((3, 200), -1.5)
    logits[:, rng.permutation(200)[:4]] = np.arange(1.0, 5.0)
    ask(submission, logits, 9)


@trap(
    "all-equal",
    catches="equal values dropped as duplicates, or taken out together",
    severity="critical",
    story="Repeated argmax with all equals masked: a flat row had one winner and k − 1 holes.",
)
def all_equal(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, np.full((2, 100), rng.integers(-3, 4), dtype), 20)


@trap(
    "signed-zeros",
    catches="−0 ranked below +0",
    severity="minor",
    story="Sorting by float bits needs −0 made +0 first.",
)
def signed_zeros(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = np.where(rng.random((2, 40)) < 0.5, 0.0, -0.0).astype(dtype)
        logits[:, 0], logits[:, 1] = -0.0, 0.0
        ask(submission, logits, 15)


@trap(
    "ranked-by-probability",
    catches="ranking after the softmax, where small probabilities are all 0",
    severity="major",
    story="Underflow makes equals of logits that differ; the order below the top was by index.",
)
def ranked_by_probability(submission: Submission, rng: Rng) -> None:
    for dtype, depth in ((np.float16, 40.0), (np.float32, 300.0), (np.float64, 2000.0)):
        logits = (rng.permutation(50) - depth).astype(dtype)[None]
        logits[0, rng.integers(50)] = 0.0
        ask(submission, logits, 20)


@trap(
    "keys-of-fewer-bits",
    catches="ranking by logits rounded to fewer bits",
    severity="major",
    story="Packing an index into the low bits of the key picks wrong elements near the boundary.",
)
def keys_of_fewer_bits(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        step = np.finfo(dtype).eps
        logits = (1.0 + step * rng.permutation(64)).astype(dtype)[None]
        ask(submission, logits, 16)


@trap(
    "minus-infinity-left-out",
    catches="fewer than k answers when fewer than k logits are finite",
    severity="major",
    story="Overflowing candidate lists emitted the index −1, which was read as the last row.",
)
def minus_infinity_left_out(submission: Submission, rng: Rng) -> None:
    logits = np.full((2, LONG), -np.inf, np.float32)
    logits[0, rng.permutation(20)[:3]] = logits_of(rng, (1, 3), np.float32)
    logits[1, LONG - 3 :] = logits_of(rng, (1, 3), np.float32)
    ask(submission, logits[:1, :20], 8)
    ask(submission, logits, 8)  # the finite ones of row 1 come last, the fill comes first


@trap(
    "unsorted",
    catches="the right k in no order",
    severity="critical",
    story="The fastest public kernels return the k best unsorted and leave the sort to the caller.",
)
def unsorted(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    "late-last-place",
    catches="a threshold taken one rank too high: who would be the k-th in a late tile is missed",
    severity="critical",
    story="The filter compared with the wrong end of the sorted list, and only ever lost the last.",
)
def late_last_place(submission: Submission, rng: Rng) -> None:
    for k in (1, 2, 6):
        logits = -10.0 - rng.random((1, LONG))
        logits[0, : k - 1] = 5.0  # k − 1 sure winners, and one place open until the end
        logits[0, LONG - 1 - rng.integers(30)] = -5.0
        ask(submission, logits, k)


@trap(
    "index-within-the-tile",
    catches="indices that start again at 0 in every tile",
    severity="critical",
    story="The tile's offset was forgotten in the second place where an index is made.",
)
def index_within_the_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG), np.float32)
    logits[:, LONG // 2 :] += 30.0
    ask(submission, logits, 5)


@trap(
    "tail-dropped",
    catches="the last, incomplete tile never read",
    severity="critical",
    story="V is 50257 and a multiple of nothing: the last 81 tokens could not be generated.",
)
def tail_dropped(submission: Submission, rng: Rng) -> None:
    for vocabulary in (5, 33, 1025, LONG):
        logits = logits_of(rng, (1, vocabulary), np.float32)
        logits[0, -1] = 30.0
        ask(submission, logits, 2)


@trap(
    "tail-padded-with-zeros",
    catches="a tile filled up with zeros, which beat negative logits",
    severity="critical",
    story="Masked lanes must load −inf; zeros won the top-k and added to the sum.",
)
def tail_padded_with_zeros(submission: Submission, rng: Rng) -> None:
    for vocabulary in (5, 33, 1025, LONG):
        ask(submission, -np.abs(logits_of(rng, (1, vocabulary), np.float32)) - 30.0, 4)


@trap(
    "last-row-dropped",
    catches="rows beyond a multiple of the block never written",
    severity="critical",
    story="The grid was N // 4 blocks; the last rows held what the memory held before.",
)
def last_row_dropped(submission: Submission, rng: Rng) -> None:
    for rows in (1, 3, 17, 33):
        ask(submission, logits_of(rng, (rows, 20), np.float32), 3)


@trap(
    "short-indices",
    catches="indices in 16 bits, or an int32 answer",
    severity="major",
    story="Vocabularies passed 65536; the index type did not.",
)
def short_indices(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, 70001), np.float32)
    logits[0, 66000:] += 40.0
    ask(submission, logits, 3)


@trap(
    "index-dtype",
    catches="indices of another dtype than int64",
    severity="minor",
    story="An int32 index tensor is refused by the gather that comes next.",
)
def index_dtype(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 9), np.float32), 3)


@trap(
    "k-equals-v",
    catches="k = V refused, or one element short",
    severity="major",
    story="argpartition(−k − 1) is out of bounds exactly when k is V.",
)
def k_equals_v(submission: Submission, rng: Rng) -> None:
    for vocabulary in (1, 2, 31, 9000):
        ask(submission, logits_of(rng, (2, vocabulary), np.float32), vocabulary)


# --- what is refused ------------------------------------------------------------------------------


@trap(
    "nan-passes",
    catches="NaN ignored, or found only where it happens to be looked at",
    severity="critical",
    story="A NaN compares false with everything: heaps skip it, and a broken model goes unnoticed.",
)
def nan_passes(submission: Submission, rng: Rng) -> None:
    for place in (0, 1, LONG // 2, LONG - 1):
        logits = logits_of(rng, (2, LONG), np.float32)
        logits[1, place] = np.nan
        expect.raises(ValueError, partial(submission.softmax_topk, logits, 3))


@trap(
    "plus-infinity-passes",
    catches="+inf answered with NaN or with probability 1",
    severity="major",
    story="An overflow upstream looked like a very sure model.",
)
def plus_infinity_passes(submission: Submission, rng: Rng) -> None:
    for place in (0, LONG - 1):
        logits = logits_of(rng, (2, LONG), np.float32)
        logits[1, place] = np.inf
        expect.raises(ValueError, partial(submission.softmax_topk, logits, 3))


@trap(
    "all-masked-row-passes",
    catches="a row of nothing but −inf answered with NaN, zeros or a uniform guess",
    severity="major",
    story="A grammar without a legal continuation must be an error, not token 0.",
)
def all_masked_row_passes(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (3, 12), dtype)
        logits[2] = -np.inf
        expect.raises(ValueError, partial(submission.softmax_topk, logits, 2))


@trap(
    "k-clamped",
    catches="k below 1 or above V silently corrected",
    severity="major",
    story="k = 0 meant 'off' in one caller and 'nothing' in another.",
)
def k_clamped(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 6), np.float32)
    for k in (0, -1, 7, 600):
        expect.raises(ValueError, partial(submission.softmax_topk, logits, k))
    expect.raises(ValueError, partial(submission.softmax_topk, logits[:0], 7))


@trap(
    "integers-accepted",
    catches="integer or complex logits computed instead of refused",
    severity="minor",
    story="Quantised codes were ranked as if they were logits.",
)
def integers_accepted(submission: Submission, rng: Rng) -> None:
    for dtype in (np.int32, np.complex64):
        logits = rng.integers(0, 9, (2, 6)).astype(dtype)
        expect.raises(REFUSAL, partial(submission.softmax_topk, logits, 2))


@trap(
    "rank-ignored",
    catches="logits of rank 1 or 3 accepted",
    severity="minor",
    story="(B, T, V) logits went in, and T became the vocabulary.",
)
def rank_ignored(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (3, 6))
    for other in (logits[0], logits[None]):
        expect.raises(REFUSAL, partial(submission.softmax_topk, other, 2))


# --- inputs, state, memory ------------------------------------------------------------------------


@trap(
    "strided-logits",
    catches="memory read in its own order whatever the strides",
    severity="critical",
    story="Logits of the last positions are a strided slice; the kernel read the wrong rows.",
)
def strided_logits(submission: Submission, rng: Rng) -> None:
    wide = logits_of(rng, (12, 40), np.float32)
    for view in (wide[::3], wide[:, ::2], wide[::-1, ::-1], wide.T, wide[4:5].repeat(3, 0)):
        ask(submission, view, 5)
    ask(submission, np.broadcast_to(wide[:1], (5, 40)), 5)
    ask(submission, np.broadcast_to(wide[:, :1], (12, 9)), 5)


@trap(
    "logits-modified",
    catches="the maximum subtracted, or winners masked, in the caller's array",
    severity="critical",
    story="Repeated argmax wrote −inf into the logits; the sampler downstream saw the holes.",
)
def logits_modified(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (3, 30), dtype)
        _, after = submission.observe("softmax_topk", logits, 4)
        expect.equal(after[0], logits, "logits after the call")


@trap(
    "answer-remembered",
    catches="an answer kept from an earlier call of the same shape",
    severity="critical",
    story="A cache keyed by shape and by a few of the values.",
)
def answer_remembered(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 30), np.float32)
    ask(submission, logits, 4)
    changed = logits.copy()
    changed[1, 17] += 25.0
    ask(submission, changed, 4)
    ask(submission, logits, 4)


@trap(
    "no-rows-crash",
    catches="an empty batch that raises or comes back with another shape",
    severity="major",
    story="The last shard of a batch was empty and took the server down.",
)
def no_rows_crash(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (0, 11), np.float16), 4)


@trap(
    "matrix-materialised",
    catches="an N × V temporary: the very thing the fusion is there to avoid",
    severity="critical",
    story="Half of the graded answers made the whole softmax first, in one of its passes.",
)
def matrix_materialised(submission: Submission, rng: Rng) -> None:
    """Half a million logits, then four million: even a mask of one byte each shows."""
    _expect_no_growth(submission, overlapping(rng, 256, 2048), overlapping(rng, 1024, 4096))


@trap(
    "tile-grows-with-v",
    catches="a whole row copied, widened or sorted at once",
    severity="major",
    story="Memory O(V) a row is O(V · rows in flight) on a GPU.",
)
def tile_grows_with_v(submission: Submission, rng: Rng) -> None:
    """A row of a million equal logits, which take four bytes to hold."""
    row = np.broadcast_to(np.float32(rng.integers(-3, 4)), (1, 1 << 20))
    _expect_no_growth(submission, row[:, : 1 << 18], row)


@trap(
    "half-matrix-widened",
    catches="float16 logits cast to float32 all at once, which is an N × V temporary of its own",
    severity="major",
    story="The float32 path was fused; the float16 path began with a cast of the whole matrix.",
)
def half_matrix_widened(submission: Submission, rng: Rng) -> None:
    half = np.float16
    small, large = overlapping(rng, 256, 2048, half), overlapping(rng, 512, 4096, half)
    _expect_no_growth(submission, small, large)


@trap(
    "k-above-a-tile",
    catches="candidates taken for complete before k of them were seen: wrong once k exceeds a tile",
    severity="major",
    story="The first tile was assumed to fill the list; a larger k came back short.",
)
def k_above_a_tile(submission: Submission, rng: Rng) -> None:
    falling = -np.sort(-logits_of(rng, (1, LONG), np.float32))
    ask(submission, falling, LONG // 2)


@trap(
    "nan-among-masked",
    catches="a NaN unseen because all around it is −inf and the tile is skipped",
    severity="major",
    story="Tiles without a finite logit were skipped before they were looked at.",
)
def nan_among_masked(submission: Submission, rng: Rng) -> None:
    for start, place in ((LONG - 30, 7), (LONG - 30, LONG // 4), (0, LONG // 2)):
        logits = np.full((2, LONG), -np.inf, np.float32)
        logits[:, start : start + 30] = logits_of(rng, (2, 30), np.float32)
        logits[1, place] = np.nan
        expect.raises(ValueError, partial(submission.softmax_topk, logits, 3))


def _expect_no_growth(submission: Submission, small: np.ndarray, large: np.ndarray) -> None:
    """Peak memory by the kernel's count, in a process that has done nothing else before.

    The small problem pays for the tile, whatever its size; the large one may not need more.
    """
    fresh = submission.fresh()
    ask(fresh, small, 2)
    before = fresh.session.peak_bytes()
    answer = fresh.softmax_topk(large, 2)
    extra = fresh.session.peak_bytes() - before
    expect.that(extra <= GROWTH, f"peak memory rose by {extra} bytes with the size of the input")
    check(answer, large, 2)
