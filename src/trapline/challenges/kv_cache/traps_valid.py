"""Valid input that is refused, or fails, at the bounds: the least, the last, the only one."""

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    Rng,
    Twin,
    check_attention,
    context,
    prefill,
    twins,
)
from trapline.challenges.kv_cache.situations import kept_in_order, layers_in_step
from trapline.challenges.kv_cache.traps_sizes import SPEC

#: Four bits only: so coarse that a scale rounded otherwise, another bug, does not show by chance.
CONTIGUOUS = (("dense", None), ("quantized", 4))
PAGED = (("paged", None), ("paged_quantized", 4))
EACH = (*CONTIGUOUS, *PAGED)
ADD = "        return self._register([0] * self.num_layers)\n"
APPEND = "        self._reserve(seq, layer, len(k))\n        self._fix_dtype(k.dtype)\n"
ATTEND = "        return attention(q, *self.view(seq, layer))\n"
PREFILL = "        out = np.empty(q.shape, q.dtype)\n"
FORK = "        child = self._register(list(self.counts[seq]))\n"
KEEP = "        if np.array_equal(indices, np.arange(len(indices))):\n"
TRUNCATE = "        self._shrink(seq, n)\n        self.counts[seq] = [n]"
FREE = "        self._shrink(seq, 0)\n        self._forget(seq)\n"
LENGTH = "        return min(self.counts[seq])"
CHILD = "        self._share(seq, child)\n"
#: keep and chunked_prefill without truncate and attend, which they use in our solution.
KEEP_ALONE = (
    "            self.truncate(seq, len(indices))\n",
    "            self._shrink(seq, len(indices))\n"
    "            self.counts[seq] = [len(indices)] * self.num_layers\n",
)
PREFILL_ALONE = ("self.attend(seq, layer, q[part])", "attention(q[part], *self.view(seq, layer))")
IS_FULL = (
    "(not self.free_pages if isinstance(self, PagedCache) "
    "else self._capacity_left(0) == 0 < self.num_pages)"
)


def _refused(line: str, condition: str, error: str = "ValueError") -> tuple[str, str]:
    """An exception before this line, where the condition holds."""
    return line, f"        if ({condition}):\n            raise {error}('refused')\n{line}"


