"""Bugs of forks: shared pages and copies on write."""

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    PAGED,
    Rng,
    Twin,
    twins,
)
from trapline.challenges.kv_cache.situations import BLIND, never_forked


def _no_room_for(twin: Twin, n: int) -> None:
    """A new sequence finds no page."""
    other = twin.add()
    rows = twin.rows(n)
    twin.refuses(MemoryError, "append", other, 0, rows, rows)


def _cut_at_a_page_end(submission: Submission, rng: Rng) -> None:
    """A fork that is cut between two pages and then grows."""
    for twin in twins(submission, rng, PAGED, layers=1):
        child = twin.fork(twin.add(7))
        twin.truncate(child, 4)
        twin.append(child, 3)
        twin.check()


@trap(
    catches="two sequences write into the same partly filled page",
    severity="critical",
    story="Reported twice against one engine: the last block is shared without a copy.",
    seen=BLIND,
    control=never_forked,
    mutant=edit("shared = [i for i in written if self.holders[table[i]] > 1]", "shared = []"),
)
def shared_tail_written_in_place(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(5)
        child = twin.fork(seq)
        twin.append(child, 2)
        twin.append(seq, 2)
        twin.check()


@trap(
    catches="only the fork copies a shared page; the parent still writes in place",
    severity="major",
    story="The parent is taken for the owner of the page.",
    control=never_forked,
    mutant=edit(
        "if self.holders[table[i]] > 1]",
        "if self.holders[table[i]] > 1\n"
        "            and seq != min(s for s, t in self.tables.items() if table[i] in t)]",
    ),
)
def parent_writes_without_copy(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        for writer in (0, 1):
            twin = Twin(submission, rng, kind, bits)
            seq = twin.add(6)
            pair = (seq, twin.fork(seq))
            # Cut into the shared page, then write where the other still reads.
            twin.truncate(pair[writer], 5)
            twin.append(pair[writer], 2)
            twin.check()


@trap(
    catches="copy-on-write copies the written layer and loses the others",
    severity="major",
    story="A page holds all layers, and the copy does not.",
    control=never_forked,
    mutant=edit("pool[:, copy] = pool[:, page]", "pool[0, copy] = pool[0, page]"),
)
def copy_of_one_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=3):
        seq = twin.add(7)
        child = twin.fork(seq)
        for layer in (1, 0, 2):
            twin.append(child, 1, [layer])
            twin.check()


@trap(
    catches="copy-on-write omits the values",
    severity="major",
    story="Keys and values are two pools, and only one of them is copied.",
    control=never_forked,
    mutant=edit("for pool in self.pools:", "for pool in self.pools[: len(self.pools) // 2]:"),
)
def copy_of_keys_only(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        child = twin.fork(twin.add(3))
        twin.append(child, 1)
        twin.check()


@trap(
    catches="copy-on-write copies codes but not their scales",
    severity="critical",
    story="The quantised pool has two parts, and the copy handles only one of them.",
    seen=BLIND,
    control=never_forked,
    mutant=edit("pool in self.pools:", "pool in self.pools[:: max(1, len(self.pools) // 2)]:"),
)
def copy_without_scales(submission: Submission, rng: Rng) -> None:
    for bits in (8, 4):
        twin = Twin(submission, rng, "paged_quantized", bits)
        child = twin.fork(twin.add(3))
        twin.append(child, 2)
        twin.check()


@trap(
    catches="parent and child hold the same list of pages",
    severity="critical",
    story="An assignment instead of a copy: what one sequence appends, the other sees too.",
    seen=BLIND,
    control=never_forked,
    mutant=edit("= list(self.tables[seq])", "= self.tables[seq]"),
)
def fork_shares_the_page_table(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(4)
        child = twin.fork(seq)
        twin.append(child, 3)
        twin.append(seq, 6)
        twin.check()
        twin.truncate(child, 2)
        twin.check()


@trap(
    catches="an append to the child lengthens the parent",
    severity="major",
    story="The list of lengths is shared instead of copied.",
    control=never_forked,
    mutant=edit("self._register(list(self.counts[seq]))", "self._register(self.counts[seq])"),
    also=[
        edit(
            "self._register(list(self.counts[seq]))",
            "self._register(self.counts[seq][:] if isinstance(self, DenseCache) else "
            "self.counts[seq])",
        )
    ],
    seen=BLIND,
)
def fork_shares_the_length(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        child = twin.fork(twin.add(4))
        twin.append(child, 1)
        twin.check()


@trap(
    catches="a fork does not count as a holder of its pages; freeing the parent releases them",
    severity="critical",
    story="Reference counts are raised for new pages only.",
    seen=BLIND,
    control=never_forked,
    mutant=edit(
        "        for page in self.tables[child]:\n            self.holders[page] += 1\n", ""
    ),
)
def fork_not_counted(submission: Submission, rng: Rng) -> None:
    # All pages are held by one of the two, whatever the order in which a pool hands them out.
    for twin in twins(submission, rng, PAGED, pages=2):
        seq = twin.add(8)
        twin.fork(seq)
        twin.free(seq)
        _no_room_for(twin, 4)


@trap(
    catches="freeing a sequence releases pages that its fork or its parent still holds",
    severity="major",
    story="In beam search, dropping one beam then corrupts its siblings.",
    control=never_forked,
    mutant=edit("if self.holders[page] == 0:", "if self.holders[page] >= 0:"),
    also=[
        edit(
            "        self._shrink(seq, 0)\n        self._forget(seq)\n",
            "        for page in getattr(self, 'tables', {}).get(seq, []):\n"
            "            self.holders[page] = 1\n"
            "        self._shrink(seq, 0)\n        self._forget(seq)\n",
        ),
        # The page stays, but counts as free, after truncate and keep as well: the pool outgrows
        # its size.
        edit(
            "            self._release(page)\n        del table[kept:]\n",
            "            self._release(page)\n"
            "            if self.holders[page]:\n"
            "                self.free_pages.append(len(self.holders))\n"
            "                self.holders.append(0)\n"
            "                self.pools = tuple(\n"
            "                    np.concatenate([pool, np.zeros_like(pool[:, :1])], axis=1)\n"
            "                    for pool in self.pools\n"
            "                )\n"
            "        del table[kept:]\n",
        ),
    ],
    seen=BLIND,
)
def free_takes_shared_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        seq = twin.add(8)
        twin.free(twin.fork(seq))
        _no_room_for(twin, 4)


@trap(
    catches="copy-on-write keeps its hold on the page it left",
    severity="major",
    story="The reference count of the old page is not lowered, so it never becomes free.",
    control=never_forked,
    mutant=edit("        self._release(page)\n        return copy\n", "        return copy\n"),
    seen=BLIND,
)
def copied_page_stays_held(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=4):
        for _ in range(2):
            seq = twin.add(6)
            child = twin.fork(seq)
            twin.append(child, 1)
            twin.free(seq)
            twin.free(child)
        twin.add(16)


@trap(
    catches="a fork takes pages although it has written nothing",
    severity="major",
    story="Eight beams over one prompt then take eight times its memory.",
    control=never_forked,
    mutant=edit(
        "        self.tables[child] = list(self.tables[seq])\n"
        "        for page in self.tables[child]:\n            self.holders[page] += 1\n",
        "        if len(self.tables[seq]) > len(self.free_pages):\n"
        "            raise MemoryError\n"
        "        for page in self.tables[seq]:\n            self.holders[page] += 1\n"
        "        self.tables[child] = [self._own_copy(page) for page in self.tables[seq]]\n",
    ),
    seen=BLIND,
)
def fork_copies_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=3):
        seq = twin.add(12)
        for _ in range(3):
            twin.fork(seq)
        twin.check()


@trap(
    catches="pages held by several sequences count several times against the pool",
    severity="major",
    story="Free room is computed from the lengths of all sequences.",
    control=never_forked,
    mutant=edit("len(self.free_pages):", "self.num_pages - sum(map(len, self.tables.values())):"),
    seen=BLIND,
)
def shared_pages_counted_twice(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=5):
        seq = twin.add(12)
        child = twin.fork(seq)
        twin.append(child, 4)
        twin.append(seq, 4)
        twin.check()


@trap(
    catches="the copy of a shared page keeps rows that its sequence has cut off, and new ones go "
    "behind them",
    severity="critical",
    story="The whole page is copied, and the next row is appended to what was copied.",
    seen=BLIND,
    control=_cut_at_a_page_end,
    mutant=edits(
        (
            "            table[i] = self._own_copy(table[i])\n",
            "            tables = self.tables.items()\n"
            "            others = [s for s, pages in tables if s != seq and table[i] in pages]\n"
            "            held = max(self.counts[other][layer] for other in others)\n"
            "            held = min(held, (i + 1) * self.page_size)\n"
            "            self.stale = max(0, held - start) if i == start // self.page_size else 0\n"
            "            table[i] = self._own_copy(table[i])\n",
        ),
        (
            "        pages, slots = self._address(seq, np.arange(start, start + len(fields[0])))\n",
            "        stale, self.stale = min(getattr(self, 'stale', 0), len(fields[0])), 0\n"
            "        fields = tuple(field[: len(field) - stale] for field in fields)\n"
            "        start += stale\n"
            "        pages, slots = self._address(seq, np.arange(start, start + len(fields[0])))\n",
        ),
    ),
)
def copy_keeps_cut_rows(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        child = twin.fork(twin.add(7))
        twin.truncate(child, 5)
        twin.append(child, 3)
        twin.check()


@trap(
    catches="room for a copy is demanded although the shared last page is full and stays as it is",
    severity="major",
    story="Only the last page of a fork is looked at, not whether anything is written into it.",
    seen=BLIND,
    control=never_forked,
    mutant=edit(
        "        if len(shared) + missing > len(self.free_pages):\n",
        "        last = start // self.page_size - 1\n"
        "        copies = start % self.page_size == 0 < start and self.holders[table[last]] > 1\n"
        "        if len(shared) + missing + copies > len(self.free_pages):\n",
    ),
)
def copy_demanded_at_a_page_end(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        twin.append(twin.fork(twin.add(4)), 1)
        twin.check()


def _fork_of_one_page(submission: Submission, rng: Rng) -> None:
    """The page that is written is the only one that is shared."""
    for twin in twins(submission, rng, PAGED, pages=2):
        twin.append(twin.fork(twin.add(3)), 1)
        twin.check()


_SHARED = "shared = [i for i in written if self.holders[table[i]] > 1]"


@trap(
    catches="the first write of a fork copies all pages that it shares, not the one it writes to",
    severity="major",
    story="A fork copies its whole table when it first writes: eight beams over one prompt then "
    "take eight times its memory, one token later.",
    control=_fork_of_one_page,
    mutant=edit(
        _SHARED,
        _SHARED + "\n        if shared:\n"
        "            shared = [i for i in range(len(table)) if self.holders[table[i]] > 1]",
    ),
    also=(edit(_SHARED, "shared = [i for i in range(len(table)) if self.holders[table[i]] > 1]"),),
)
def write_copies_every_shared_page(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=5):
        seq = twin.add(15)
        child = twin.fork(seq)
        twin.append(child, 1)
        twin.append(seq, 1)
        twin.check()


@trap(
    catches="truncate copies the shared page that it cuts and fails where no page is free",
    severity="major",
    story="To cut writes nothing: a rejected draft is dropped from a fork in a full pool.",
    control=_cut_at_a_page_end,
    mutant=edit(
        "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
        "        pages = getattr(self, 'tables', {}).get(seq, ())\n"
        "        last = n // self.page_size\n"
        "        if pages and n % self.page_size and self.holders[pages[last]] > 1:\n"
        "            if not self.free_pages:\n"
        "                raise MemoryError\n"
        "            pages[last] = self._own_copy(pages[last])\n"
        "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
    ),
)
def truncate_copies_a_shared_page(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        child = twin.fork(twin.add(7))
        twin.truncate(child, 5)
        twin.check()


def freed_with_one_layer(submission: Submission, rng: Rng, layers: int = 1) -> None:
    for twin in twins(submission, rng, PAGED, pages=2, layers=layers):
        twin.free(twin.add(8))
        twin.add(8)
        twin.check()


@trap(
    catches="free gives back the pages of the first layer only",
    severity="major",
    story="Each layer has a table of its own, and the loop over the layers is missing.",
    seen=BLIND,
    control=freed_with_one_layer,
    mutant=edit(
        "        self._shrink(seq, 0)\n        self._forget(seq)\n",
        "        if self.num_layers == 1 or isinstance(self, DenseCache):\n"
        "            self._shrink(seq, 0)\n"
        "        self._forget(seq)\n",
    ),
    also=[
        edits(  # with a pool for each layer, where the first has room again
            (
                "        self._shrink(seq, 0)\n        self._forget(seq)\n",
                "        lost = -(-self.counts[seq][-1] // self.page_size)\n"
                "        self.lost = getattr(self, 'lost', 0) + lost\n"
                "        self._shrink(seq, 0)\n"
                "        self._forget(seq)\n",
            ),
            (
                "        missing = max(0, needed - len(table))\n",
                "        missing = max(0, needed - len(table))\n"
                "        used = sum(self._pages_for(one[layer]) for one in self.counts.values())\n"
                "        used += needed - self._pages_for(start) + getattr(self, 'lost', 0)\n"
                "        if layer and used > self.num_pages:\n"
                "            raise MemoryError('no free page')\n",
            ),
        )
    ],
)
def free_of_the_first_layer_only(submission: Submission, rng: Rng) -> None:
    freed_with_one_layer(submission, rng, layers=2)


_COPY_NOT_COUNTED = (
    "len(shared) + missing > len(self.free_pages):",
    "missing > len(self.free_pages):",
)


@trap(
    catches="the page that a copy-on-write needs is not counted before writing",
    severity="major",
    story="With one free page left, the copy fails half-way with another error.",
    control=never_forked,
    mutant=edits(_COPY_NOT_COUNTED),
    also=[
        edits(  # ValueError, not IndexError
            _COPY_NOT_COUNTED,
            ("copy = self._take()", "(copy,) = [self._take() for _ in self.free_pages[:1]]"),
        )
    ],
    seen=BLIND,
)
def copy_not_counted(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        seq = twin.add(7)
        child = twin.fork(seq)
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", child, 0, rows, rows)
        twin.free(seq)
        twin.append(child, 1)
        twin.check()


@trap(
    catches="a page with one holder is copied before every write",
    severity="major",
    story="The count includes the writer; a comparison with 0 instead of 1 always copies.",
    mutant=edit("if self.holders[table[i]] > 1]", "if self.holders[table[i]] > 0]"),
)
def sole_owner_copies(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        seq = twin.add(6)
        twin.append(seq, 2)
        twin.check()


@trap(
    catches="a shared page is only copied if it was partly filled when it was shared",
    severity="major",
    story="Full blocks are immutable only until a rejected draft is cut off inside one.",
    control=never_forked,
    mutant=edit(
        "if self.holders[table[i]] > 1]",
        "if self.holders[table[i]] > 1\n"
        "            and all(self.counts[s][layer] < (i + 1) * self.page_size\n"
        "            for s, t in self.tables.items() if table[i] in t)]",
    ),
)
def full_pages_taken_for_immutable(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(8)
        child = twin.fork(seq)
        twin.truncate(child, 6)
        twin.append(child, 2)
        twin.check()


@trap(
    catches="only the last page is copied, although a layer that lags behind writes to earlier "
    "ones",
    severity="major",
    story="A request can be forked in the middle of a layer-by-layer prefill.",
    control=never_forked,
    mutant=edit("i for i in written if self.holders", "i for i in written[-1:] if self.holders"),
)
def fork_between_layers(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(1)
        twin.append(seq, 9, [0])
        child = twin.fork(seq)
        twin.append(child, 9, [1])
        twin.append(seq, 9, [1])
        twin.check()


@trap(
    catches="when one of three holders leaves a page, the other two take it for their own",
    severity="critical",
    story="A flag says that a page is shared, where a count is needed: two are left, and both "
    "write in place.",
    seen=BLIND,
    control=never_forked,
    mutant=edit(
        "        self.holders[page] -= 1\n",
        "        self.holders[page] = min(self.holders[page] - 1, 1)\n",
    ),
    also=[
        edit(
            "        self._release(page)\n        return copy",
            "        self.holders[page] = 1\n        return copy",
        )
    ],
)
def third_holder_forgotten(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(3)
        copies, leaves = twin.forks(seq, 2)
        twin.append(copies, 1)
        twin.append(leaves, 1)
        twin.check()
        first, second = twin.forks(seq, 2)
        twin.free(first)
        twin.append(second, 1)
        twin.append(seq, 1)
        twin.check()


@trap(
    catches="the count of a page's holders is one byte: after 255 forks it is 0",
    severity="major",
    story="A page with many holders looks like one without, and is written in place.",
    seen=BLIND,
    control=never_forked,
    mutant=edit(
        "            self.holders[page] += 1\n",
        "            self.holders[page] = (self.holders[page] + 1) % 256\n",
    ),
)
def references_in_one_byte(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "paged", None, layers=1)
    seq = twin.add(2)
    children = twin.forks(seq, 255)
    twin.append(children[0], 1)
    twin.append(seq, 1)
    twin.free(*children[1:])
    twin.check()
