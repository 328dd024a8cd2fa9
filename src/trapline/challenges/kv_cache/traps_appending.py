"""Bugs of appending, and of keeping sequences apart."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    METHODS,
    PAGED,
    PLAIN,
    Rng,
    Twin,
    check_attention,
    twins,
)
from trapline.challenges.kv_cache.situations import BAD, BLIND, layers_in_step


@trap(
    catches="an append of several positions stores the first one only",
    severity="critical",
    story="A winning entry stored keys[:, :, 0, :]: right for decoding, wrong for a prompt.",
    seen="a published answer",
    mutant=edits(
        ("self.codec.encode(k) + self.codec.encode(v)", "self._first(k) + self._first(v)"),
        (
            "    def _register(",
            "    def _first(self, rows):\n"
            "        return self.codec.encode(np.repeat(rows[:1], len(rows), axis=0))\n\n"
            "    def _register(",
        ),
    ),
)
def append_one_token_only(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.add(3)
        twin.check()


@trap(
    catches="an append that crosses a page border wraps inside its first page",
    severity="major",
    story="The page is looked up once per append instead of once per position.",
    mutant=edit("table[positions // self.page_size]", "table[positions[:1] // self.page_size]"),
)
def append_across_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(3)
        twin.append(seq, 7)
        twin.check()


@trap(
    catches="all layers write to the first one's storage",
    severity="major",
    story="A constant layer index left over from a placeholder.",
    mutant=edit("pool[layer, pages, slots] =", "pool[0, pages, slots] ="),
)
def layers_overwrite_each_other(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=3):
        twin.add(5)
        twin.check()


@trap(
    catches="appending to one layer moves the write position of the others",
    severity="major",
    story="The length is kept per sequence, so the second layer of a step starts one position too "
    "late.",
    mutant=edit(
        "self.counts[seq][layer] = start + len(k)",
        "self.counts[seq] = [start + len(k)] * self.num_layers",
    ),
)
def one_counter_for_all_layers(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None)), layers=3):
        seq = twin.add()
        for layer in (2, 0, 1):
            twin.append(seq, 2, [layer])
            twin.check()


@trap(
    catches="length() is that of the first layer: it counts positions that others do not have yet",
    severity="major",
    story="The length is read from layer 0, which is ahead of the others during a step.",
    control=layers_in_step,
    mutant=edit("min(self.counts[seq])", "self.counts[seq][0]"),
    seen=BLIND,
)
def length_of_the_first_layer(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        for counts in ((3, 1, 2), (1, 3, 2), (2, 3, 1)):
            twin = Twin(submission, rng, kind, bits, layers=3)
            seq = twin.add()
            for layer, n in enumerate(counts):
                twin.append(seq, n, [layer])
            expect.equal(int(twin.cache.length(seq)), 1, "length() of uneven layers")


@trap(
    catches="rows are read in memory order instead of index order",
    severity="major",
    story="Models usually pass keys as a transposed view of (G,n,D).",
    mutant=edit(
        "self.codec.encode(k) +", 'self.codec.encode(np.ravel(k, order="K").reshape(k.shape)) +'
    ),
)
def strided_input(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        seq = twin.add()
        k = twin.normal(2, 5, 4).transpose(1, 0, 2)
        v = twin.normal(4, 2, 10).transpose(2, 1, 0)[::2]
        twin.put(seq, 0, k, v)
        twin.check()
        q = twin.normal(4, 2, 3).transpose(2, 1, 0)
        check_attention(twin.cache.attend(seq, 0, q), q, k, v, "attend with a strided query")


@trap(
    catches="an unquantised cache rounds what it stores",
    severity="major",
    story="The pool is allocated in one dtype, whatever the input's dtype is.",
    seen=BLIND,
    mutant=edit("        return (x,)\n", "        return (x.astype(np.float32),)\n"),
)
def float64_stored_as_float32(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        twin.add(3)
        twin.check()


@trap(
    catches="float32 in, float64 out",
    severity="minor",
    story="A float64 scratch array is returned and doubles the memory of everything that follows.",
    mutant=edit("fields[0].astype(dtype)", "fields[0].astype(np.float64)"),
)
def float32_comes_back_wider(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, dtype=np.float32):
        twin.add(3)
        twin.check()


@trap(
    catches="rows of the wrong width or head count are broadcast into the cache",
    severity="major",
    story="Assignment into a pool broadcasts an axis of length one without an error.",
    dimension="robustness",
    mutant=edit("if rows.shape[1:] != (self.heads, self.width):", "if False:"),
)
def narrow_rows_are_stretched(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(2)
        for shape in ((3, 2, 1), (3, 1, 4), (3, 2, 5), (3, 4), (1, 3, 2, 4)):
            rows = twin.normal(*shape)
            twin.refuses(BAD, "append", seq, 0, rows, rows)


@trap(
    catches="v with another number of positions than k is accepted",
    severity="major",
    story="A value with one position is broadcast over all the new keys.",
    dimension="robustness",
    mutant=edit("if len(k) != len(v):", "if False:"),
)
def one_value_for_many_keys(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(2)
        twin.refuses(BAD, "append", seq, 0, twin.rows(3), twin.rows(1))
        twin.refuses(BAD, "append", seq, 0, twin.rows(1), twin.rows(3))


@trap(
    catches="integer or complex keys are cast silently",
    severity="minor",
    story="Codes that are already quantised can be appended to a float cache unnoticed.",
    dimension="robustness",
    mutant=edits(
        ("if not isinstance(x, np.ndarray) or x.dtype not in FLOATS:", "if False:"),
        ("or (self.dtype is not None and self.dtype != k.dtype)", ""),
    ),
)
def integer_rows_accepted(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None), ("paged_quantized", 8))):
        # Before the first rows, when the cache knows no dtype yet, and after them.
        for positions in (0, 2):
            seq = twin.add(positions)
            for dtype in (np.int64, np.int8, np.complex128):
                rows = np.ones((2, 2, 4), dtype)
                twin.refuses(BAD, "append", seq, 0, rows, rows)
        twin.refuses(BAD, "attend", seq, 0, np.ones((1, 2, 4), np.int64))


@trap(
    catches="float32 keys beside float64 values are accepted",
    severity="minor",
    story="One of the two loses half its digits when both are stored in a common pool.",
    dimension="robustness",
    seen=BLIND,
    mutant=edit("if k.dtype != v.dtype or (self.dtype", "if (self.dtype"),
)
def mixed_dtypes_accepted(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        # Before the first rows: no dtype of the cache stands in the way.
        seq = twin.add()
        rows = twin.rows(1)
        twin.refuses(BAD, "append", seq, 0, rows.astype(np.float32), rows)
        twin.refuses(BAD, "append", seq, 0, rows, rows.astype(np.float32))


@trap(
    catches="arrays of another rank fail later, with an unrelated error",
    severity="minor",
    story="A single token without its position axis fails with a message about tuple indices.",
    dimension="robustness",
    mutant=edit("if x.ndim != 3:", "if False:"),
)
def rank_not_checked(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        seq = twin.add(2)
        for shape in ((4,), (4, 4), (1, 1, 4, 4)):
            twin.refuses(BAD, "attend", seq, 0, twin.normal(*shape))
            twin.refuses(BAD, "append", seq, 0, twin.normal(*shape), twin.normal(*shape))


@trap(
    catches="layer −1 means the last layer",
    severity="minor",
    story="An index error in the caller silently overwrites the last layer.",
    dimension="robustness",
    mutant=edit("not 0 <= layer < self.num_layers", "not layer < self.num_layers"),
    seen=BLIND,
)
def negative_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        seq = twin.add(2)
        rows = twin.rows(1)
        for layer in (-1, 2):
            twin.refuses(BAD, "append", seq, layer, rows, rows)
            twin.refuses(BAD, "view", seq, layer)
            twin.refuses(BAD, "attend", seq, layer, twin.queries(1))


@trap(
    catches="two sequences of different length move each other's end",
    severity="major",
    story="Every row of the batch gets the length of the longest, and rows influence each other.",
    mutant=edits(
        ("self._register([0] * self.num_layers)", "self._register(self.zeros)"),
        (
            "        self.counts: dict[int, list[int]] = {}\n",
            "        self.counts: dict[int, list[int]] = {}\n"
            "        self.zeros = [0] * num_layers\n",
        ),
    ),
)
def sequences_share_a_counter(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        a, b = twin.add(), twin.add()
        twin.append(a, 3)
        twin.append(b, 1)
        twin.append(a, 2)
        twin.check()


@trap(
    catches="a second cache sees the sequences of the first",
    severity="critical",
    keeps_state=True,
    story="Bookkeeping in a mutable class attribute or a mutable default argument.",
    seen=BLIND,
    mutant=edits(
        ("self.counts: dict[int, list[int]] = {}", "self.counts = SHARED"),
        ("KINDS = (", "SHARED = {}\nKINDS = ("),
    ),
)
def two_caches_share_state(submission: Submission, rng: Rng) -> None:
    for kind, bits in PLAIN:
        one, other = Twin(submission, rng, kind, bits), Twin(submission, rng, kind, bits)
        one.add(5)
        other.add(2)
        one.check()
        other.check()


def _remembered(line: str, sizes: str) -> Mutant:
    """What the first cache of these sizes has serves all later ones."""
    kept, made = line.split(" = ")
    table = ("KINDS = (", "MADE = {}\nKINDS = (")
    return edits(table, (line, f"{kept} = MADE.setdefault({sizes}, {made})"))


@trap(
    catches="something made for an earlier cache, such as its dtype or its codec, serves a later "
    "cache with another dtype or other bits",
    severity="major",
    story="A table of the module, looked up by some of the sizes but not by all that matter.",
    seen=BLIND,
    keeps_state=True,
    mutant=_remembered("self.dtype = dtype", "(self.heads, self.width)"),
    also=[_remembered("self.codec = codec", "(type(codec), head_dim)")],
)
def made_for_an_earlier_cache(submission: Submission, rng: Rng) -> None:
    # First the later caches alone, where nothing is left of an earlier one.
    for kinds, dtypes in (
        ((("dense", None), ("quantized", 8)), (np.float64,)),
        ((("dense", None), ("quantized", 4), ("quantized", 8)), (np.float32, np.float64)),
    ):
        clean = submission.clean()
        for kind, bits in kinds:
            for dtype in dtypes:
                twin = Twin(clean, rng, kind, bits, dtype=dtype)
                twin.append(twin.add(3), 2)
                twin.check()


@trap(
    catches="a freed sequence looks empty instead of unknown",
    severity="major",
    story="A handle used after free can then read another request's tokens.",
    dimension="robustness",
    mutant=edit(
        "        self._forget(seq)\n        del self.counts[seq]\n",
        "        self.counts[seq] = [0] * self.num_layers\n",
    ),
    seen=BLIND,
)
def freed_sequence_answers(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        twin.add(2)
        gone = twin.add(2)
        twin.free(gone)
        for method, args in METHODS:
            expect.raises(KeyError, getattr(twin.cache, method), gone, *args)
        twin.check()


@trap(
    catches="using a sequence that was never added creates it",
    severity="minor",
    story="A dictionary with a default factory turns a typo into a second, empty sequence.",
    dimension="robustness",
    mutant=edit(
        '            raise KeyError(f"no sequence {seq!r}")\n',
        "            self.counts[seq] = [0] * self.num_layers\n            self._open(seq)\n",
    ),
)
def unknown_sequence_created(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        for method, args in METHODS:
            twin = Twin(submission, rng, kind, bits)
            seq = twin.add(2)
            twin.refuses(KeyError, method, seq + 1000, *args)


@trap(
    catches="add() gives out the number of a freed sequence",
    severity="major",
    story="The stale handle of a finished request then reads another request's cache.",
    seen=BLIND,
    mutant=edit(
        "seq, self.next_seq = self.next_seq, self.next_seq + 1",
        "seq = next(i for i in range(len(self.counts) + 1) if i not in self.counts)",
    ),
    also=(
        edit(
            "seq, self.next_seq = self.next_seq, self.next_seq + 1",
            "seq = max(self.counts, default=-1) + 1",
        ),
    ),
)
def sequence_number_reused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged", None))):
        first, second = twin.add(1), twin.add(1)
        twin.free(first)
        twin.add(1)
        twin.free(second)
        last = twin.fork(twin.add(1))
        twin.free(last)
        twin.add(1)
        twin.refuses(KeyError, "length", first)


@trap(
    catches="a layer beyond the last raises an error other than ValueError or TypeError",
    severity="minor",
    story="Nothing checks the upper bound, and a list raises its IndexError.",
    dimension="robustness",
    mutant=edit("not 0 <= layer < self.num_layers", "not 0 <= layer"),
)
def layer_beyond_the_last(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        twin.refuses(BAD, "view", twin.add(2), 2)


@trap(
    catches="an unknown sequence raises an error other than KeyError",
    severity="minor",
    story="The caller cannot tell a stale handle from bad rows.",
    dimension="robustness",
    mutant=edit(
        'raise KeyError(f"no sequence {seq!r}")', 'raise ValueError(f"no sequence {seq!r}")'
    ),
)
def unknown_sequence_is_another_error(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.refuses(KeyError, "length", twin.add(2) + 1000)


@trap(
    catches="the cache keeps the caller's arrays instead of copies of them",
    severity="major",
    story="append stores k and v as they came; the next step writes into the same buffers, and the "
    "past changes.",
    mutant=edit(
        "        if stop > len(held[0]):\n            # Half as much",
        "        if start == 0 and isinstance(self.codec, PlainCodec):\n"
        "            self.rows[seq][layer] = tuple(np.asarray(field) for field in fields)\n"
        "            return\n"
        "        if stop > len(held[0]):\n            # Half as much",
    ),
    seen="an answer of another author",
)
def append_keeps_the_callers_arrays(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        seq = twin.cache.add()
        sent = twin.rows(3), twin.rows(3)
        _, shared = submission.sharing("append", seq, 0, *sent, on=twin.cache)
        expect.that(not shared.arguments, f"a {twin.kind} cache lies in the memory of k or v")
