"""Bugs of counting room: what is taken, given back, refused."""

from trapline.arena.errors import SubmissionRaised
from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import CONTIGUOUS, PAGED, Rng, twins
from trapline.challenges.kv_cache.situations import BLIND, never_forked

FULL = "if len(shared) + missing > len(self.free_pages):"
TAKE = "        page = self.free_pages.pop()\n        self.holders[page] = 1\n"
#: A pool that grows by a page when it is empty.
GROWING = (
    "        if not self.free_pages:\n"
    "            self.free_pages.append(len(self.holders))\n"
    "            self.holders.append(0)\n"
    "            self.pools = tuple(np.concatenate([p, 0 * p[:, :1]], 1) for p in self.pools)\n"
    "            self.num_pages += 1\n" + TAKE
)
CUT = "        self._shrink(seq, n)\n        self.counts[seq] = [n]"


def _leaking(where: str, lost: str) -> Mutant:
    """A contiguous cache that counts positions as used after they are gone."""
    return edits(
        (
            "        return self.page_size * self.num_pages - used\n",
            "        return self.page_size * self.num_pages - used - getattr(self, 'lost', 0)\n",
        ),
        (where, f"        self.lost = getattr(self, 'lost', 0) + {lost}\n{where}"),
    )


@trap(
    catches="a contiguous cache has room for num_blocks positions, not num_blocks · block_size",
    severity="major",
    story="The size of the pool is taken for a number of positions.",
    seen=BLIND,
    mutant=edit(
        "        return self.page_size * self.num_pages - used\n",
        "        return self.num_pages - used\n",
    ),
)
def contiguous_room_in_blocks(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        twin.add(8)
        twin.check()


@trap(
    catches="a contiguous fork that does not fit leaves the copies of its first layers behind",
    severity="major",
    story="The room is looked at layer by layer while rows are copied.",
    seen=BLIND,
    mutant=edits(
        (
            "        return self.page_size * self.num_pages - used\n",
            "        lost = getattr(self, 'lost', {}).get(layer, 0)\n"
            "        return self.page_size * self.num_pages - used - lost\n",
        ),
        (
            "            self._reserve(seq, layer, count)\n\n    def _share",
            "            self._reserve(seq, layer, count)\n"
            "            self.lost = {**getattr(self, 'lost', {}), layer: count}\n"
            "        self.lost = {}\n\n    def _share",
        ),
    ),
)
def fork_half_done_when_full(submission: Submission, rng: Rng) -> None:
    """A cache whose forks share rows has room for this one; then nothing is asked."""
    for twin in twins(submission, rng, CONTIGUOUS, pages=2):
        seq = twin.add(3)
        twin.append(seq, 2, layers=[1])
        try:
            twin.fork(seq)
        except SubmissionRaised:
            twin.append(seq, 5, layers=[0])
            twin.append(seq, 3, layers=[1])
            twin.check()


@trap(
    catches="positions of a freed contiguous sequence never come back",
    severity="major",
    story="Short runs work; a long-running server runs out of room.",
    mutant=_leaking("        self._forget(seq)\n        del self.counts", "self.length(seq)"),
)
def dense_free_leaks(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        twin.free(twin.add(8))
        twin.add(8)
        twin.check()


@trap(
    catches="positions that truncate cuts off a contiguous sequence stay taken",
    severity="major",
    story="Speculative decoding cuts off rejected drafts all the time.",
    mutant=_leaking(CUT, "self.length(seq) - n"),
)
def dense_truncate_leaks(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        seq = twin.add(8)
        twin.truncate(seq, 4)
        twin.add(4)
        twin.check()


@trap(
    catches="positions that keep drops from a contiguous sequence stay taken",
    severity="major",
    story="The slots leave the table and never reach the list of free ones.",
    seen=BLIND,
    mutant=_leaking(
        "        if np.array_equal(indices, np.arange(len(indices))):\n",
        "self.length(seq) - len(indices)",
    ),
)
def dense_keep_leaks(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        seq = twin.add(8)
        twin.keep(seq, [5, 2, 7, 0])
        twin.add(4)
        twin.check()


@trap(
    catches="keep in a full contiguous cache fails, as if it needed room for a second copy",
    severity="major",
    story="New rows are allocated before the old ones are given back.",
    mutant=insert_before(
        "        self.rows[seq] = [\n            tuple(array[indices]",
        "        self._reserve(seq, 0, len(indices))\n",
    ),
    seen=BLIND,
)
def dense_keep_needs_a_second_copy(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        twin.keep(twin.add(8), range(7, -1, -1))
        twin.check()


@trap(
    catches="the last page of the pool is never used",
    severity="major",
    story="A comparison with ≥ where > is meant.",
    mutant=edit(FULL, FULL.replace(">", ">=")),
)
def last_page_never_used(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        twin.append(twin.add(4), 4)
        twin.check()


@trap(
    catches="the last position of a contiguous pool is never used",
    severity="major",
    story="A comparison with ≥ where > is meant.",
    mutant=edit("if n > self._capacity_left(layer):", "if n >= self._capacity_left(layer):"),
)
def last_position_never_used(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        twin.append(twin.add(7), 1)
        twin.check()


@trap(
    catches="a contiguous cache counts the positions of all layers against the room of one",
    severity="major",
    story="The pool holds num_blocks · block_size positions in every layer.",
    mutant=edit(
        "sum(counts[layer] for counts in self.counts.values())",
        "sum(sum(counts) for counts in self.counts.values())",
    ),
)
def dense_room_divided_among_layers(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, pages=2):
        twin.add(8)
        twin.check()


@trap(
    catches="the room of a contiguous cache is given to every sequence, not to all together",
    severity="major",
    story="The length of one sequence is compared with the size of the pool.",
    mutant=edits(
        ("def _capacity_left(self, layer: int)", "def _capacity_left(self, layer: int, seq: int)"),
        ("sum(counts[layer] for counts in self.counts.values())", "self.counts[seq][layer]"),
        (
            "def _reserve(self, _seq: int, layer: int, n: int) -> None:\n"
            '        """MemoryError unless n',
            "def _reserve(self, seq: int, layer: int, n: int) -> None:\n"
            '        """MemoryError unless n',
        ),
        ("n > self._capacity_left(layer)", "n > self._capacity_left(layer, seq)"),
    ),
)
def dense_room_for_every_sequence(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=2):
        twin.add(6)
        other = twin.add(2)
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    catches="a full contiguous cache raises an error other than MemoryError",
    severity="minor",
    story="A scheduler that catches MemoryError to preempt a request stops on another error.",
    mutant=edit('raise MemoryError(f"no room for', 'raise ValueError(f"no room for'),
)
def dense_exhaustion_is_another_error(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1, pages=1):
        seq = twin.add(4)
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", seq, 0, rows, rows)


@trap(
    catches="a paged cache takes more pages than the pool has",
    severity="major",
    story="Pages are made when they are needed, without a count.",
    mutant=edits((FULL, "if False:"), (TAKE, GROWING)),
)
def pages_beyond_the_pool(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=1):
        twin.add(4)
        other = twin.add()
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    catches="an append to a full pool overwrites another sequence's page",
    severity="major",
    story="The number of the next page wraps around, or the last free page is handed out twice.",
    mutant=edits(
        (FULL, "if False:"),
        ("page = self.free_pages.pop()", "page = self.free_pages.pop() if self.free_pages else 0"),
    ),
)
def full_pool_overwrites_a_neighbour(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=1):
        seq = twin.add(4)
        other = twin.cache.add()
        rows = twin.rows(2)
        try:
            twin.cache.append(other, 0, rows, rows)
        except SubmissionRaised as raised:
            expect.that("MemoryError" in {raised.kind, *raised.bases}, str(raised))
        twin.stored(seq, 0)


@trap(
    catches="the copy of a shared page is made beyond the pool when no page is free",
    severity="major",
    story="Room is asked for the new positions only, not for the copy.",
    seen=BLIND,
    control=never_forked,
    mutant=edits((FULL, "if missing > len(self.free_pages):"), (TAKE, GROWING)),
)
def copy_costs_nothing(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        child = twin.fork(twin.add(7))
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", child, 0, rows, rows)


@trap(
    catches="a refused append leaves free pages in the sequence's table, where others take them",
    severity="major",
    story="The books are restored, but the list of pages inside them is the same object.",
    seen=BLIND,
    mutant=insert_before(
        '            raise MemoryError(f"{len(shared) + missing} pages needed',
        "            table.extend(self.free_pages[::-1])\n",
    ),
)
def refused_append_keeps_free_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=3):
        seq = twin.add(3)
        rows = twin.rows(12)
        twin.refuses(MemoryError, "append", seq, 0, rows, rows)
        twin.add(4)
        twin.append(seq, 2)
        twin.check()


@trap(
    catches="keep of a fork gives back pages that its parent holds",
    severity="major",
    story="keep releases its old pages without asking who else holds them.",
    mutant=edit(
        "        self._shrink(seq, start)\n        self.tables[seq].extend",
        "        for page in self.tables[seq][fixed:]:\n"
        "            self.holders[page] = 1\n"
        "        self._shrink(seq, start)\n        self.tables[seq].extend",
    ),
)
def keep_frees_shared_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=3):
        child = twin.fork(twin.add(8))
        twin.keep(child, [1])
        # The parent holds two of three pages, whatever the child needs.
        other = twin.add()
        rows = twin.rows(5)
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    catches="truncate of a fork gives back pages that its parent holds",
    severity="major",
    story="truncate puts the cut pages on the free list without asking who else holds them.",
    mutant=insert_before(
        CUT,
        "        if isinstance(self, PagedCache):\n"
        "            for page in self.tables[seq][self._pages_for(n) :]:\n"
        "                self.holders[page] = 1\n",
    ),
    seen=BLIND,
)
def truncate_frees_shared_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        child = twin.fork(twin.add(8))
        twin.truncate(child, 4)
        other = twin.add()
        rows = twin.rows(4)
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    catches="a refused prefill has taken the room that it asked for",
    severity="major",
    story="Room is counted before the arguments are checked.",
    mutant=insert_before(
        '        if len(q) != len(k):\n            raise ValueError(f"{len(q)} queries',
        "        if len(k):\n            self._reserve(seq, layer, len(k))\n",
    ),
    seen=BLIND,
)
def refused_prefill_takes_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        seq = twin.add(2)
        prompt = (twin.queries(3), twin.rows(4), twin.rows(4), 2)
        expect.raises(
            (ValueError, TypeError), submission.chunked_prefill, twin.cache, seq, 0, *prompt
        )
        twin.add(4)
        twin.check()


@trap(
    catches="pages that only a layer ahead of the others has taken are lost in a truncate",
    severity="major",
    story="The length changes, but the pages are counted from the common length on.",
    mutant=insert_before(
        CUT,
        "        if n == self.length(seq):\n"
        "            self.counts[seq] = [n] * self.num_layers\n"
        "            return\n",
    ),
)
def pages_of_a_layer_ahead_leak(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=3):
        seq = twin.add(4)
        twin.append(seq, 8, [0])
        twin.truncate(seq, 4)
        twin.add(8)
        twin.check()


@trap(
    catches="pages that truncate gave back are given back once more when the sequence is freed",
    severity="major",
    story="They stay in the sequence's table; then two sequences get the same page.",
    mutant=edits(
        (
            "            self._release(page)\n        del table[kept:]\n",
            "            self._release(page)\n",
        ),
        ("        if self.holders[page] == 0:\n", "        if self.holders[page] <= 0:\n"),
    ),
)
def pages_given_back_twice(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        seq = twin.add(8)
        twin.truncate(seq, 4)
        twin.free(seq)
        twin.add(8)
        other = twin.add()
        rows = twin.rows(4)
        twin.refuses(MemoryError, "append", other, 0, rows, rows)
