"""Bugs of the ranking."""

import numpy as np

from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import DTYPES, LONG, Rng, ask, logits_of


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
