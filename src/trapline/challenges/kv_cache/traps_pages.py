"""Bugs of pages: order, allocation, release."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    PAGED,
    Rng,
    Twin,
    twins,
)
from trapline.challenges.kv_cache.situations import BAD, BLIND, cut_between_pages

_KEPT, _KEPT_AND_ONE = "kept = self._pages_for(n)", "kept = n // self.page_size + 1"


def _whole_pages(condition: str) -> Mutant:
    """truncate rounds the length down to whole pages; a contiguous cache is one page."""
    return edit(
        "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
        f"        if {condition}:\n"
        "            whole = 1 if isinstance(self, PagedCache) else self.num_pages\n"
        "            n = n // (self.page_size * whole) * self.page_size * whole\n"
        "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
    )


def _in_pool_order(*pool: tuple[str, str]) -> Mutant:
    """A sequence's pages, by their numbers, in a pool that hands them out in this order."""
    pages = "self.tables[seq][: self._pages_for(count)]"
    return edits((pages, f"sorted({pages})"), *pool)


@trap(
    catches="a sequence's pages are read in the order of their numbers in the pool, not in its own "
    "order",
    severity="major",
    story="It is right as long as the pool is fresh and hands out pages in order.",
    mutant=_in_pool_order(),
    also=[_in_pool_order(("= list(range(self.num_pages))", "= list(range(self.num_pages))[::-1]"))],
)
def pages_read_in_pool_order(submission: Submission, rng: Rng) -> None:
    # One of two sequences leaves, and the other gets its page: behind its own, or before it,
    # whatever the order in which the pool hands out its two.
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        first, second = twin.add(4), twin.add(4)
        twin.free(second)
        twin.append(first, 4)
        twin.check()
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        first, second = twin.add(4), twin.add(4)
        twin.free(first)
        twin.append(second, 4)
        twin.check()


