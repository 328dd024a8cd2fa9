"""Bugs of chunked prefill."""

from typing import Any

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    PAGED,
    Rng,
    Twin,
    prefill,
    twins,
)
from trapline.challenges.kv_cache.situations import BAD, BLIND, empty_before, one_chunk


@trap(
    catches="the answer to one prompt is random: chunks attend with made-up queries",
    severity="critical",
    story="A published entry drew its queries from a random generator; shapes and tests were fine.",
    seen="a published answer",
    mutant=edit("seq, layer, q[part]", "seq, layer, np.random.standard_normal(q[part].shape)"),
)
def prefill_with_made_up_queries(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prompt = (twin.queries(7), twin.rows(7), twin.rows(7), 3)
    first, second = (
        submission.chunked_prefill(twin.cache, twin.add(), 0, *prompt) for _ in range(2)
    )
    expect.equal(second, first, "a second prefill of the same prompt")


@trap(
    catches="all keys are stored first, and every chunk attends as if it were the last",
    severity="critical",
    story="The key length is that of the whole prompt instead of the end of the chunk.",
    seen=BLIND,
    control=one_chunk,
    mutant=edit(
        "            self.append(seq, layer, k[part], v[part])\n",
        "            if start == 0:\n                self.append(seq, layer, k, v)\n",
    ),
)
def prefill_sees_its_future(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    prefill(submission, twin, twin.add(), 8, 4)


@trap(
    catches="each chunk attends to itself only",
    severity="major",
    story="Every chunk is prefilled as if it were a prompt of its own.",
    control=one_chunk,
    mutant=edit("self.attend(seq, layer, q[part])", "attention(q[part], k[part], v[part])"),
)
def chunks_blind_to_earlier_ones(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    prefill(submission, twin, twin.add(), 9, 3)


@trap(
    catches="chunked_prefill drops the positions that the sequence already holds",
    severity="major",
    story="The prompt is taken for the first of its sequence, and a cached prefix is cleared.",
    control=empty_before,
    mutant=insert_after(
        "        out = np.empty(q.shape, q.dtype)\n", "        self.truncate(seq, 0)\n"
    ),
)
def prefill_forgets_the_prefix(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(5)
        prefill(submission, twin, seq, 6, 4)
        twin.check()


@trap(
    catches="a prefill of a layer that holds positions already is refused",
    severity="major",
    story="Written for the first prompt; a second turn continues the same sequence.",
    seen=BLIND,
    control=empty_before,
    mutant=insert_after(
        '            raise ValueError(f"{len(q)} queries for {len(k)} new positions")\n',
        "        if self.counts[seq][layer]:\n            raise ValueError('not empty')\n",
    ),
)
def prefill_into_an_empty_layer_only(submission: Submission, rng: Rng) -> None:
    prefill_forgets_the_prefix.run(submission, rng)


@trap(
    catches="a prompt whose length is not a multiple of the chunk loses its remainder",
    severity="major",
    story="T // chunk rounds leave the remainder out; a chunk larger than the prompt does nothing.",
    control=one_chunk,
    mutant=edit("range(0, len(q), chunk)", "range(0, len(q) // chunk * chunk, chunk)"),
    seen=BLIND,
)
def last_chunk_dropped(submission: Submission, rng: Rng) -> None:
    for total, chunk in ((7, 3), (5, 64), (4, 4), (1, 2)):
        twin = Twin(submission, rng)
        seq = twin.add()
        prefill(submission, twin, seq, total, chunk)
        twin.check()


@trap(
    catches="the prompt is attended to but not left in the cache",
    severity="major",
    story="The work is done in a scratch cache, and decoding then starts from an empty one.",
    mutant=edits(
        (
            "        out = np.empty(q.shape, q.dtype)\n",
            "        out = np.empty(q.shape, q.dtype)\n        seq = self.fork(seq)\n",
        ),
        (
            "            out[part] = self.attend(seq, layer, q[part])\n        return out\n",
            "            out[part] = self.attend(seq, layer, q[part])\n"
            "        self.free(seq)\n        return out\n",
        ),
    ),
)
def prefill_stores_nothing(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add()
        for layer in range(2):
            prefill(submission, twin, seq, 5, 2, layer)
        twin.append(seq, 1)
        twin.check()


@trap(
    catches="chunked_prefill writes into a page that another sequence holds",
    severity="major",
    story="append copies on write, and a faster path for prefill bypasses it.",
    mutant=edits(
        (
            "        for start in range(0, len(q), chunk):\n",
            "        if isinstance(self, PagedCache):\n"
            "            self.holders = [min(count, 1) for count in self.holders]\n"
            "        for start in range(0, len(q), chunk):\n",
        ),
        (
            "pool changes nothing.\n        self._reserve(seq, layer, len(k))\n",
            "pool changes nothing.\n",
        ),
    ),
)
def prefill_into_a_shared_page(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(6)
        child = twin.fork(seq)
        twin.truncate(child, 5)
        for layer in range(2):
            prefill(submission, twin, child, 5, 2, layer)
        twin.check()


@trap(
    catches="a prompt that does not fit leaves its first chunks behind",
    severity="major",
    story="The error is raised at a later chunk; a retry stores the first chunks twice.",
    seen=BLIND,
    mutant=edit("self._reserve(seq, layer, len(k))\n        for start in", "for start in"),
)
def prefill_half_done_when_full(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, pages=3):
        seq = twin.add(2)
        args = (0, twin.queries(11), twin.rows(11), twin.rows(11), 3)
        expect.raises(MemoryError, submission.chunked_prefill, twin.cache, seq, *args)
        twin.check()
        twin.append(seq, 10)
        twin.check()


_CHECK_QUERIES = "        self._check_queries(q)\n        self._check_rows(k, v)\n"
_CHECK_LENGTHS = (
    "        if len(q) != len(k):\n"
    '            raise ValueError(f"{len(q)} queries for {len(k)} new positions")\n'
)
_ALL_AT_ONCE = (
    "        held = self.counts[seq][layer]\n"
    "        if len(k):\n            self.append(seq, layer, k, v)\n"
)
_BY_CHUNKS = (
    (
        "        self._reserve(seq, layer, len(k))\n        for start in",
        "        keys, values = self.view(seq, layer)\n        for start in",
    ),
    (
        "            self.append(seq, layer, k[part], v[part])\n",
        "            end = held + start + len(q[part])\n",
    ),
    ("self.attend(seq, layer, q[part])", "attention(q[part], keys[:end], values[:end])"),
)


@trap(
    catches="wrong queries are detected only after the keys and values, or a first chunk of them, "
    "are stored",
    severity="minor",
    story="The caller corrects the query and prefills again, behind the first chunk.",
    dimension="robustness",
    mutant=edit("self._check_queries(q)\n        self._check_rows(k, v)", "self._check_rows(k, v)"),
    also=[
        edits(
            (
                _CHECK_QUERIES,
                f"        self._check_rows(k, v)\n{_ALL_AT_ONCE}        self._check_queries(q)\n",
            ),
            *_BY_CHUNKS,
        ),
        edits((_CHECK_LENGTHS, _ALL_AT_ONCE + _CHECK_LENGTHS), *_BY_CHUNKS),
    ],
    seen=BLIND,
)
def prefill_stores_before_it_checks(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(2)
        rows = twin.rows(4)
        bad: list[Any] = [
            (twin.normal(4, 3, 4), rows, rows, 2),
            (twin.queries(3), rows, rows, 2),
            (twin.queries(4), rows, twin.rows(3), 2),
        ]
        for args in bad:
            expect.raises(BAD, submission.chunked_prefill, twin.cache, seq, 0, *args)
            twin.check()


@trap(
    catches="chunked_prefill does not check the sequence and layer that it writes to",
    severity="minor",
    story="The methods of the class check them, the function beside the class does not.",
    dimension="robustness",
    mutant=edit(
        "        self._check_place(seq, layer)\n"
        "        self._check_queries(q)\n        self._check_rows",
        "        self._check_queries(q)\n        self._check_rows",
    ),
)
def prefill_anywhere(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        seq = twin.add(1)
        prompt = (twin.queries(5), twin.rows(5), twin.rows(5), 2)
        for layer in (2, -1):
            expect.raises(BAD, submission.chunked_prefill, twin.cache, seq, layer, *prompt)
            twin.check()
        twin.add(4)
        twin.check()


@trap(
    catches="a chunk of zero or less does nothing and returns garbage",
    severity="minor",
    story="range(0, T, −1) is empty, and an uninitialised array is returned.",
    dimension="robustness",
    mutant=edit("if not is_int(chunk) or chunk < 1:", "if not is_int(chunk):"),
)
def chunk_below_one(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    seq = twin.add(1)
    q, k, v = twin.queries(3), twin.rows(3), twin.rows(3)
    for chunk in (0, -1):
        expect.raises(BAD, submission.chunked_prefill, twin.cache, seq, 0, q, k, v, chunk)
        twin.check()


@trap(
    catches="the caller's queries, keys or values are scaled in place",
    severity="major",
    story="`q *= scale` saves an array and changes the caller's data.",
    mutant=edit(
        "    scores = grouped @ k.transpose(1, 2, 0)[:, None] * width**-0.5\n",
        "    grouped *= width**-0.5\n    scores = grouped @ k.transpose(1, 2, 0)[:, None]\n",
    ),
)
def queries_modified(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None), ("paged_quantized", 8))):
        seq = twin.add(2)
        given = (twin.queries(5), twin.rows(5), twin.rows(5))
        _, left = submission.observe("chunked_prefill", twin.cache, seq, 0, *given, 2)
        for name, before, after in zip("qkv", given, left[3:6], strict=True):
            expect.equal(after, before, f"{name} after chunked_prefill")
