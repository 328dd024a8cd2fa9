"""Bugs in rarely visited parts of the contract."""

from functools import partial

import numpy as np

from trapline.arena.errors import SubmissionRaised
from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    PAGED,
    Rng,
    Twin,
    check_attention,
    twins,
)
from trapline.challenges.kv_cache.situations import (
    BAD,
    BLIND,
    claimed_bytes,
    layers_in_step,
    never_forked,
    rows_of_one_size,
)


@trap(
    catches="masked scores are a large negative number that real scores fall below",
    severity="major",
    story="−1e9 in place of −inf: large outlier channels push visible scores below the mask.",
    mutant=edit("= -np.inf", "= -1e9"),
)
def finite_mask(submission: Submission, rng: Rng) -> None:
    for size in (300.0, 1e5):
        twin = Twin(submission, rng)
        seq = twin.add()
        k, v = np.full((3, 2, 4), size), twin.rows(3)
        v[2] = 100.0
        twin.put(seq, 0, k, v)
        q = np.full((3, 2, 4), -size)
        check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="a write that begins at a page's start goes into a page that a fork shares",
    severity="major",
    story="Another layer has opened that page before the fork; only half-full pages are copied.",
    control=never_forked,
    mutant=edit(
        "if self.holders[table[i]] > 1]",
        "if self.holders[table[i]] > 1 and start % self.page_size]",
    ),
)
def page_boundary_taken_for_a_new_page(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(4)
        twin.append(seq, 3, [0])
        child = twin.fork(seq)
        twin.append(child, 2, [1])
        twin.append(seq, 2, [1])
        twin.check()


@trap(
    catches="a refused append has already taken a page for the copy of a shared one",
    severity="major",
    story="Copy-on-write runs before new pages are counted, so each retry loses a page.",
    mutant=insert_before(
        "        if len(shared) + missing > len(self.free_pages):\n",
        "        for i in shared[: len(self.free_pages)]:\n"
        "            table[i] = self._own_copy(table[i])\n"
        "        shared = [i for i in shared if self.holders[table[i]] > 1]\n",
    ),
    seen=BLIND,
)
def copies_before_it_counts(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=3):
        child = twin.fork(twin.add(6))
        rows = twin.rows(7)
        twin.refuses(MemoryError, "append", child, 0, rows, rows)
        twin.add(4)
        twin.check()


@trap(
    catches="a fork that is refused for lack of room is counted all the same",
    severity="major",
    story="The child is registered before its copy fails; its positions are never released.",
    mutant=edit(
        "        self._check_fork(seq)\n        child = self._register(list(self.counts[seq]))\n",
        "        child = self._register(list(self.counts[seq]))\n        self._check_fork(seq)\n",
    ),
)
def refused_fork_takes_room(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("quantized", 8)), pages=2):
        seq = twin.add(5)
        try:
            child = twin.cache.fork(seq)
        except SubmissionRaised as raised:
            expect.that("MemoryError" in {raised.kind, *raised.bases}, str(raised))
        else:
            twin.cache.free(child)
        twin.append(seq, 3)
        twin.check()


_COPIED_ROWS = "[tuple(a.copy() for a in fields) for fields in self.rows[seq]]"