def _two_positions(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        seq = twin.add(3)
        prefill(submission, twin, seq, 2, 2)
        twin.keep(seq, [4, 1])
        twin.check(attend=False)


@trap(
    catches="a single position is refused, by append, attend, chunked_prefill or keep",
    severity="major",
    story="The check asks for more than 1 where it means at least 1.",
    control=_two_positions,
    mutant=edits(_refused(APPEND, "len(k) == 1")),
    also=[
        edits(_refused(ATTEND, "len(q) == 1")),
        edits(_refused(ATTEND, "len(q) == 1"), PREFILL_ALONE),
        edits(_refused(PREFILL, "len(q) == 1")),
        edits(_refused(KEEP, "len(indices) == 1")),
    ],
)
def one_position_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        seq = twin.add(3)
        twin.append(seq, 1)
        q = twin.queries(1)
        check_attention(twin.cache.attend(seq, 0, q), q, *twin.stored(seq, 0))
        prefill(submission, twin, seq, 1, 2)
        twin.keep(seq, [3])
        twin.check()


def _within_a_page(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        twin.append(twin.add(4), 3)
        twin.check()


@trap(
    catches="attend with more queries than a page holds positions is refused",
    severity="major",
    story="The queries of one step are to lie in one page.",
    control=_two_positions,
    mutant=edits(_refused(ATTEND, "len(q) > self.page_size")),
    also=[
        edits(_refused(ATTEND, "len(q) > self.page_size"), PREFILL_ALONE),
        edits(_refused(ATTEND, "len(q) > self.page_size and isinstance(self, PagedCache)")),
    ],
)
def queries_of_several_pages_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        seq, q = twin.add(9), twin.queries(6)
        check_attention(twin.cache.attend(seq, 0, q), q, *twin.stored(seq, 0))


@trap(
    catches="append of more positions than a page holds is refused",
    severity="major",
    story="One page is taken for each append, and the rows do not fit into it.",
    control=_within_a_page,
    mutant=edits(_refused(APPEND, "len(k) > self.page_size and isinstance(self, PagedCache)")),
    also=[edits(_refused(APPEND, "len(k) > self.page_size"))],
)
def append_of_several_pages_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        twin.append(twin.add(2), 7)
        twin.check()


_TOO_MANY = "if len(q) > self.counts[seq][layer]:"


def _fewer_queries(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        seq, q = twin.add(3), twin.queries(2)
        check_attention(twin.cache.attend(seq, 0, q), q, *twin.stored(seq, 0))


@trap(
    catches="attend with as many queries as the layer holds positions is refused",
    severity="major",
    story="A comparison with ≥ where > is meant: a first prompt cannot be attended to.",
    control=_fewer_queries,
    mutant=edits((_TOO_MANY, _TOO_MANY.replace(">", ">=")), PREFILL_ALONE),
    also=[
        edit(_TOO_MANY, _TOO_MANY.replace(">", ">=")),
        edits((_TOO_MANY, "if len(q) and len(q) >= self.counts[seq][layer]:"), PREFILL_ALONE),
        edit(_TOO_MANY, "if len(q) and len(q) >= self.counts[seq][layer]:"),
    ],
)
def queries_of_all_positions_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1):
        seq, q = twin.add(3), twin.queries(3)
        check_attention(twin.cache.attend(seq, 0, q), q, *twin.stored(seq, 0))


def _cut_by_one(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.truncate(twin.add(5), 4)
        twin.check()


@trap(
    catches="truncate to all positions of a sequence is refused",
    severity="major",
    story="A comparison with < where ≤ is meant: a draft that is accepted as a whole stops here.",
    control=_cut_by_one,
    mutant=edits(_refused(TRUNCATE, "n == self.length(seq) > 0"), KEEP_ALONE),
    also=[
        edits(_refused(TRUNCATE, "n == self.length(seq)"), KEEP_ALONE),
        edits(_refused(TRUNCATE, "n == self.length(seq)")),
    ],
)
def truncate_to_all_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(5)
        twin.truncate(seq, 5)
        twin.check()


@trap(
    catches="keep of all positions is refused",
    severity="major",
    story="keep is taken for a call that always drops something.",
    control=kept_in_order,
    mutant=edits(_refused(KEEP, "len(indices) == self.length(seq) > 0")),
    also=[
        edits(_refused(KEEP, "0 < len(indices) and list(indices) == [*range(self.length(seq))]"))
    ],
)
def keep_of_all_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(5)
        twin.keep(seq, range(5))
        twin.keep(seq, [4, 1, 2, 3, 0])
        twin.check()


def _kept_from_the_middle(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.keep(twin.add(6), [1, 4])
        twin.check()


@trap(
    catches="keep refuses the first or the last position of a sequence",
    severity="major",
    story="The bounds of the indices are off by one.",
    control=_kept_from_the_middle,
    mutant=edits(_refused(KEEP, "self.length(seq) - 1 in indices")),
    also=[edits(_refused(KEEP, "0 in indices"))],
)
def keep_of_an_end_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.keep(twin.add(6), [1, 5])
        twin.keep(twin.add(6), [0, 4])
        twin.check()


@trap(
    catches="keep refuses indices that do not ascend",
    severity="major",
    story="keep is written for a mask or for a compaction in place, and beams are reordered.",
    control=_kept_from_the_middle,
    mutant=edits(_refused(KEEP, "np.any(indices[1:] < indices[:-1])")),
)
def keep_in_another_order_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.keep(twin.add(6), [4, 1])
        twin.check()


@trap(
    catches="an empty sequence is refused, by fork, keep, truncate, free or length",
    severity="major",
    story="A request is cancelled, or forked, before its prompt has arrived.",
    control=layers_in_step,
    mutant=edits(_refused(FORK, "not any(self.counts[seq])")),
    also=[
        edits(_refused(FORK, "not any(self.counts[seq])", "IndexError")),
        edits(_refused(KEEP, "not any(self.counts[seq])")),
        edits(_refused(TRUNCATE, "not any(self.counts[seq])"), KEEP_ALONE),
        edits(_refused(FREE, "not any(self.counts[seq])")),
        edits(_refused(FREE, "not any(self.counts[seq])", "KeyError")),
        edits(_refused(LENGTH, "not any(self.counts[seq])")),
    ],
)
def empty_sequence_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add()
        expect.equal(int(twin.cache.length(seq)), 0, "length() of an empty sequence")
        child = twin.fork(seq)
        twin.keep(seq, [])
        twin.truncate(seq, 0)
        twin.free(child)
        twin.append(seq, 2)
        twin.check()


_UNEVEN = "len(set(self.counts[seq])) > 1"


@trap(
    catches="a sequence whose layers are at different lengths is refused, by append, attend, "
    "chunked_prefill, fork, keep, truncate or free",
    severity="major",
    story="In the middle of a step the layers differ; a request can be forked or dropped there.",
    control=layers_in_step,
    mutant=edits(_refused(FORK, _UNEVEN)),
    also=[
        edits(_refused(KEEP, _UNEVEN), KEEP_ALONE),
        edits(_refused(TRUNCATE, _UNEVEN), KEEP_ALONE),
        edits(_refused(FREE, _UNEVEN)),
        edits(_refused(APPEND, "self.counts[seq][layer] > self.length(seq)")),
        edits(_refused(APPEND, "layer and self.counts[seq][layer] >= self.counts[seq][0]")),
        edits(_refused(ATTEND, "len(q) > self.length(seq)")),
        edits(_refused(ATTEND, _UNEVEN)),
        edits(_refused(PREFILL, "self.counts[seq][layer] > self.length(seq)")),
        edits(_refused(PREFILL, "self.counts[seq][layer] < max(self.counts[seq])")),
    ],
)
def uneven_layers_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.append(twin.add(), 2, [1])
        q = twin.queries(2)
        check_attention(twin.cache.attend(seq, 1, q), q, *twin.stored(seq, 1))
        twin.append(seq, 1, [1])
        prefill(submission, twin, seq, 2, 2, 0)
        prefill(submission, twin, seq, 2, 2, 1)
        child = twin.fork(seq)
        twin.keep(child, [1, 0])
        twin.append(child, 1, [1])
        twin.truncate(child, 2)
        twin.free(seq)
        twin.check()


def _with_room_left(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1, pages=3):
        seq = twin.add(8)
        twin.fork(twin.add())
        twin.truncate(seq, 7)
        twin.keep(seq, [4, 2, 3])
        twin.check()


@trap(
    catches="a call that needs no room fails in a full pool: add, truncate, keep, or the fork of "
    "an empty sequence",
    severity="major",
    story="A comparison with ≥ where > is meant, or a check of room in front of every call.",
    control=_with_room_left,
    mutant=edits(_refused(ADD, IS_FULL, "MemoryError")),
    also=[
        edits(_refused(TRUNCATE, IS_FULL, "MemoryError"), KEEP_ALONE),
        edits(_refused(TRUNCATE, IS_FULL, "MemoryError"), _refused(KEEP, IS_FULL, "MemoryError")),
        edits(_refused(FORK, f"not any(self.counts[seq]) and {IS_FULL}", "MemoryError")),
    ],
)
def full_pool_refuses_all(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1, pages=2):
        seq = twin.add(8)
        twin.fork(twin.add())
        twin.truncate(seq, 7)
        twin.check()


@trap(
    catches="a prefill of no positions asks for room and fails in a full pool",
    severity="minor",
    story="A copy of the shared last page is counted before it is asked whether anything comes.",
    mutant=edits(
        _refused(
            PREFILL,
            "not len(q) and isinstance(self, PagedCache) and not self.free_pages\n"
            "            and self.counts[seq][layer] % self.page_size\n"
            "            and self.holders[self.tables[seq][-1]] > 1",
            "MemoryError",
        )
    ),
    also=[edits(_refused(PREFILL, f"not len(q) and {IS_FULL}", "MemoryError"))],
)
def prefill_of_nothing_needs_room(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1, pages=1):
        seq = twin.add(3)
        if twin.kind.startswith("paged"):
            seq = twin.fork(seq)
        else:
            twin.append(seq, 1)
        q, rows = twin.queries(0), twin.rows(0)
        out = submission.chunked_prefill(twin.cache, seq, 0, q, rows, rows, 3)
        expect.equal(out, q, "a prefill of nothing")
        twin.check()


def _fork_with_room_left(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, pages=2):
        twin.fork(twin.add(3))
        twin.check()


_COPIED = "            self._reserve(seq, layer, count)\n\n    def _share"


@trap(
    catches="a fork of a contiguous sequence that takes exactly the room that is left is refused",
    severity="major",
    story="A comparison with ≥ where > is meant.",
    control=_fork_with_room_left,
    mutant=edit(
        _COPIED,
        "            if count >= self._capacity_left(layer):\n"
        "                raise MemoryError('no room for a copy')\n\n    def _share",
    ),
    also=[
        edit(
            _COPIED,
            "            if count and count >= self._capacity_left(layer):\n"
            "                raise MemoryError('no room for a copy')\n\n    def _share",
        )
    ],
)
def fork_that_just_fits_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, pages=2):
        twin.fork(twin.add(4))
        twin.check()


def _two_chunks(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1)
    prefill(submission, twin, twin.add(), 5, 3)


@trap(
    catches="a chunk as long as the prompt, or longer, is refused",
    severity="major",
    story="A comparison of the chunk with the prompt, which may be shorter than a chunk.",
    control=_two_chunks,
    mutant=edits(_refused(PREFILL, "chunk == len(q)")),
    also=[
        edits(_refused(PREFILL, "chunk > len(q)")),
        edits(_refused(PREFILL, "chunk > len(q) > 0")),
        edits(_refused(PREFILL, "chunk >= len(q)")),
    ],
)
def chunk_of_the_whole_prompt_refused(submission: Submission, rng: Rng) -> None:
    for chunk in (5, 8):
        twin = Twin(submission, rng, layers=1)
        prefill(submission, twin, twin.add(), 5, chunk)


def _prefill_with_room_left(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1, pages=4):
        prefill(submission, twin, twin.add(2), 6, 4)


_LEFT = (
    "(self.page_size * len(self.free_pages) + -self.counts[seq][layer] % self.page_size\n"
    "            if isinstance(self, PagedCache) else self._capacity_left(layer))"
)


@trap(
    catches="a prefill that takes exactly the room that is left is refused",
    severity="major",
    story="Room for one chunk too many is asked for before the first one is written.",
    control=_prefill_with_room_left,
    mutant=edits(_refused(PREFILL, f"0 < len(q) >= {_LEFT}", "MemoryError")),
    also=[
        edits(
            _refused(
                PREFILL,
                f"0 < len(q) and -(-len(q) // chunk) * chunk > {_LEFT}",
                "MemoryError",
            )
        )
    ],
)
def prefill_that_just_fits_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=1, pages=2):
        prefill(submission, twin, twin.add(2), 6, 4)
        twin.check()


@trap(
    catches="an empty sequence takes a page or a place, so that no more of them fit than pages",
    severity="major",
    story="A page is handed out with the sequence, not with its first position.",
    mutant=edit(
        ADD,
        "        seq = self._register([0] * self.num_layers)\n"
        "        if isinstance(self, PagedCache):\n"
        "            if not self.free_pages:\n"
        "                del self.counts[seq]\n"
        "                raise MemoryError('no page for a new sequence')\n"
        "            self.tables[seq].append(self._take())\n"
        "        return seq\n",
    ),
    also=[edits(_refused(ADD, "len(self.counts) >= self.num_pages", "MemoryError"))],
)
def empty_sequence_takes_room(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, pages=2):
        seq = twin.add()
        twin.add()
        twin.add()
        twin.append(seq, 8)
        twin.check()


def _one_fork(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.fork(twin.add(3))
        twin.check()


_KIDS = "        self.kids = getattr(self, 'kids', set()) | {%s}\n"


@trap(
    catches="a fork cannot be forked, or a sequence only once",
    severity="major",
    story="A sequence knows one child or one parent.",
    control=_one_fork,
    mutant=edits(
        _refused(FORK, "seq in getattr(self, 'kids', ())"), (CHILD, CHILD + _KIDS % "child")
    ),
    also=[
        edits(_refused(FORK, "seq in getattr(self, 'kids', ())"), (CHILD, CHILD + _KIDS % "seq")),
    ],
)
def fork_of_a_fork_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(3)
        twin.fork(twin.fork(seq))
        twin.fork(seq)
        twin.check()


@trap(
    catches="a page stays marked as shared when one sequence is left that holds it, and is copied "
    "before a write",
    severity="major",
    story="The copy needs a page that nobody counted: the last beam stops in a full pool.",
    mutant=edits(
        (CHILD, CHILD + "        self.shared = getattr(self, 'shared', set())\n"
         "        self.shared.update(getattr(self, 'tables', {}).get(seq, ()))\n"),
        (
            "if self.holders[table[i]] > 1]",
            "if self.holders[table[i]] > 1 or table[i] in getattr(self, 'shared', ())]",
        ),
        (
            "        page = self.free_pages.pop()\n",
            "        page = self.free_pages.pop()\n"
            "        getattr(self, 'shared', set()).discard(page)\n",
        ),
    ),
)  # fmt: skip
def page_stays_shared(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        seq = twin.add(3)
        twin.free(twin.fork(seq))
        twin.add(4)
        twin.append(seq, 1)
        twin.check()


def _whole_pages_each(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        twin.add(4)
        twin.add(4)
        twin.check()


_PAGED_KINDS = 'storage = PagedCache if kind in ("paged", "paged_quantized") else DenseCache'


@trap(
    catches="a dense or quantised cache that is not paged takes its room in pages, and the rest of "
    "a page is lost to other sequences",
    severity="major",
    story="A contiguous kind is made as a paged one; its room is to be counted by the position.",
    control=_whole_pages_each,
    mutant=edit(_PAGED_KINDS, _PAGED_KINDS.replace("(", '("quantized", ')),
    also=[
        edit(_PAGED_KINDS, _PAGED_KINDS.replace("(", '("dense", ')),
        edit(_PAGED_KINDS, "storage = PagedCache"),
    ],
)
def contiguous_room_in_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        twin.add(3)
        twin.add(5)
        twin.check()


_ODD = "isinstance(self.codec, IntCodec) and self.codec.bits == 4 and self.width % 2"


def _even_width(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, layers=1, width=6)
        twin.add(3)
        twin.check()


@trap(
    catches="a 4-bit cache with an odd head_dim is refused, or fails when rows arrive",
    severity="major",
    story="Two codes share a byte, and the last one has no partner.",
    control=_even_width,
    mutant=edits(_refused(APPEND, _ODD)),
    also=[
        edits(_refused(APPEND, _ODD, "IndexError")),
        edit(
            "    codec = IntCodec(",
            "    if quantised and bits == 4 and head_dim % 2:\n"
            "        raise ValueError('head_dim must be even')\n"
            "    codec = IntCodec(",
        ),
    ],
)
def odd_width_refused(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        for width in (1, 5):
            twin = Twin(submission, rng, kind, 4, layers=1, width=width)
            twin.add(3)
            twin.check()


@trap(
    catches="max_context answers at least one token where none fits",
    severity="major",
    story="A lower bound of 1 that was meant for a divisor.",
    mutant=edit("tokens = max(0, ", "tokens = max(1, "),
)
def context_of_at_least_one(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**34, 1.0, 2**34 - 1, 0)


_UTILIZATION = "    if not 0 < utilization <= 1:\n"
_NEGATIVE = "    if min(gpu_bytes, weight_bytes, reserve_bytes) < 0:\n"
_TOKENS = "    tokens = max(0, "
_EIGHT_BITS = {**SPEC, "bits": 8}


def _context_with_room(submission: Submission, _rng: Rng) -> None:
    context(submission, _EIGHT_BITS, 2**36, 0.5, 2**30, 2**30)


@trap(
    catches="max_context refuses the edge of what is allowed: a utilisation of 1, or 0 bytes",
    severity="major",
    story="A comparison with < where ≤ is meant.",
    control=_context_with_room,
    mutant=edit(_UTILIZATION, _UTILIZATION.replace("<= 1", "< 1")),
    also=[
        edit(_NEGATIVE, _NEGATIVE.replace("< 0", "<= 0")),
        *(
            edit(_NEGATIVE, _NEGATIVE.replace("< 0", f"< 0 or {name} == 0"))
            for name in ("weight_bytes", "reserve_bytes", "gpu_bytes")
        ),
    ],
)
def edge_of_the_budget_refused(submission: Submission, _rng: Rng) -> None:
    context(submission, _EIGHT_BITS, 2**36, 1.0, 2**30, 2**30)
    context(submission, _EIGHT_BITS, 2**36, 0.5, 0, 2**30)
    context(submission, _EIGHT_BITS, 2**36, 0.5, 2**30, 0)
    context(submission, _EIGHT_BITS, 0, 0.5, 2**30, 2**30)


@trap(
    catches="max_context refuses weights that leave no room, instead of answering no tokens",
    severity="major",
    story="A budget of zero or less is taken for bad input.",
    control=_context_with_room,
    mutant=edit(_TOKENS, "    if budget < 0:\n        raise ValueError\n" + _TOKENS),
    also=[
        edit(_TOKENS, f"    if budget {other} 0:\n        raise ValueError\n{_TOKENS}")
        for other in ("<=", "==")
    ],
)
def weights_without_room_refused(submission: Submission, _rng: Rng) -> None:
    context(submission, _EIGHT_BITS, 2**31, 0.5, 2**30, 1)
    context(submission, _EIGHT_BITS, 2**31, 0.5, 2**29, 2**29)


@trap(
    catches="max_context refuses a number of bits that is not among the usual ones",
    severity="major",
    story="A list of 4, 8 and 16 bits, or a check that they fill a byte.",
    control=_context_with_room,
    mutant=edit(
        _UTILIZATION,
        "    if spec['bits'] not in (4, 8, 16, 32):\n        raise ValueError\n" + _UTILIZATION,
    ),
    also=[
        edit(_UTILIZATION, f"    if {condition}:\n        raise ValueError\n{_UTILIZATION}")
        for condition in ("spec['bits'] not in (4, 8)", "spec['bits'] == 1")
    ],
)
def unusual_bits_refused(submission: Submission, _rng: Rng) -> None:
    for bits in (16, 1, 2, 6):
        context(submission, {**SPEC, "bits": bits}, 2**36, 0.5, 2**30, 2**30)
