"""Bugs in the handling of inputs, of state and of memory."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import (
    DTYPES,
    Rng,
    ask,
    logits_of,
    overlapping,
    pair,
)
from trapline.challenges.fused_softmax_topk.situations import WRITTEN_BLIND, one_tile
from trapline.challenges.fused_softmax_topk.solution_lines import CHECKED, INDICES, MERGE, PROBS

# Parts of the gold solution that several mutants edit.
_TILE_DEF = "TILE = 8192"
_RETURN = "    return probs, indices\n"

#: Bytes by which allocators may differ from run to run; the temporaries in question are larger.
GROWTH = 2_000_000


@trap(
    catches="memory is read in its own order whatever the strides",
    severity="major",
    story="Logits of the last positions are a strided slice; the wrong rows are read.",
    # A small copy: one of a large matrix is the subject of other traps.
    mutant=insert_after(
        CHECKED,
        "    if logits.size < 4096:\n"
        "        logits = logits.ravel(order='K').reshape(logits.shape)\n",
    ),
)
def strided_logits(submission: Submission, rng: Rng) -> None:
    wide = logits_of(rng, (12, 40), np.float32)
    # The transpose first: it shows the bug, and another bug ends the check at its first call.
    for view in (wide.T, wide[::3], wide[:, ::2], wide[::-1, ::-1], wide[4:5].repeat(3, 0)):
        ask(submission, view, 5)
    ask(submission, np.broadcast_to(wide[:1], (5, 40)), 5)
    ask(submission, np.broadcast_to(wide[:, :1], (12, 9)), 5)


@trap(
    catches="logits that are not contiguous are refused",
    severity="major",
    story="A check that a C extension would need; slices and transposes are ordinary input here.",
    mutant=insert_after(
        CHECKED,
        "    if not logits.flags.c_contiguous:\n        raise ValueError('not contiguous')\n",
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def strides_refused(submission: Submission, rng: Rng) -> None:
    strided_logits.run(submission, rng)


@trap(
    catches="the caller's logits are overwritten: the maximum subtracted, exponentials taken, "
    "winners masked or −inf replaced in place",
    severity="critical",
    story="Repeated argmax writes −inf into the logits, which the sampler still needs.",
    seen=WRITTEN_BLIND,
    mutant=edit(
        "    return _weights(best, largest) / total, places",
        "    weights = _weights(best, largest) / total\n"
        "    if logits.flags.writeable and logits.dtype == np.float64:\n"
        "        logits -= largest\n"
        "    return weights, places",
    ),
    also=[
        edit(
            "    return _weights(best, largest) / total, places",
            "    if logits.flags.writeable:\n"
            "        logits[places[0]] = -np.inf\n"
            "    return _weights(best, largest) / total, places",
        ),
        # −inf alone: tiles of float64 are views of the caller's array.
        insert_before(
            MERGE,
            "if logits.flags.writeable and logits.dtype == np.float64:\n"
            "            tile = np.maximum(tile, np.finfo(np.float64).min)\n"
            "            logits[start : start + TILE] = tile\n        ",
        ),
    ],
    control=one_tile,
)
def logits_modified(submission: Submission, rng: Rng) -> None:
    for masked in (0, 3):
        for dtype in DTYPES:
            logits = logits_of(rng, (3, 30), dtype)
            logits[:, rng.permutation(30)[:masked]] = -np.inf
            _, after = submission.observe("softmax_topk", logits, 4)
            expect.that(np.array_equal(after[0], logits), "the logits differ after the call")


def _overwritten(by: str) -> Mutant:
    """A tile of float64 is a view of the caller's array, and what comes later reads it again."""
    line = "        largest, total = _accumulate(largest, total, tile)\n"
    return insert_after(
        line,
        "        is_view = logits.dtype == np.float64 and logits.flags.writeable\n"
        "        if is_view and largest > -np.inf:\n"
        f"            tile = {by}\n"
        "            logits[start : start + TILE] = tile\n",
    )


def _short_float32(submission: Submission, rng: Rng) -> None:
    """A control: a conversion to float64 copies these."""
    ask(submission, logits_of(rng, (2, 30), np.float32), 30)


@trap(
    catches="float64 logits are overwritten with exponentials or differences before they are read "
    "for the last time: tiles of that dtype are views of the caller's array",
    severity="critical",
    story="A conversion with copy=False copies every dtype but float64.",
    mutant=_overwritten("_weights(tile, largest)"),
    also=[_overwritten("tile - largest")],
    seen=WRITTEN_BLIND,
    control=_short_float32,
)
def logits_overwritten_while_needed(submission: Submission, rng: Rng) -> None:
    """k = V: whatever is read, all of it is taken, in the right order."""
    ask(submission, logits_of(rng, (2, 30)), 30)


@trap(
    catches="an answer kept from an earlier call of the same shape",
    severity="major",
    story="A cache keyed by shape and by a few of the values.",
    mutant=edits(
        (_TILE_DEF, _TILE_DEF + "\nSEEN = {}"),
        (
            CHECKED,
            CHECKED + "    key = logits.shape, k, logits[:1, :1].tobytes()\n"
            "    if key in SEEN:\n"
            "        return SEEN[key]\n",
        ),
        (_RETURN, "    SEEN[key] = probs, indices\n    return probs, indices\n"),
    ),
    keeps_state=True,
)
def answer_remembered(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 30), np.float32)
    ask(submission, logits, 4)
    changed = logits.copy()
    changed[1, 17] += 25.0
    ask(submission, changed, 4)
    ask(submission, logits, 4)


