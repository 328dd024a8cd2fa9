"""Bugs of keep and truncate."""

import numpy as np

from trapline.arena.errors import SubmissionRaised
from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    CONTIGUOUS,
    EACH,
    PAGED,
    Rng,
    Twin,
    twins,
)
from trapline.challenges.kv_cache.situations import BAD, BLIND, kept_in_order, layers_in_step
from trapline.challenges.kv_cache.traps_room import GROWING, TAKE


@trap(
    catches="positions come back in ascending order, always or where all of them are kept",
    severity="critical",
    story="A boolean mask is used where an order is given.",
    seen=BLIND,
    control=kept_in_order,
    mutant=edit("        return indices\n", "        return np.sort(indices)\n"),
    also=[
        edit(
            "if np.array_equal(indices, np.arange(len(indices))):",
            "if len(indices) in (0, self.length(seq)):",
        )
    ],
)
def keep_sorts_its_indices(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(9)
        twin.keep(seq, [0, 1, 8, 3, 5])
        twin.check()
        twin.keep(seq, [4, 0, 3, 1, 2])
        twin.check()


@trap(
    catches="only the first layer is compacted",
    severity="major",
    story="Compaction is written for one layer and called once.",
    control=kept_in_order,
    mutant=edit("pool[:, pages, slots] = rows", "pool[0, pages, slots] = rows[0]"),
)
def keep_in_one_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=3):
        seq = twin.add(6)
        twin.keep(seq, [4, 0, 2])
        twin.check()