@trap(
    catches="the slot in a page is found with a bit mask",
    severity="major",
    story="t & (P − 1) equals t mod P for the usual page sizes, which are powers of two.",
    mutant=edit("positions % self.page_size", "positions & (self.page_size - 1)"),
)
def page_size_taken_for_a_power_of_two(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        for page in (1, 3, 6):
            twin = Twin(submission, rng, kind, bits, page=page)
            twin.append(twin.add(page + 1), page)
            twin.check()


@trap(
    catches="page numbers are kept in eight bits",
    severity="major",
    story="Tests use small pools; in a large one page 256 becomes page 0.",
    mutant=insert_after("table = np.array(self.tables[seq], dtype=np.int64)", ".astype(np.uint8)"),
)
def page_numbers_wrap(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, heads=1, width=2, page=1, pages=400):
        seq = twin.add(300)
        twin.append(seq, 90)
        twin.check()


@trap(
    catches="attention reads whole pages, the unwritten rest included",
    severity="major",
    story="An engine let its first chunk read unwritten slots; old requests showed through.",
    mutant=edits(
        (
            "attention(q, *self.view(seq, layer))",
            "attention(q, *(self.view(seq, layer) if isinstance(self, DenseCache) "
            "else self._whole_pages(seq, layer)))",
        ),
        (
            "    def fork(self, seq: int) -> int:",
            "    def _whole_pages(self, seq, layer):\n"
            "        counts, whole = self.counts, len(self.tables[seq]) * self.page_size\n"
            "        self.counts = {seq: [whole] * self.num_layers}\n"
            "        rows = self.view(seq, layer)\n"
            "        self.counts = counts\n"
            "        return rows\n\n"
            "    def fork(self, seq: int) -> int:",
        ),
    ),
)
def reads_beyond_the_end(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        old = twin.add()
        for layer in range(2):
            twin.put(old, layer, 50 * np.ones((8, 2, 4)), 1e3 * np.ones((8, 2, 4)))
        twin.free(old)
        twin.add(5)
        twin.check(attend=True)


@trap(
    catches="n positions take n // P + 1 pages",
    severity="major",
    story="An off-by-one error at the page boundary: every full sequence wastes a page.",
    mutant=edit("return -(-n // self.page_size)", "return n // self.page_size + 1"),
    # In a cache whose contiguous kinds have pages of one position, and which copies a shared page
    # only if it is partly filled.
    also=(
        edits(
            ("return -(-n // self.page_size)", "return n // self.page_size + 1"),
            (
                "if self.holders[table[i]] > 1]",
                "if self.holders[table[i]] > 1 and start % self.page_size]",
            ),
            (
                "used = sum(counts[layer] for counts in self.counts.values())",
                "used = sum(one[layer] + (one[layer] > 0) for one in self.counts.values())",
            ),
            (
                "if n > self._capacity_left(layer):",
                "if n + (self.counts[_seq][layer] == 0) > self._capacity_left(layer):",
            ),
        ),
    ),
    seen=BLIND,
)
def full_page_takes_another(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        seq = twin.add(4)
        twin.add(4)
        twin.check()
        twin.free(seq)
        twin.add(4)


@trap(
    catches="each append starts a fresh page instead of filling the last one",
    severity="major",
    story="A pool of 16 pages of 16 tokens is full after 16 decoding steps.",
    mutant=edit("missing = max(0, needed - len(table))", "missing = self._pages_for(n)"),
)
def page_for_every_append(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        seq = twin.add()
        for n in (1, 2, 1, 3, 1):
            twin.append(seq, n)
        twin.check()


@trap(
    catches="each layer of a step takes pages of its own from a pool that has room for all layers",
    severity="major",
    story="num_blocks is divided among the layers, which the contract does not say.",
    mutant=edit("= max(0, needed - len(table))", "= needed - self._pages_for(start)"),
)
def page_for_every_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=3, pages=3):
        twin.add(12)
        twin.check()


@trap(
    catches="a dense cache grows beyond the pool",
    severity="major",
    story="The limit is implemented for the paged cache only, and the dense cache grows without "
    "bound.",
    mutant=edit("if n > self._capacity_left(layer):", "if False:"),
    also=[
        edit(  # what a layer holds beyond the others is not counted
            "used = sum(counts[layer] for counts", "used = sum(min(counts) for counts"
        )
    ],
)
def pool_limit_ignored(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("quantized", 8)), page=3, pages=3):
        seq = twin.add(9)
        rows = twin.rows(1)
        for layer in range(2):
            twin.refuses(MemoryError, "append", seq, layer, rows, rows)
        other = twin.add()
        twin.refuses(MemoryError, "append", other, 0, rows, rows)
        twin.free(seq)
        twin.append(other, 9, [0])
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    catches="an exhausted page pool raises an error other than MemoryError",
    severity="minor",
    story="A scheduler that catches MemoryError to preempt a request stops on an IndexError.",
    mutant=edit(
        '            raise MemoryError(f"{len(shared) + missing} pages',
        '            raise IndexError(f"{len(shared) + missing} pages',
    ),
)
def exhaustion_is_another_error(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=2):
        twin.add(5)
        other = twin.add()
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    catches="a refused append has already taken the pages that were left",
    severity="major",
    story="Pages are taken one by one until none is left; those already taken are lost.",
    mutant=edits(
        (
            "if len(shared) + missing > len(self.free_pages):",
            "if len(shared) > len(self.free_pages):",
        ),
        (
            "        page = self.free_pages.pop()\n",
            "        if not self.free_pages:\n            raise MemoryError\n"
            "        page = self.free_pages.pop()\n",
        ),
        (
            "        table.extend(self._take() for _ in range(missing))\n",
            "        for _ in range(missing):\n            table.append(self._take())\n",
        ),
    ),
)
def failed_append_keeps_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, pages=4):
        seq = twin.add(7)
        rows = twin.rows(10)
        twin.refuses(MemoryError, "append", seq, 0, rows, rows)
        twin.add(8)
        twin.append(seq, 1)
        twin.check()


@trap(
    catches="a refused append leaves the positions that still fitted",
    severity="critical",
    story="Positions are written one by one until the pool is full; the retry stores them twice.",
    seen=BLIND,
    mutant=insert_before(
        "        self._reserve(seq, layer, len(k))\n        self._fix_dtype(k.dtype)\n",
        "        if len(k) > 1:\n"
        "            for i in range(len(k)):\n"
        "                self.append(seq, layer, k[i : i + 1], v[i : i + 1])\n"
        "            return\n",
    ),
)
def failed_append_half_written(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, pages=2):
        seq = twin.add(5)
        rows = twin.rows(4)
        twin.refuses(MemoryError, "append", seq, 0, rows, rows)
        twin.append(seq, 3)
        twin.check()


@trap(
    catches="v is found to be wrong after k was stored",
    severity="major",
    story="Validation and writing are interleaved, and the cache keeps a key without its value.",
    dimension="robustness",
    mutant=edit(
        "        self._check_rows(k, v)\n        if len(k) == 0:",
        "        self._check_rows(k, k)\n"
        "        self._reserve(seq, layer, len(k))\n"
        "        self.counts[seq][layer] += len(k)\n"
        "        self._check_rows(k, v)\n"
        "        self.counts[seq][layer] -= len(k)\n"
        "        if len(k) == 0:",
    ),
)
def refused_rows_already_written(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, pages=2):
        seq = twin.add(2)
        twin.refuses(BAD, "append", seq, 1, twin.rows(2), twin.normal(2, 2, 3))
        twin.append(seq, 6)
        twin.check()


