"""Bugs of the ranking."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import DTYPES, Rng, ask, logits_of
from trapline.challenges.fused_softmax_topk.situations import WRITTEN_BLIND, one_tile, sparse
from trapline.challenges.fused_softmax_topk.solution_lines import (
    ALL_MASKED,
    ALL_VALUES,
    ANSWER,
    CALL,
    CHECKED,
    FRESH,
    INDICES,
    KEPT,
    LOOP,
    MERGE,
    ORDER,
    PLACES,
    PROBS,
    TILE,
    VALUES,
    ZEROS,
)

# Nothing is left out before the sort.
_NO_CUT = ("    if values.size > k:\n", "    if False:\n")
_LARGEST_CUT = "kept = np.sort(np.argpartition(-values, k - 1)[:k])"
_UNFILTERED = (_NO_CUT, (FRESH, ALL_VALUES))
_LAST_EQUALS = (
    KEPT,
    "kept = np.flatnonzero(values > cut)\n"
    "        equal = np.flatnonzero(values == cut)[kept.size - k :]\n"
    "        kept = np.sort(np.concatenate((kept, equal)))",
)


@trap(
    catches="candidates of one row kept when the next begins",
    severity="major",
    story="The list of a block is merged though each of its warps has another row.",
    mutant=edits(
        (LOOP, "    kept = np.empty(0), np.empty(0, np.int64)\n    for row in range(rows):\n"),
        (CALL, "probs[row], indices[row], kept = _one_row(logits[row], k, kept)"),
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
        (CALL, "probs[row], indices[row] = _one_row(logits[row], k, logits)"),
        ("def _one_row(logits: Floats, k: int)", "def _one_row(logits, k, block)"),
        (
            MERGE,
            MERGE
            + "\n    total, largest = total * _weights(largest, block.max()), float(block.max())",
        ),
    ),
    seen=WRITTEN_BLIND,
)
def maximum_of_another_row(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (4, 30)) + np.array([0.0, 3000.0, -3000.0, 10.0])[:, None]
    ask(submission, logits, 4)


# --- ties -----------------------------------------------------------------------------------------


@trap(
    catches="equal logits in descending index order",
    severity="critical",
    story="argsort()[::-1] reverses ties as well.",
    mutant=edits(
        _NO_CUT,
        (FRESH, ALL_VALUES),
        (ORDER, "order = np.lexsort((-places, -values))[:k]"),
    ),
    seen=WRITTEN_BLIND,
)
def ties_to_the_higher_index(submission: Submission, rng: Rng) -> None:
    """Threes of equals, and a k that cuts through one."""
    logits = np.repeat(rng.permutation(10).astype(np.float64), 3)[None]
    ask(submission, logits, 14)


@trap(
    catches="the right entries, with equal logits in descending index order",
    severity="major",
    story="The cut takes the first of the equals, and the sort of the winners turns them round.",
    mutant=edit(
        ANSWER,
        f"order = np.lexsort((-places, -best))\n    {ANSWER.replace('best', 'best[order]')}[order]",
    ),
    seen=WRITTEN_BLIND,
)
def winners_in_reversed_ties(submission: Submission, rng: Rng) -> None:
    logits = np.repeat(rng.permutation(10).astype(np.float64), 3)[None]
    ask(submission, logits, 14)


@trap(
    catches="where k cuts through a group of equals, the last of them are taken",
    severity="major",
    story="The cut takes equals from the wrong end; what it takes is in index order.",
    mutant=edit(*_LAST_EQUALS),
    # The second form takes those of later tiles, too.
    also=[edits(_LAST_EQUALS, (FRESH, ALL_VALUES))],
    seen=WRITTEN_BLIND,
)
def last_of_the_equals(submission: Submission, rng: Rng) -> None:
    logits = np.full((1, 12), -1.5)
    logits[0, rng.permutation(12)[:2]] = 1.0, 2.0
    ask(submission, logits, 5)


@trap(
    catches="the first k entries at or above the k-th largest logit are taken: equals at the cut "
    "push out larger ones to their right",
    severity="major",
    story="Equals may only take the places that larger ones leave.",
    mutant=edit(
        ANSWER,
        "cut, starts = best[-1], range(0, logits.size, TILE)\n"
        "    parts = [s + np.flatnonzero(logits[s : s + TILE] >= cut)[:k] for s in starts]\n"
        "    places = np.concatenate(parts)[:k]\n"
        "    places = places[np.argsort(-logits[places], kind='stable')]\n"
        "    best = logits[places].astype(np.float64)\n"
        f"    {ANSWER}",
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def first_at_or_above_the_cut(submission: Submission, rng: Rng) -> None:
    """Several equals, and a better one to their right; k = 2 leaves no equals to be sorted."""
    logits = np.full((1, 12), -1.5)
    logits[0, 6 + rng.integers(6)] = 2.0
    ask(submission, logits, 2)


def _only_the_first(count: str) -> Mutant:
    """Of the k places of a row only so many are filled; the others hold zeros."""
    return edits(
        *ZEROS,
        (
            CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        values = logits[row][where]\n"
            f"        count = {count}\n"
            "        probs[row, :count], indices[row, :count] = some[:count], where[:count]",
        ),
    )


@trap(
    catches="of the entries equal to the k-th largest logit, one or all are left out: the last "
    "places stay empty, or the row does not fit",
    severity="major",
    story="A strict comparison with the cut, or with the number of equals that still fit.",
    mutant=_only_the_first("k - 1"),
    also=[
        _only_the_first("np.sum(values > values[-1])"),
        # Without places for them: nothing fits the row of the answer.
        edit(KEPT, "kept = values > cut"),
    ],
    seen=WRITTEN_BLIND,
)
def cut_left_out(submission: Submission, rng: Rng) -> None:
    logits = np.full((1, 12), -1.5)
    logits[0, rng.permutation(12)[:2]] = 1.0, 2.0
    ask(submission, logits, 5)


@trap(
    catches="the list of candidates begins with zeros, which beat negative logits",
    severity="major",
    story="A list that is to be filled with larger values must begin with −inf.",
    mutant=edit(
        "best, places = np.empty(0), np.empty(0, np.int64)",
        "best, places = np.zeros(k), np.zeros(k, np.int64)",
    ),
    also=[_only_the_first("np.sum(values > 0.0)")],
)
def candidates_begin_with_zeros(submission: Submission, rng: Rng) -> None:
    logits = -1.0 - abs(logits_of(rng, (1, 12)))
    logits[0, rng.permutation(12)[:2]] = 1.0, 2.0
    ask(submission, logits, 4)


@trap(
    catches="an arbitrary choice among equals where k cuts through them",
    severity="major",
    story="Partitioning returns any of the equal elements, so the answer depends on the algorithm.",
    mutant=edits(
        (KEPT, "kept = np.sort(np.argpartition(values, values.size - k)[-k:])"),
        (FRESH, ALL_VALUES),
    ),
    also=[
        edit(KEPT, _LARGEST_CUT),
        edits((KEPT, _LARGEST_CUT), ("TILE = 8192", "TILE = 16384")),
        # Only a list that is full is cut.
        edit(
            KEPT,
            "is_full = not start and values.size == TILE\n"
            "        kept = np.argpartition(-values, k - 1)[:k] if is_full else values >= cut",
        ),
    ],
    seen=WRITTEN_BLIND,
)
def ties_at_the_cut(submission: Submission, rng: Rng) -> None:
    logits = np.full((3, 200), -1.5)
    logits[:, rng.permutation(200)[:4]] = np.arange(1.0, 5.0)
    ask(submission, logits, 9)
    first, second = rng.permutation(32)[:2]
    ask(submission, sparse({first: 2.0, second: 1.0}), 4)


def _winners_sorted(order: str) -> Mutant:
    """The winners, in the order of their columns, are sorted in this way."""
    return edit(
        ANSWER,
        "places = np.sort(places)\n"
        "    best = logits[places].astype(np.float64)\n"
        f"    order = {order}\n"
        "    best, places = best[order], places[order]\n"
        f"    {ANSWER}",
    )


@trap(
    catches="a sort that is not stable: equal logits come in arbitrary order",
    severity="major",
    story="NumPy's default sort keeps the order of equals only in arrays of up to 16 elements.",
    mutant=edits(*_UNFILTERED, (ORDER, "order = np.argsort(-values)[:k]")),
    also=[
        edits(*_UNFILTERED, (ORDER, "order = np.argsort(values)[::-1][:k]")),
        _winners_sorted("np.argsort(-best)"),
        _winners_sorted("np.argsort(best)[::-1]"),
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def unstable_sort(submission: Submission, rng: Rng) -> None:
    ask(submission, rng.integers(0, 3, (1, 300)).astype(np.float64), 250)


@trap(
    catches="equal values dropped as duplicates, or taken out together",
    severity="major",
    story="Repeated argmax that masks all equal elements leaves one winner in a flat row.",
    mutant=edits(
        (KEPT, "kept = np.sort(np.unique(values, return_index=True)[1])"),
        *ZEROS,
        (
            CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        probs[row, : some.size], indices[row, : some.size] = some, where",
        ),
    ),
)
def all_equal(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, np.full((2, 12), rng.integers(-3, 4), dtype), 5)


@trap(
    catches="−0 ranked below +0",
    severity="minor",
    story="Sorting by float bits needs −0 made +0 first.",
    mutant=edits(*_UNFILTERED, (ORDER, "order = np.lexsort((np.signbit(values), -values))[:k]")),
    seen=WRITTEN_BLIND,
)
def signed_zeros(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = np.where(rng.random((2, 40)) < 0.5, 0.0, -0.0).astype(dtype)
        logits[:, 0], logits[:, 1] = -0.0, 0.0
        ask(submission, logits, 15)


# --- by what, and in which order ------------------------------------------------------------------


@trap(
    catches="ranking after the softmax, where small probabilities are all 0",
    severity="major",
    story="Underflow makes different logits equal, and the order below the top is by index.",
    mutant=edits(
        (ORDER, "order = np.argsort(-np.exp(values - np.max(values)), kind='stable')[:k]"),
        *_UNFILTERED,
    ),
)
def ranked_by_probability(submission: Submission, rng: Rng) -> None:
    logits = rng.permutation(50)[None] - 2000.0
    logits[0, rng.integers(50)] = 0.0
    ask(submission, logits, 20)


@trap(
    catches="the right entries, put in order by probability: those that underflow stay in index "
    "order",
    severity="minor",
    story="The winners are chosen by logit and sorted by exp(logit − max).",
    mutant=edit(
        ANSWER,
        "order = np.argsort(places)\n"
        "    weights = _weights(best[order], largest)\n"
        "    order = order[np.argsort(-weights, kind='stable')]\n"
        "    return _weights(best[order], largest) / total, places[order]",
    ),
    seen=WRITTEN_BLIND,
)
def winners_sorted_by_probability(submission: Submission, rng: Rng) -> None:
    logits = rng.permutation(50)[None] - 2000.0
    logits[0, rng.integers(50)] = 0.0
    ask(submission, logits, 20)


@trap(
    catches="ranking by logits rounded to fewer bits",
    severity="major",
    story="Packing an index into the low bits of the key picks wrong elements near the boundary.",
    mutant=edits(
        *_UNFILTERED, (ORDER, "order = np.argsort(-np.float16(values), kind='stable')[:k]")
    ),
)
def keys_of_fewer_bits(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        step = np.finfo(dtype).eps
        logits = (1.0 + step * rng.permutation(64)).astype(dtype)[None]
        ask(submission, logits, 16)


@trap(
    catches="float64 logits are rounded to float32: close ones become ties",
    severity="major",
    story="Tiles are converted to the kernel's dtype, whatever the dtype of the logits.",
    mutant=edit(TILE, TILE.replace("float64", "float32") + ".astype(np.float64)"),
    # The second form sums them as they are.
    also=[edit(VALUES, f"{VALUES}.astype(np.float32).astype(np.float64)")],
    seen=WRITTEN_BLIND,
)
def float64_logits_rounded(submission: Submission, rng: Rng) -> None:
    """Four logits that differ by 1e-9, the best one last: all are 1 in float32."""
    ask(submission, 1.0 + 1e-9 * np.array([[*rng.permutation(3), 3]]), 2)


@trap(
    catches="float64 logits are computed in float32 from the start",
    severity="major",
    story="Tiles are converted to the kernel's dtype, whatever the dtype of the logits.",
    mutant=edits(
        (TILE, TILE.replace("float64", "float32")),
        ("best, places = np.empty(0),", "best, places = np.empty(0, np.float32),"),
    ),
    # The tiles alone; the winners are held in float64.
    also=[edit(TILE, TILE.replace("float64", "float32"))],
    seen=WRITTEN_BLIND,
)
def float64_narrowed(submission: Submission, rng: Rng) -> None:
    """Finite in float64, infinite in float32."""
    ask(submission, rng.permutation(6)[None] * 1e300, 3)


@trap(
    catches="the right k elements in arbitrary order",
    severity="critical",
    story="The fastest public kernels return the k best unsorted and leave the sort to the caller.",
    mutant=edit(
        ANSWER,
        "order = np.argsort(places)\n"
        "    return _weights(best[order], largest) / total, places[order]",
    ),
    seen=WRITTEN_BLIND,
)
def unsorted(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    catches="probabilities in order of rank, indices in order of columns: they do not belong "
    "together",
    severity="critical",
    story="Only one of the two arrays is sorted.",
    mutant=edit(ANSWER, ANSWER.replace(", places", ", np.sort(places)")),
    seen=WRITTEN_BLIND,
)
def only_probabilities_sorted(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    catches="indices in order of rank, probabilities in order of columns: they do not belong "
    "together",
    severity="major",
    story="Only one of the two arrays is sorted.",
    mutant=edit(ANSWER, ANSWER.replace("(best,", "(best[np.argsort(places)],")),
)
def only_indices_sorted(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    catches="the k best in ascending order, worst first",
    severity="major",
    story="A sort in ascending order is cut but not turned round.",
    mutant=edit(ANSWER, "return _weights(best[::-1], largest) / total, places[::-1]"),
)
def worst_first(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    catches="the k smallest logits instead of the largest",
    severity="major",
    story="A sort in ascending order is cut at the wrong end.",
    mutant=edits(*_UNFILTERED, (ORDER, "order = np.argsort(values, kind='stable')[:k]")),
)
def smallest_instead_of_largest(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    catches="sorted by place, not by logit: the first k columns are returned",
    severity="critical",
    story="The last key of lexsort is the first to sort by.",
    mutant=edits(*_UNFILTERED, (ORDER, "order = np.argsort(places, kind='stable')[:k]")),
    seen=WRITTEN_BLIND,
)
def first_columns_returned(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


@trap(
    catches="ranking by |logit|",
    severity="major",
    story="Large negative logits win.",
    mutant=edits(*_UNFILTERED, (ORDER, "order = np.argsort(-np.abs(values), kind='stable')[:k]")),
)
def ranked_by_magnitude(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 64)), 10)


# --- what fills up, and the indices ---------------------------------------------------------------


@trap(
    catches="fewer than k answers when fewer than k logits are finite: −1 takes the place of an "
    "index",
    severity="critical",
    story="Candidate lists that are not full can return the index −1, which reads as the last "
    "element.",
    mutant=edits(
        (PROBS, "probs = np.zeros((rows, k), logits.dtype)"),
        (INDICES, "indices = np.full((rows, k), -1)"),
        (
            CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        finite = int(np.isfinite(logits[row][where]).sum())\n"
            "        probs[row, :finite], indices[row, :finite] = some[:finite], where[:finite]",
        ),
    ),
    seen=WRITTEN_BLIND,
)
def minus_infinity_left_out(submission: Submission, rng: Rng) -> None:
    logits = np.full((2, 20), -np.inf)
    logits[:, rng.permutation(20)[:3]] = logits_of(rng, (2, 3))
    ask(submission, logits, 8)


@trap(
    catches="where −inf logits fill up, the index 0 is repeated",
    severity="major",
    story="Candidate lists that are not full keep the zeros they began with.",
    mutant=edits(
        *ZEROS,
        (
            CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        finite = int(np.isfinite(logits[row][where]).sum())\n"
            "        probs[row, :finite], indices[row, :finite] = some[:finite], where[:finite]",
        ),
    ),
    also=[
        # The list begins as the lowest finite number: −inf never enters it, and its free places
        # are ranked as logits of 0.
        edits(
            (
                ALL_MASKED,
                "    if largest == -np.inf:\n        largest = float(np.finfo(logits.dtype).min)\n"
                "    places = np.where(np.isneginf(best), 0, places)\n"
                "    best = np.where(np.isneginf(best), 0.0, best)\n"
                '    order = np.argsort(-best, kind="stable")\n'
                "    best, places = best[order], places[order]\n"
                "    if False:\n",
            ),
        )
    ],
    seen=WRITTEN_BLIND,
)
def filled_with_index_0(submission: Submission, rng: Rng) -> None:
    logits = np.full((2, 20), -np.inf)
    logits[:, rng.permutation(20)[:3]] = logits_of(rng, (2, 3))
    ask(submission, logits, 8)


@trap(
    catches="−inf logits that fill up come in descending index order",
    severity="major",
    story="They are equal, and equals come in index order.",
    mutant=edit(
        ANSWER,
        "masked = np.flatnonzero(np.isneginf(logits))[::-1] if k < TILE else places\n"
        "    finite = int(np.isfinite(best).sum())\n"
        "    places = np.concatenate((places[:finite], masked[: k - finite]))\n"
        f"    {ANSWER}",
    ),
)
def fill_in_reversed_order(submission: Submission, rng: Rng) -> None:
    logits = np.full((2, 20), -np.inf)
    logits[:, rng.permutation(20)[:3]] = logits_of(rng, (2, 3))
    ask(submission, logits, 8)


@trap(
    catches="indices in 16 bits",
    severity="major",
    story="Vocabularies exceed 65536 entries, the range of a 16-bit index.",
    mutant=insert_after(CALL, "\n        indices[row] %= 65536"),
    control=one_tile,
)
def short_indices(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, 70001))
    logits[0, 66000:] += 40.0
    ask(submission, logits, 3)


@trap(
    catches="indices of another dtype than int64",
    severity="minor",
    story="An int32 index tensor is refused by the gather that comes next.",
    mutant=edit(INDICES, "indices = np.empty((rows, k), np.int32)"),
    also=[
        edit(INDICES, f"indices = np.empty((rows, k), np.{dtype})")
        for dtype in ("uint64", "uint32", "float64")
    ],
    seen=WRITTEN_BLIND,
)
def index_dtype(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 9)), 3)


@trap(
    catches="indices that count from 1",
    severity="major",
    story="Positions of a language or a file that counts from 1.",
    mutant=edit(PLACES, PLACES.replace("start + fresh", "start + fresh + 1")),
)
def indices_from_1(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 9)), 3)


@trap(
    catches="k = V is refused or raises an error",
    severity="major",
    story="The bound on k is strict, or a search for the k-th entry runs beyond the last one.",
    mutant=edit("if not 1 <= k <= logits.shape[1]:", "if not 1 <= k < logits.shape[1]:"),
    seen=WRITTEN_BLIND,
    also=[
        insert_after(
            CHECKED, f"    if k == logits.shape[1]:\n        raise {error}('beyond the last')\n"
        )
        for error in ("IndexError", "OverflowError")
    ],
)
def k_equals_v(submission: Submission, rng: Rng) -> None:
    for vocabulary in (2, 31, 9000, 1):
        ask(submission, logits_of(rng, (2, vocabulary)), vocabulary)