@trap(
    catches="layers that were ahead are still ahead after keep",
    severity="major",
    story="Compaction between two layers of a step keeps a rejected token in one layer.",
    control=layers_in_step,
    mutant=edit(
        "            self.counts[seq] = [len(indices)] * self.num_layers",
        "            ahead = [count - self.length(seq) for count in self.counts[seq]]\n"
        "            self.counts[seq] = [len(indices) + more for more in ahead]",
    ),
    also=[
        edit(
            "        if np.array_equal(indices, np.arange(len(indices))):\n"
            "            self.truncate(seq, len(indices))\n"
            "        else:\n"
            "            self._gather(seq, indices)\n"
            "            self.counts[seq] = [len(indices)] * self.num_layers\n",
            "        held = [self._read(seq, layer) for layer in range(self.num_layers)]\n"
            "        common, counts = self.length(seq), self.counts[seq]\n"
            "        self._shrink(seq, 0)\n"
            "        self.counts[seq] = [0] * self.num_layers\n"
            "        for layer, count in enumerate(counts):\n"
            "            rows = np.concatenate([indices, np.arange(common, count)])\n"
            "            self._reserve(seq, layer, len(rows))\n"
            "            self._write(seq, layer, 0, tuple(field[rows] for field in held[layer]))\n"
            "            self.counts[seq][layer] = len(rows)\n",
        )
    ],
    seen=BLIND,
)
def keep_leaves_a_layer_ahead(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(4)
        twin.append(seq, 2, [0])
        twin.keep(seq, [3, 0, 1])
        twin.check()
        twin.append(seq, 1)
        twin.check()


@trap(
    catches="rows are moved one by one and read after they were overwritten",
    severity="major",
    story="In-place compaction is right for ascending indices and wrong for other orders.",
    control=kept_in_order,
    mutant=edits(
        ("tuple(array[indices] for array", "tuple(moved(array, indices) for array"),
        (
            "def grown(",
            "def moved(array, indices):\n"
            "    array = array.copy()\n"
            "    for i, j in enumerate(indices):\n"
            "        array[i] = array[j]\n"
            "    return array[: len(indices)]\n\n\n"
            "def grown(",
        ),
    ),
)
def keep_overwrites_its_source(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS):
        seq = twin.add(5)
        twin.keep(seq, [1, 0, 4, 2])
        twin.check()


@trap(
    catches="keep leaves leading pages alone in which positions move: the page of the first move, "
    "or as many pages as positions keep their place anywhere",
    severity="major",
    story="Pages in front may stay only up to the first position that moves; with the matches "
    "counted instead, a page whose positions change places stays as it was.",
    seen=BLIND,
    control=kept_in_order,
    mutant=edit(
        "        fixed = int(moved[0]) // self.page_size\n",
        "        fixed = (len(indices) - len(moved)) // self.page_size\n",
    ),
    also=[
        edit("int(moved[0]) // self.page_size", more)
        for more in ("-(-int(moved[0]) // self.page_size)", "self._pages_for(int(moved[0]) + 1)")
    ],
)
def keep_counts_unmoved_positions(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(12)
        twin.keep(seq, [1, 0, *range(2, 12)])
        twin.check()
        twin.keep(seq, [0, 2, 1, *range(3, 12)])
        twin.check()


#: Overwrites the pages of the sequence, also those that another one shares.
_IN_PLACE = (
    "        self._shrink(seq, start)\n"
    "        self.tables[seq].extend(self._take() for _ in range(needed))\n",
    "        self._shrink(seq, len(indices))\n",
)


@trap(
    catches="keep reorders pages that another sequence holds too",
    severity="major",
    story="Compacting one branch of a search then corrupts the others.",
    mutant=edits(_IN_PLACE),
    also=[
        edits(  # and room is never missing
            _IN_PLACE,
            ("own = sum(self.holders[page] == 1 for page in tail)", "own = len(tail)"),
        )
    ],
    seen=BLIND,
)
def keep_writes_shared_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(7)
        child = twin.fork(seq)
        twin.keep(child, [0, 1, 2, 6, 5])
        twin.check()
        twin.append(child, 4)
        twin.append(seq, 2)
        twin.check()


@trap(
    catches="keep moves codes but leaves their scales where they were",
    severity="major",
    story="A beam reorder reached the residual part of a quantised cache and not the packed one.",
    control=kept_in_order,
    mutant=edit(
        "        for pool, rows in zip(self.pools, kept, strict=True):\n",
        "        half = max(1, len(kept) // 2)\n"
        "        for pool, rows in zip(self.pools[::half], kept[::half], strict=True):\n",
    ),
)
def keep_without_scales(submission: Submission, rng: Rng) -> None:
    for bits in (8, 4):
        twin = Twin(submission, rng, "paged_quantized", bits)
        seq = twin.add()
        k, v = twin.rows(6), twin.rows(6)
        sizes = np.array([1.0, 10.0, 100.0, 1.0, 10.0, 100.0])[:, None, None]
        for layer in range(2):
            twin.put(seq, layer, k * sizes, v * sizes)
        twin.keep(seq, [2, 0, 4])
        twin.check()


@trap(
    catches="keep with an empty list fails or keeps everything",
    severity="minor",
    story="np.array([]) has dtype float64 and is not a valid index.",
    mutant=edit(
        '(indices.size and indices.dtype.kind not in "iu")', 'indices.dtype.kind not in "iu"'
    ),
)
def keep_nothing(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(3)
        twin.keep(seq, [])
        twin.check()
        twin.append(seq, 2)
        twin.check()


_KEEP_WITHOUT_A_CHECK = (
    "        if needed > len(self.free_pages) + own:\n"
    '            raise MemoryError(f"{needed} pages needed, {len(self.free_pages) + own} free")\n',
    "",
)


@trap(
    catches="keep does not ask for room before it begins: it releases its pages and then finds no "
    "room for new ones, or takes more than the pool has",
    severity="major",
    story="The sequence is lost, although MemoryError tells the caller to try again later.",
    mutant=edits(
        _KEEP_WITHOUT_A_CHECK,
        (
            "        self._shrink(seq, start)\n",
            "        self._shrink(seq, start)\n"
            "        if needed > len(self.free_pages):\n            raise MemoryError(own)\n",
        ),
    ),
    also=[
        edits(_KEEP_WITHOUT_A_CHECK),
        edits(
            _KEEP_WITHOUT_A_CHECK,
            (TAKE, GROWING),
        ),
    ],
)
def keep_fails_half_way(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=3):
        child, order = twin.fork(twin.add(12)), list(range(11, -1, -1))
        # All pages are shared and none is free. How many pages this needs is left open: a cache
        # that keeps the new order beside the pages needs none, and has none to give afterwards.
        try:
            twin.cache.keep(child, order)
        except SubmissionRaised as raised:
            expect.that("MemoryError" in {raised.kind, *raised.bases}, str(raised))
        else:
            twin.model.keep(child, order)
            twin.check()
            twin.free(child)
            other, rows = twin.add(), twin.rows(1)
            twin.refuses(MemoryError, "append", other, 0, rows, rows)
        twin.check()


@trap(
    catches="a position can be kept twice",
    severity="minor",
    story="Compaction then makes the cache longer, beyond the positions it had.",
    dimension="robustness",
    mutant=edit("if len(np.unique(indices)) < len(indices):", "if False:"),
    seen=BLIND,
)
def keep_twice_the_same(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(4)
        twin.refuses(BAD, "keep", seq, [0, 2, 2])


@trap(
    catches="negative or too large indices are accepted",
    severity="major",
    story="Index −1 is the last element of a Python list, and in a page table another sequence's "
    "page.",
    dimension="robustness",
    mutant=edit(
        "if indices.size and not 0 <= indices.min() <= indices.max() < self.length(seq):",
        "if False:",
    ),
    seen=BLIND,
)
def keep_outside_the_sequence(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(6)
        # Layer 0 is ahead: position 6 exists there, but not in every layer.
        twin.append(seq, 1, [0])
        for indices in ([0, -1], [2, 6], [0, 7], [0.5, 1.5], [[0, 1], [2, 3]]):
            twin.refuses(BAD, "keep", seq, indices)


@trap(
    catches="only one layer is cut",
    severity="major",
    story="The length decreases while the other layers still attend to rejected drafts.",
    mutant=edit("= [n] * self.num_layers", "= [n, *self.counts[seq][1:]]"),
)
def truncate_in_one_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=3):
        seq = twin.add(7)
        twin.truncate(seq, 5)
        twin.append(seq, 2)
        twin.check()


@trap(
    catches="truncate(seq, 0) does nothing or is refused",
    severity="major",
    story="`if length:` treats 0 as absent.",
    mutant=insert_before("        self._shrink(seq, n)\n", "        n = n or self.length(seq)\n"),
    also=[
        edits(
            ("or not 0 <= n <= self.length(seq)", "or not 0 < n <= self.length(seq)"),
            (
                "            self.truncate(seq, len(indices))\n",
                "            self._shrink(seq, len(indices))\n"
                "            self.counts[seq] = [len(indices)] * self.num_layers\n",
            ),
        ),
        edit("or not 0 <= n <= self.length(seq)", "or not 0 < n <= self.length(seq)"),
    ],
)
def truncate_to_nothing(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(6)
        twin.truncate(seq, 0)
        twin.check()
        twin.append(seq, 2)
        twin.check()


@trap(
    catches="cutting to the common length leaves layers that were ahead as they are",
    severity="major",
    story="After a step aborted between two layers, the retry appends behind what the first layer "
    "kept.",
    seen=BLIND,
    control=layers_in_step,
    mutant=insert_before(
        "        self._shrink(seq, n)\n", "        if n == self.length(seq):\n            return\n"
    ),
)
def truncate_leaves_a_layer_ahead(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(3)
        twin.append(seq, 2, [0])
        twin.truncate(seq, 3)
        twin.check()
        twin.append(seq, 1)
        twin.check()


@trap(
    catches="a negative length counts from the end",
    severity="minor",
    story="Python's slice semantics: truncate(−1) drops the newest token.",
    dimension="robustness",
    mutant=edit(
        "if not is_int(n) or not 0 <= n <= self.length(seq):",
        "n = n if n >= 0 else self.length(seq) + n\n        if n > self.length(seq):",
    ),
)
def truncate_below_zero(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(6)
        twin.refuses(BAD, "truncate", seq, -1)


@trap(
    catches="truncating to more positions than there are succeeds",
    severity="minor",
    story="A rollback point computed from the wrong sequence goes unnoticed.",
    dimension="robustness",
    mutant=edit(
        "if not is_int(n) or not 0 <= n <= self.length(seq):",
        "n = min(n, self.length(seq))\n        if n < 0:",
    ),
)
def truncate_beyond_the_end(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(3)
        twin.append(seq, 2, [0])
        for n in (4, 6):
            twin.refuses(BAD, "truncate", seq, n)
