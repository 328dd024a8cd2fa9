"""Bugs of what a chunk of a prompt sees."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    PLAIN,
    QUANTISED,
    Rng,
    Twin,
    check_attention,
    prefill,
    twins,
)
from trapline.challenges.kv_cache.situations import BLIND, empty_before, one_chunk

ATTEND = "self.attend(seq, layer, q[part])"
STOP = "start + len(q[part])"


@trap(
    catches="chunked_prefill places its queries as if the layer had been empty before",
    severity="major",
    story="Query i sees positions 0 … i of the layer, whatever was there before the prompt.",
    seen=BLIND,
    control=empty_before,
    mutant=edit(ATTEND, f"attention(q[part], *(x[: {STOP}] for x in self.view(seq, layer)))"),
)
def prefill_starts_at_zero(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        prefill(submission, twin, twin.add(4), 6, 3)


@trap(
    catches="chunked_prefill does not attend to the positions that were there before",
    severity="major",
    story="The prompt is attended to as a sequence of its own.",
    control=empty_before,
    mutant=edit(ATTEND, f"attention(q[part], k[: {STOP}], v[: {STOP}])"),
)
def prefill_blind_to_the_prefix(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        prefill(submission, twin, twin.add(4), 6, 3)


@trap(
    catches="within a chunk every query sees the whole chunk",
    severity="major",
    story="The mask is left out because the chunks come in order.",
    mutant=edit(
        ATTEND,
        "np.concatenate([attention(q[i : i + 1], *self.view(seq, layer))\n"
        "                for i in range(len(q))[part]])",
    ),
)
def chunk_without_a_mask(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 6, 3)


@trap(
    catches="every chunk attends with the queries of the first one",
    severity="major",
    story="The slice of the queries does not move with the chunk.",
    control=one_chunk,
    mutant=edit(ATTEND, "self.attend(seq, layer, q[: len(q[part])])"),
)
def queries_of_the_first_chunk(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 6, 3)


@trap(
    catches="only the answers of the last chunk are returned",
    severity="major",
    story="Each chunk replaces the answer of the one before.",
    control=one_chunk,
    mutant=edit(
        "            out[part] = self.attend(seq, layer, q[part])\n        return out\n",
        "            out = self.attend(seq, layer, q[part])\n        return out\n",
    ),
)
def answer_of_the_last_chunk(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 6, 3)


@trap(
    catches="chunked_prefill appends the prompt twice",
    severity="major",
    story="The whole prompt is appended first, and each chunk once more.",
    mutant=insert_after(
        "        for start in range(0, len(q), chunk):\n",
        "            if start == 0:\n                self.append(seq, layer, k, v)\n",
    ),
)
def prompt_appended_twice(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 6, 3)


@trap(
    catches="a chunk attends before its own positions are stored",
    severity="major",
    story="append and attend in the wrong order: a query does not see its own chunk.",
    mutant=edits(
        (
            "            self.append(seq, layer, k[part], v[part])\n"
            "            out[part] = self.attend(seq, layer, q[part])\n",
            "            out[part] = self.attend(seq, layer, q[part])\n"
            "            self.append(seq, layer, k[part], v[part])\n",
        ),
    ),
)
def chunk_attends_before_it_is_stored(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(4), 6, 3)


@trap(
    catches="chunked_prefill attends to the rows as given, not to what a quantised cache holds",
    severity="major",
    story="The answer differs from that of append and attend by the quantisation error.",
    mutant=edits(
        (
            "        out = np.empty(q.shape, q.dtype)\n",
            "        out = np.empty(q.shape, q.dtype)\n        before = self.view(seq, layer)\n",
        ),
        (
            ATTEND,
            "attention(\n"
            "                q[part],\n"
            "                np.concatenate([before[0].astype(k.dtype), k[: start + chunk]]),\n"
            "                np.concatenate([before[1].astype(v.dtype), v[: start + chunk]]),\n"
            "            )",
        ),
    ),
)
def prefill_reads_unquantised_rows(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        prefill(submission, twin, twin.add(2), 6, 3)


@trap(
    catches="chunked_prefill writes to the first layer, whatever layer is asked for",
    severity="major",
    story="A constant layer index left over from a cache of one layer.",
    mutant=edits(
        (
            "            self.append(seq, layer, k[part], v[part])\n",
            "            self.append(seq, 0, k[part], v[part])\n",
        ),
        (ATTEND, "self.attend(seq, 0, q[part])"),
        (
            "pool changes nothing.\n        self._reserve(seq, layer, len(k))\n",
            "pool changes nothing.\n        self._reserve(seq, 0, len(k))\n",
        ),
    ),
)
def prefill_of_the_first_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        prefill(submission, twin, twin.add(), 4, 2, layer=1)
        twin.check()


@trap(
    catches="chunked_prefill is wrong with more query heads than kv heads",
    severity="major",
    story="The attention of a faster path repeats the list of heads instead of each head.",
    mutant=edit(
        ATTEND,
        "attention(q[part], *(np.tile(x, (1, q.shape[1] // x.shape[1], 1))\n"
        "                for x in self.view(seq, layer)))",
    ),
)
def prefill_tiles_the_heads(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1, heads=2, group=2)
    prefill(submission, twin, twin.add(), 4, 2)


@trap(
    catches="the answer of chunked_prefill is as long as whole chunks: behind it stand rows that "
    "were not asked for",
    severity="major",
    story="The answer is allocated by whole chunks, and a prompt need not fill its last one.",
    control=one_chunk,
    mutant=edit(
        "            out[part] = self.attend(seq, layer, q[part])\n        return out\n",
        "            out[part] = self.attend(seq, layer, q[part])\n"
        "        spare = -len(q) % chunk\n"
        "        return np.concatenate([out, np.zeros((spare, *q.shape[1:]), q.dtype)])\n",
    ),
)
def answer_padded_to_chunks(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 5, 3)


@trap(
    catches="a prefill of no positions fails",
    severity="minor",
    story="append refuses to add nothing, and np.concatenate to join nothing.",
    mutant=edit(
        "        if len(q) == 0:\n            return out\n",
        "        if len(q) == 0:\n"
        '            raise ValueError("need at least one array to concatenate")\n',
    ),
    seen=BLIND,
)
def prefill_of_nothing_fails(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    seq, q = twin.add(2), twin.queries(0)
    out = submission.chunked_prefill(twin.cache, seq, 0, q, twin.rows(0), twin.rows(0), 2)
    expect.equal(out, q, "a prefill of nothing")


@trap(
    catches="every chunk is placed where the prompt begins",
    severity="major",
    story="The offset of the chunk is left out: its queries see the beginning of the prompt only.",
    control=one_chunk,
    mutant=edits(
        (
            "        out = np.empty(q.shape, q.dtype)\n",
            "        out = np.empty(q.shape, q.dtype)\n        begin = self.counts[seq][layer]\n",
        ),
        (
            ATTEND,
            "attention(\n"
            "                q[part], *(x[: begin + len(q[part])] for x in self.view(seq, layer))\n"
            "            )",
        ),
    ),
)
def chunks_placed_at_the_start(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        prefill(submission, twin, twin.add(2), 6, 3)


@trap(
    catches="chunked_prefill holds the scores of all T·T pairs at once: in a chunk as long as the "
    "prompt, or whatever the chunk is",
    severity="major",
    story="A chunk may be larger than the prompt, and memory must not grow as T² even then: 3072 "
    "positions have 36 MiB of scores.",
    seen=BLIND,
    mutant=edit("min(chunk, MOST_QUERIES))", "chunk)"),
)
def scores_of_all_pairs(submission: Submission, rng: Rng) -> None:
    total, fresh = 3072, submission.fresh()
    twin = Twin(
        fresh, rng, "dense", layers=1, heads=1, page=64, pages=total // 64 + 1, dtype=np.float32
    )
    prefill(fresh, twin, twin.add(), 64, 64)  # libraries allocate what they need once
    seq = twin.add()
    q, k, v = twin.queries(total), twin.rows(total), twin.rows(total)
    running = fresh.session.running
    running.reset_peak()
    before = running.peak_bytes()
    out = fresh.chunked_prefill(twin.cache, seq, 0, q, k, v, total)
    rise, pairs = fresh.session.peak_bytes() - before, total * total
    check_attention(out[-2:], q[-2:], k, v, "chunked_prefill")
    expect.that(rise < 2 * pairs, f"memory rose by {rise >> 20} MiB, all scores are {pairs >> 18}")


_ANSWER = "        return out\n\n    def _register"


@trap(
    catches="chunked_prefill answers float64 for float32 queries",
    severity="minor",
    story="The array of all answers is made without a dtype.",
    mutant=edit("np.empty(q.shape, q.dtype)", "np.empty(q.shape)"),
    also=[edit(_ANSWER, _ANSWER.replace("out", "out.astype(float)"))],
)
def prefill_comes_out_wider(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1, dtype=np.float32):
        seq, q, k, v = twin.add(), twin.queries(3), twin.rows(3), twin.rows(3)
        out = submission.chunked_prefill(twin.cache, seq, 0, q, k, v, 2)
        expect.array(out, shape=q.shape, dtype=q.dtype, what="chunked_prefill")