@trap(
    catches="a fork shares the array of a contiguous cache, and both write behind its end",
    severity="major",
    story="Growing arrays have spare rows, and parent and child both use the next one.",
    mutant=edit(_COPIED_ROWS, "list(self.rows[seq])"),
    also=[
        # With room to spare from the first append on.
        edits(
            (_COPIED_ROWS, "list(self.rows[seq])"),
            ("min(max(stop, len(held[0]) * 3 // 2), self.page_size * self.num_pages)", room),
        )
        for room in (
            "min(2 * stop, start + self._capacity_left(layer))",
            "self.page_size * self.num_pages",
        )
    ],
    seen=BLIND,
)
def fork_shares_spare_room(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(4)
        for _ in range(2):
            twin.append(seq, 1)
            child = twin.fork(seq)
            twin.append(child, 1)
            twin.append(seq, 1)
        twin.check()


@trap(
    catches="keep of all positions in their order returns at once, with a layer still ahead",
    severity="major",
    story="A shortcut for the common case in which every token of a draft is accepted.",
    control=layers_in_step,
    mutant=insert_after(
        "        indices = self._check_indices(seq, indices)\n",
        "        if np.array_equal(indices, np.arange(self.length(seq))):\n            return\n",
    ),
)
def keep_of_everything_does_nothing(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(4)
        twin.append(seq, 2, [0])
        twin.keep(seq, range(4))
        twin.check()
        twin.append(seq, 1)
        twin.check()


def _floor(least: str) -> Mutant:
    """No scale is smaller than this."""
    return edit("(largest / self.top)", f"np.maximum(largest / self.top, {least})")


@trap(
    catches="a floor under the scale lies above the scale of the smallest rows allowed",
    severity="minor",
    story="An epsilon of 1e-5, as used for a layer norm, is too large here; so is one of 1e-4.",
    seen=BLIND,
    mutant=_floor("1e-5 * (largest > 0)"),
    also=[_floor(least) for least in ("1e-4", "np.finfo(np.float16).tiny", "1e-2 / self.top")],
    control=rows_of_one_size,
)
def floor_near_the_smallest_row(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 8, width=256)
        rows = rng.uniform(-1e-3, 1e-3, (2, 2, 256))
        rows[..., 7] = 1.001e-3
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="a growing array doubles past what the pool can ever hold",
    severity="minor",
    story="The last token before the limit doubles an array that can never be filled.",
    mutant=edit(
        "min(max(stop, len(held[0]) * 3 // 2), self.page_size * self.num_pages)",
        "max(stop, len(held[0]) * 2)",
    ),
)
def spare_rows_beyond_the_pool(submission: Submission, rng: Rng) -> None:
    for kind, bits in EACH:
        twin = Twin(submission, rng, kind, bits, width=64, page=3, pages=43, dtype=np.float32)
        twin.append(twin.add(128), 1)
        rows = 129 * 2 * 2 * 2
        plain = int(1.5 * rows * 64 * 4) + 8192
        limit = rows * (bits * 64 // 8 + 8) + 64 * 43 * 2 + 4096 if bits else plain
        claim = claimed_bytes(twin)
        expect.that(claim <= limit, f"{kind} takes {claim} bytes when full, more than {limit}")


@trap(
    catches="a prefill of no positions succeeds for sequences and layers that do not exist",
    severity="minor",
    story="The early return for an empty batch comes before the checks.",
    dimension="robustness",
    mutant=edit(
        "        self._check_place(seq, layer)\n"
        "        self._check_queries(q)\n"
        "        self._check_rows(k, v)\n"
        "        if len(q) != len(k):",
        "        if len(q) == 0 == len(k):\n"
        "            return np.empty(q.shape, q.dtype)\n"
        "        self._check_place(seq, layer)\n"
        "        self._check_queries(q)\n"
        "        self._check_rows(k, v)\n"
        "        if len(q) != len(k):",
    ),
)
def prefill_of_nothing_anywhere(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq, gone = twin.add(1), twin.add(1)
        twin.free(gone)
        nothing = (twin.queries(0), twin.rows(0), twin.rows(0), 2)
        call = partial(submission.chunked_prefill, twin.cache)
        expect.raises(KeyError, call, gone, 0, *nothing)
        expect.raises(BAD, call, seq, 2, *nothing)


@trap(
    catches="the answer to an empty float32 batch is float64",
    severity="minor",
    story="An early return of np.zeros without a dtype widens everything joined with it.",
    mutant=edit("return np.zeros_like(q)", "return np.zeros(q.shape)"),
)
def empty_answers_are_wider(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, dtype=np.float32):
        seq, no_queries = twin.add(2), twin.queries(0)
        rows = twin.rows(0)
        out = submission.chunked_prefill(twin.cache, seq, 0, no_queries, rows, rows, 3)
        for got in (twin.cache.attend(seq, 0, no_queries), out):
            expect.array(got, shape=no_queries.shape, dtype=np.float32, what="an empty answer")


@trap(
    catches="the largest score is taken over positions that the query does not see",
    severity="major",
    story="With the maximum taken before the mask, a large hidden score leaves 0 / 0.",
    mutant=edit(
        "    scores[..., np.arange(positions) > last_visible] = -np.inf\n"
        "    scores -= scores.max(axis=-1, keepdims=True)\n",
        "    scores -= scores.max(axis=-1, keepdims=True)\n"
        "    scores[..., np.arange(positions) > last_visible] = -np.inf\n",
    ),
    seen=BLIND,
)
def softmax_underflow(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    seq = twin.add()
    k, v = np.zeros((3, 2, 4)), twin.rows(3)
    k[2] = 1000.0
    twin.put(seq, 0, k, v)
    q = np.ones((3, 2, 4))
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="the smallest size that is allowed, such as a page or a chunk of 1, is refused",
    severity="major",
    story="The check asks for more than 1 where it means at least 1.",
    mutant=edit(
        "is_int(size) and size >= 1 for size in shape",
        "is_int(size) and size > 1 for size in shape",
    ),
    also=[
        edit("size >= 1 for size in shape)", f"size >= 1 for size in shape) or shape[{place}] == 1")
        for place in range(4)
    ]
    + [edit("not is_int(chunk) or chunk < 1", "not is_int(chunk) or chunk <= 1")],
)
def least_size_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1, heads=1, width=1, page=1, pages=4):
        seq = twin.add(2)
        twin.check()
        rows = twin.rows(1)
        submission.chunked_prefill(twin.cache, seq, 0, twin.queries(1), rows, rows, 1)