@trap(
    catches="pages of a freed sequence never come back",
    severity="major",
    story="Short runs work; a long-running server runs out of pages.",
    mutant=edit("        self._shrink(seq, 0)\n        self._forget", "        self._forget"),
    seen=BLIND,
)
def free_leaks_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        twin.free(twin.add(8))
        twin.add(8)
        twin.check()


@trap(
    catches="pages behind the new end stay taken",
    severity="major",
    story="Speculative decoding cuts off rejected drafts all the time; each cut loses a page.",
    mutant=edit("        self._shrink(seq, n)\n", ""),
    seen=BLIND,
)
def truncate_leaks_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=2):
        seq = twin.add(8)
        twin.truncate(seq, 4)
        twin.add(4)
        twin.check()


@trap(
    catches="a sequence that is cut to whole pages keeps one page more than it needs",
    severity="major",
    story="n // P + 1 pages are kept where ⌈n/P⌉ hold data; what is freed leaves a page behind.",
    mutant=edit(_KEPT, _KEPT_AND_ONE),
    also=[
        edits(
            (_KEPT, _KEPT_AND_ONE),
            (
                "        return self.page_size * self.num_pages - used\n",
                "        lost = getattr(self, 'lost', 0)\n"
                "        return self.page_size * self.num_pages - used - lost\n",
            ),
            (
                "        self.rows[seq] = [tuple(a[:n].copy()",
                "        self.lost = getattr(self, 'lost', 0) + (max(self.counts[seq]) > n)\n"
                "        self.rows[seq] = [tuple(a[:n].copy()",
            ),
        )
    ],
    seen=BLIND,
)
def one_page_too_many_kept(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1, pages=3):
        seq = twin.add(12)
        twin.truncate(seq, 4)
        twin.add(4)
        twin.add(4)
        twin.check()


@trap(
    catches="the page that is cut in the middle is released",
    severity="critical",
    story="n // P pages are kept where ⌈n/P⌉ hold data.",
    seen=BLIND,
    control=cut_between_pages,
    mutant=edit("kept = self._pages_for(n)", "kept = n // self.page_size"),
)
def truncate_frees_a_page_in_use(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        seq = twin.add(12)
        twin.truncate(seq, 6)
        twin.check()


@trap(
    catches="truncate keeps ⌊n/P⌋ pages and loses the partly filled last one; reading it fails",
    severity="major",
    story="n // P pages are kept where ⌈n/P⌉ hold data.",
    seen=BLIND,
    control=cut_between_pages,
    mutant=edits(
        ("kept = self._pages_for(n)", "kept = n // self.page_size"),
        (
            "        count = self.counts[seq][layer]\n",
            "        count = self.counts[seq][layer]\n"
            "        self._address(seq, np.arange(count))\n",
        ),
    ),
)
def truncate_drops_the_last_page(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        seq = twin.add(12)
        twin.truncate(seq, 6)
        twin.check()


@trap(
    catches="truncate cuts to whole pages: the positions of the partly filled last one are lost",
    severity="major",
    story="The length is rounded down together with the number of pages.",
    seen=BLIND,
    control=cut_between_pages,
    mutant=_whole_pages("isinstance(self, PagedCache)"),
    also=(_whole_pages("True"),),
)
def truncate_to_whole_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        twin.truncate(twin.add(12), 6)
        twin.check()


@trap(
    catches="keep takes new pages and does not release the old ones",
    severity="major",
    story="Tree decoding compacts at every step, so the pool runs empty after a few of them.",
    mutant=edit("        self._shrink(seq, start)\n", "        del self.tables[seq][fixed:]\n"),
)
def keep_leaks_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=4)
        seq = twin.add(8)
        for _ in range(6):
            twin.keep(seq, [*range(7), *[7]][::-1])
        twin.keep(seq, [3, 1, 2])
        twin.add(12)
        twin.check()


@trap(
    catches="keep in a full pool fails although it frees what it needs",
    severity="major",
    story="New pages are taken before the old ones are released.",
    seen=BLIND,
    mutant=edit("if needed > len(self.free_pages) + own:", "if needed > len(self.free_pages):"),
)
def keep_needs_a_second_copy(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, pages=3):
        seq = twin.add(12)
        twin.keep(seq, range(11, -1, -1))
        twin.check()
