"""Bugs of the ranking."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import DTYPES, LONG, Rng, ask, logits_of
from trapline.challenges.fused_softmax_topk.solution_lines import ANSWER, FRESH, PROBS, TILE

# Parts of the gold solution that several mutants edit.
_INDICES = "indices = np.empty((rows, k), np.int64)"
_LOOP = "    for row in range(rows):\n"
_CALL = "probs[row], indices[row] = _one_row(logits[row], k)"
_MERGE = "best, places = _merge(best, places, tile, start, k)"
_PLACES = "places = np.concatenate((places, start + fresh))"
_KEPT = "kept = values >= cut"
_ORDER = 'order = np.argsort(-values, kind="stable")[:k]'
_ALL_VALUES = "fresh = np.arange(tile.size)"
_ZEROS = (
    (PROBS, "probs = np.zeros((rows, k), logits.dtype)"),
    (_INDICES, "indices = np.zeros((rows, k), np.int64)"),
)


@trap(
    catches="a fixed list of 32 candidates whatever k is",
    severity="critical",
    story="A graded kernel held its heap in registers and supported k ≤ 32; nothing said so.",
    mutant=edits(
        *_ZEROS,
        (_CALL, "probs[row, :32], indices[row, :32] = _one_row(logits[row], min(k, 32))"),
    ),
)
def k_above_a_register_limit(submission: Submission, rng: Rng) -> None:
    for k in (33, 257, 1025):
        ask(submission, logits_of(rng, (2, 1500), np.float32), k)


@trap(
    catches="only a few candidates are kept per tile: too few when all the best are in one",
    severity="critical",
    story="Local lists shorter than k are right on shuffled data and lose elements of skewed rows.",
    mutant=edit(FRESH, "fresh = np.sort(np.argsort(-tile, kind='stable')[: max(16, k // 4)])"),
)
def short_list_per_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG), np.float32)
    for row, start in enumerate((100, LONG - 200)):
        logits[row, start : start + 64] += 50.0
    ask(submission, logits, 64)


@trap(
    catches="only a few candidates are kept for every 32nd element: too few when the best share a "
    "lane",
    severity="critical",
    story="Each lane of a warp keeps its own short list, and one lane can hold all the best.",
    mutant=edit(
        FRESH,
        "lanes = [np.arange(i, tile.size, 32) for i in range(32)]\n"
        "    short = [lane[np.argsort(-tile[lane], kind='stable')[:8]] for lane in lanes]\n"
        "    fresh = np.sort(np.concatenate(short))",
    ),
)
def short_list_per_lane(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, 4096), np.float32)
    logits[0, rng.integers(32) :: 32] += 50.0
    ask(submission, logits, 100)


@trap(
    catches="candidates of one row kept when the next begins",
    severity="critical",
    story="A graded kernel merged the heaps of all warps of a block, though each had another row.",
    mutant=edits(
        (_LOOP, "    kept = np.empty(0), np.empty(0, np.int64)\n    for row in range(rows):\n"),
        (_CALL, "probs[row], indices[row], kept = _one_row(logits[row], k, kept)"),
        ("def _one_row(logits: Floats, k: int)", "def _one_row(logits, k, kept)"),
        ("best, places = np.empty(0), np.empty(0, np.int64)", "best, places = kept"),
        (ANSWER, "return _weights(best, largest) / total, places, (best, places)"),
    ),
)
def rows_of_a_block_merged(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (9, 30)) - 40.0 * np.arange(9)[:, None]
    ask(submission, logits, 6)


@trap(
    catches="one maximum for a whole block of rows: rows with small logits underflow to 0 / 0",
    severity="critical",
    story="The maximum is taken over the block instead of over each row.",
    mutant=edits(
        (_CALL, "probs[row], indices[row] = _one_row(logits[row], k, logits)"),
        ("def _one_row(logits: Floats, k: int)", "def _one_row(logits, k, block)"),
        (
            _MERGE,
            _MERGE
            + "\n    total, largest = total * _weights(largest, block.max()), float(block.max())",
        ),
    ),
)
def maximum_of_another_row(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (4, 30)) + np.array([0.0, 3000.0, -3000.0, 10.0])[:, None]
    ask(submission, logits, 4)


@trap(
    catches="equal logits in descending index order",
    severity="major",
    story="argsort()[::-1] reverses ties as well.",
    mutant=edit(_ORDER, "order = np.argsort(values, kind='stable')[::-1][:k]"),
)
def ties_to_the_higher_index(submission: Submission, rng: Rng) -> None:
    logits = np.repeat(rng.permutation(10).astype(np.float64), 3)[None]
    ask(submission, logits, 30)


@trap(
    catches="a later equal that displaces an earlier one when tiles are merged",
    severity="major",
    story="Merging with ≥ instead of >: the answer depends on the tile size.",
    mutant=edits(
        (FRESH, _ALL_VALUES),
        (
            "values = np.concatenate((best, tile[fresh]))",
            "values = np.concatenate((tile[fresh], best))",
        ),
        (_PLACES, "places = np.concatenate((start + fresh, places))"),
    ),
)
def ties_across_tiles(submission: Submission, rng: Rng) -> None:
    logits = np.zeros((1, LONG), np.float32)
    logits[0, rng.integers(0, LONG, 5)] = 1.0
    ask(submission, logits, 12)


@trap(
    catches="an arbitrary choice among equals where k cuts through them",
    severity="major",
    story="Partitioning returns any of the equal elements, so the answer depends on the algorithm.",
    mutant=edits(
        (_KEPT, "kept = np.sort(np.argpartition(values, values.size - k)[-k:])"),
        (FRESH, _ALL_VALUES),
    ),
)
def ties_at_the_cut(submission: Submission, rng: Rng) -> None:
    logits = np.full((3, 200), -1.5)
    logits[:, rng.permutation(200)[:4]] = np.arange(1.0, 5.0)
    ask(submission, logits, 9)


@trap(
    catches="equal values dropped as duplicates, or taken out together",
    severity="critical",
    story="Repeated argmax that masks all equal elements leaves one winner in a flat row.",
    mutant=edits(
        (_KEPT, "kept = np.sort(np.unique(values, return_index=True)[1])"),
        *_ZEROS,
        (
            _CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        probs[row, : some.size], indices[row, : some.size] = some, where",
        ),
    ),
)
def all_equal(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, np.full((2, 100), rng.integers(-3, 4), dtype), 20)


@trap(
    catches="−0 ranked below +0",
    severity="minor",
    story="Sorting by float bits needs −0 made +0 first.",
    mutant=edit(_ORDER, "order = np.lexsort((np.signbit(values), -values))[:k]"),
)
def signed_zeros(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = np.where(rng.random((2, 40)) < 0.5, 0.0, -0.0).astype(dtype)
        logits[:, 0], logits[:, 1] = -0.0, 0.0
        ask(submission, logits, 15)


@trap(
    catches="ranking after the softmax, where small probabilities are all 0",
    severity="major",
    story="Underflow makes different logits equal, and the order below the top is by index.",
    mutant=edits(
        (_ORDER, "order = np.argsort(-np.exp(values - np.max(values)), kind='stable')[:k]"),
        ("    if values.size > k:\n", "    if False:\n"),
        (FRESH, _ALL_VALUES),
    ),
)
def ranked_by_probability(submission: Submission, rng: Rng) -> None:
    for dtype, depth in ((np.float16, 40.0), (np.float32, 300.0), (np.float64, 2000.0)):
        logits = (rng.permutation(50) - depth).astype(dtype)[None]
        logits[0, rng.integers(50)] = 0.0
        ask(submission, logits, 20)


@trap(
    catches="ranking by logits rounded to fewer bits",
    severity="major",
    story="Packing an index into the low bits of the key picks wrong elements near the boundary.",
    mutant=edit(_ORDER, "order = np.argsort(-np.float16(values), kind='stable')[:k]"),
)
def keys_of_fewer_bits(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        step = np.finfo(dtype).eps
        logits = (1.0 + step * rng.permutation(64)).astype(dtype)[None]
        ask(submission, logits, 16)


@trap(
    catches="fewer than k answers when fewer than k logits are finite",
    severity="major",
    story="Candidate lists that are not full can return the index −1, which reads as the last "
    "element.",
    mutant=edits(
        (PROBS, "probs = np.zeros((rows, k), logits.dtype)"),
        (_INDICES, "indices = np.full((rows, k), -1)"),
        (
            _CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        finite = int(np.isfinite(logits[row][where]).sum())\n"
            "        probs[row, :finite], indices[row, :finite] = some[:finite], where[:finite]",
        ),
    ),
)
def minus_infinity_left_out(submission: Submission, rng: Rng) -> None:
    logits = np.full((2, LONG), -np.inf, np.float32)
    logits[0, rng.permutation(20)[:3]] = logits_of(rng, (1, 3), np.float32)
    logits[1, LONG - 3 :] = logits_of(rng, (1, 3), np.float32)
    ask(submission, logits[:1, :20], 8)
    ask(submission, logits, 8)  # the finite ones of row 1 come last, the fill comes first


@trap(
    catches="the right k elements in arbitrary order",
    severity="critical",
    story="The fastest public kernels return the k best unsorted and leave the sort to the caller.",
    mutant=edit(
        ANSWER,
        "order = np.argsort(places)\n"
        "    return _weights(best[order], largest) / total, places[order]",
    ),
)
def unsorted(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    catches="a threshold one rank too high: the k-th best is missed when it is in a late tile",
    severity="critical",
    story="The filter compares with the wrong end of the sorted list and loses only the last "
    "element.",
    mutant=edit(FRESH, FRESH.replace("best[-1]", "best[-2:][0]")),
)
def late_last_place(submission: Submission, rng: Rng) -> None:
    for k in (1, 2, 6):
        logits = -10.0 - rng.random((1, LONG))
        logits[0, : k - 1] = 5.0  # k − 1 sure winners, and one place open until the end
        logits[0, LONG - 1 - rng.integers(30)] = -5.0
        ask(submission, logits, k)


@trap(
    catches="indices that start again at 0 in every tile",
    severity="critical",
    story="The tile's offset is added in one of the two places where an index is made.",
    mutant=edit(_PLACES, "places = np.concatenate((places, fresh))"),
)
def index_within_the_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG), np.float32)
    logits[:, LONG // 2 :] += 30.0
    ask(submission, logits, 5)


@trap(
    catches="the last, incomplete tile is never read",
    severity="critical",
    story="V = 50257 is not a multiple of the usual tiles: the last tokens could never be "
    "generated.",
    mutant=edits(
        (
            "for start in range(0, logits.size, TILE):",
            "for start in range(0, max(logits.size - logits.size % 32, 1), 32):",
        ),
        (TILE, "tile = logits[start : start + 32].astype(np.float64)"),
    ),
)
def tail_dropped(submission: Submission, rng: Rng) -> None:
    for vocabulary in (5, 33, 1025, LONG):
        logits = logits_of(rng, (1, vocabulary), np.float32)
        logits[0, -1] = 30.0
        ask(submission, logits, 2)


@trap(
    catches="a tile is filled up with zeros, which beat negative logits",
    severity="critical",
    story="Masked lanes must load −inf; zeros win the top-k and add to the sum.",
    mutant=insert_after(TILE, "\n        tile = np.pad(tile, (0, TILE - tile.size))"),
)
def tail_padded_with_zeros(submission: Submission, rng: Rng) -> None:
    for vocabulary in (5, 33, 1025, LONG):
        ask(submission, -np.abs(logits_of(rng, (1, vocabulary), np.float32)) - 30.0, 4)


@trap(
    catches="rows beyond a multiple of the block are never written",
    severity="critical",
    story="A grid of N // 4 blocks leaves the last rows uninitialised.",
    mutant=edits(
        (_LOOP, "    for row in range(rows - rows % 2):\n"),
        *_ZEROS,
    ),
)
def last_row_dropped(submission: Submission, rng: Rng) -> None:
    for rows in (1, 3, 17, 33):
        ask(submission, logits_of(rng, (rows, 20), np.float32), 3)


@trap(
    catches="indices in 16 bits, or an int32 answer",
    severity="major",
    story="Vocabularies exceed 65536 entries, the range of a 16-bit index.",
    mutant=insert_after(_CALL, "\n        indices[row] %= 65536"),
)
def short_indices(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, 70001), np.float32)
    logits[0, 66000:] += 40.0
    ask(submission, logits, 3)


@trap(
    catches="indices of another dtype than int64",
    severity="minor",
    story="An int32 index tensor is refused by the gather that comes next.",
    mutant=edit(_INDICES, "indices = np.empty((rows, k), np.int32)"),
)
def index_dtype(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 9), np.float32), 3)


@trap(
    catches="k = V refused, or one element short",
    severity="major",
    story="argpartition(−k − 1) is out of bounds exactly when k is V.",
    mutant=edit("if not 1 <= k <= logits.shape[1]:", "if not 1 <= k < logits.shape[1]:"),
)
def k_equals_v(submission: Submission, rng: Rng) -> None:
    for vocabulary in (1, 2, 31, 9000):
        ask(submission, logits_of(rng, (2, vocabulary), np.float32), vocabulary)