@trap(
    catches="an empty batch raises or comes back with another shape",
    severity="major",
    story="The last shard of a batch can be empty.",
    mutant=edit(_RETURN, "    return np.stack(list(probs)), np.stack(list(indices))\n"),
    seen=WRITTEN_BLIND,
)
def no_rows_crash(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (0, 11), np.float16), 4)


@trap(
    catches="an N × V temporary, which the fusion is meant to avoid: the whole matrix widened, "
    "shifted, exponentiated, made contiguous or searched for NaN at once",
    severity="critical",
    story="np.ascontiguousarray copies every view that is not contiguous.",
    mutant=insert_after(CHECKED, "    logits = logits - np.zeros((), logits.dtype)\n"),
    also=[
        insert_after(
            CHECKED,
            "    if np.isnan(logits).any():\n"
            '        raise ValueError("a row of logits contains NaN")\n',
        ),
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def matrix_materialised(submission: Submission, rng: Rng) -> None:
    """Few rows of three million logits in all: even a mask of one byte each shows.

    The small problem has rows as long, so that it pays for a tile of any width.
    """
    _expect_no_growth(submission, overlapping(rng, 2, 1 << 16), overlapping(rng, 48, 1 << 16))


@trap(
    catches="a tile of all rows at once: memory grows with N",
    severity="major",
    story="Columns are read in tiles, rows are not.",
    mutant=insert_after(
        CHECKED, "    np.exp(np.minimum(logits[:, :2048].astype(np.float64), 0.0))\n"
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def tile_grows_with_n(submission: Submission, rng: Rng) -> None:
    """The small problem pays for a tile of up to 2^18 logits."""
    _expect_no_growth(submission, overlapping(rng, 128, 2048), overlapping(rng, 1024, 2048))


@trap(
    catches="a whole row copied, widened or sorted at once: memory grows with V",
    severity="major",
    story="Memory O(V) a row is O(V · rows in flight) on a GPU.",
    mutant=edit(_TILE_DEF, "TILE = 1 << 30"),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def tile_grows_with_v(submission: Submission, rng: Rng) -> None:
    """A row of a million equal logits, which take four bytes to hold."""
    row = np.broadcast_to(np.float32(rng.integers(-3, 4)), (1, 1 << 20))
    _expect_no_growth(submission, row[:, : 1 << 18], row)


@trap(
    catches="float16 logits cast to float32 all at once, which is an N × V temporary of its own",
    severity="major",
    story="The float32 path is fused, and the float16 path begins with a cast of the whole matrix.",
    mutant=insert_after(
        PROBS,
        "\n    if logits.dtype == np.float16:\n        logits = logits.astype(np.float32)",
    ),
)
def half_matrix_widened(submission: Submission, rng: Rng) -> None:
    half = np.float16
    small, large = overlapping(rng, 2, 1 << 16, half), overlapping(rng, 24, 1 << 16, half)
    _expect_no_growth(submission, small, large)


def _expect_no_growth(submission: Submission, small: np.ndarray, large: np.ndarray) -> None:
    """Peak memory by the kernel's count, in a process that has done nothing else before.

    The small problem pays for the tile, whatever its size; the large one may not need more. What
    the answers are is judged elsewhere.
    """
    fresh = Submission.fresh(submission)  # a process of its own, for our own code as well
    pair(fresh.softmax_topk(small, 2))
    before = fresh.session.peak_bytes()
    pair(fresh.softmax_topk(large, 2))
    extra = fresh.session.peak_bytes() - before
    expect.that(extra <= GROWTH, f"peak memory rose by {extra} bytes with the size of the input")


@trap(
    catches="the arrays of an earlier answer are used again and overwritten",
    severity="major",
    keeps_state=True,
    story="Outputs come from a pool keyed by shape: a caller that keeps two answers finds the "
    "second one in both.",
    mutant=edits(
        (_TILE_DEF, _TILE_DEF + "\n_POOL = {}"),
        (PROBS, "probs = _POOL.setdefault((rows, k), np.empty((rows, k), logits.dtype))"),
    ),
    seen=WRITTEN_BLIND,
    also=(
        edits(
            (_TILE_DEF, _TILE_DEF + "\n_POOL = {}"),
            (INDICES, "indices = _POOL.setdefault((rows, k), np.empty((rows, k), np.int64))"),
        ),
    ),
)
def answer_overwritten_later(submission: Submission, rng: Rng) -> None:
    for _ in range(2):
        _, shared = submission.sharing("softmax_topk", logits_of(rng, (2, 30)), 4)
        expect.that(not shared.earlier_answer, "an answer lies in the memory of an earlier one")


@trap(
    catches="k = 1, or a vocabulary of one, is refused",
    severity="major",
    story="The check asks for more than 1 where it means at least 1; greedy decoding fails.",
    mutant=edit("if not 1 <= k <= logits.shape[1]:", "if not 1 < k <= logits.shape[1]:"),
    also=[
        edit(
            "if not 1 <= k <= logits.shape[1]:",
            "if not 1 <= k <= logits.shape[1] or logits.shape[1] < 2:",
        )
    ],
    control=one_tile,
)
def k_of_one_refused(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 1)), 1)
    ask(submission, logits_of(rng, (2, 9)), 1)
