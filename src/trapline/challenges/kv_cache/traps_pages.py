"""Bugs of pages: their order, their room, their release."""

import numpy as np

from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    KINDS,
    PAGED,
    Rng,
    Twin,
)
from trapline.challenges.kv_cache.situations import BAD


@trap(
    "pages-read-in-pool-order",
    catches="a sequence's pages are read in physical instead of logical order",
    severity="critical",
    story="Right as long as the pool is fresh and handed out in order.",
)
def pages_read_in_pool_order(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=6)
        # Whatever order the pool hands pages out in, one of these sequences gets them out of order.
        first = twin.add(16)
        twin.check(attend=False)
        twin.free(first)
        parts = [twin.add(4) for _ in range(6)]
        for seq in (parts[4], parts[1], parts[3]):
            twin.free(seq)
        twin.add(12)
        twin.check(attend=False)
        for seq in (parts[5], parts[0], parts[2]):
            twin.free(seq)
        twin.add(12)
        twin.check(attend=False)


@trap(
    "page-size-taken-for-a-power-of-two",
    catches="the slot in a page is found with a bit mask",
    severity="major",
    story="t & (P − 1) is t mod P for the page sizes that everybody tests with.",
)
def page_size_taken_for_a_power_of_two(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        for page in (1, 3, 6):
            twin = Twin(submission, rng, kind, bits, page=page)
            twin.append(twin.add(page + 1), page)
            twin.check()


@trap(
    "page-numbers-wrap",
    catches="page numbers are kept in eight bits",
    severity="critical",
    story="Small pools in the tests, large ones in service; page 256 was page 0.",
)
def page_numbers_wrap(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, layers=1, heads=1, width=2, page=1, pages=400)
        seq = twin.add(300)
        twin.append(seq, 90)
        twin.check()


@trap(
    "reads-beyond-the-end",
    catches="attention reads whole pages, the unwritten rest included",
    severity="critical",
    story="An engine let its first chunk read unwritten slots; old requests showed through.",
)
def reads_beyond_the_end(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=2)
        old = twin.add()
        for layer in range(2):
            twin.put(old, layer, 50 * np.ones((8, 2, 4)), 1e3 * np.ones((8, 2, 4)))
        twin.free(old)
        twin.add(5)
        twin.check()


@trap(
    "full-page-takes-another",
    catches="n positions take n // P + 1 pages",
    severity="major",
    story="Off by one at the page border: every full sequence wastes a page.",
)
def full_page_takes_another(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add(4)
        twin.add(4)
        twin.check(attend=False)
        twin.free(seq)
        twin.add(4)


@trap(
    "page-for-every-append",
    catches="each append starts a fresh page instead of filling the last one",
    severity="major",
    story="A pool of 16-token pages that is full after 16 tokens of decoding.",
)
def page_for_every_append(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add()
        for n in (1, 2, 1, 3, 1):
            twin.append(seq, n)
        twin.check(attend=False)


@trap(
    "page-for-every-layer",
    catches="each layer of a step takes pages of its own from a pool that has room for all layers",
    severity="major",
    story="num_blocks was divided by the number of layers without anybody saying so.",
)
def page_for_every_layer(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, layers=3, pages=3)
        twin.add(12)
        twin.check(attend=False)


@trap(
    "pool-limit-ignored",
    catches="a dense cache grows beyond the pool",
    severity="major",
    story="The limit was built for pages only; the dense cache took the machine down.",
)
def pool_limit_ignored(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("quantized", 8)):
        twin = Twin(submission, rng, kind, bits, page=3, pages=3)
        seq = twin.add(9)
        rows = twin.rows(1)
        for layer in range(2):
            twin.refuses(MemoryError, "append", seq, layer, rows, rows)
        other = twin.add()
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    "exhaustion-is-another-error",
    catches="an exhausted page pool raises something else than MemoryError",
    severity="minor",
    story="A scheduler that catches MemoryError to preempt a request saw an IndexError and died.",
)
def exhaustion_is_another_error(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=2)
        twin.add(5)
        other = twin.add()
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", other, 0, rows, rows)


@trap(
    "failed-append-keeps-pages",
    catches="a refused append has already taken the pages that were left",
    severity="major",
    story="Pages are taken one by one until there are none; those taken are lost.",
)
def failed_append_keeps_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=4)
        seq = twin.add(7)
        rows = twin.rows(10)
        twin.refuses(MemoryError, "append", seq, 0, rows, rows)
        twin.add(8)
        twin.append(seq, 1)
        twin.check()


@trap(
    "failed-append-half-written",
    catches="a refused append leaves the positions that still fitted",
    severity="critical",
    story="Token by token until the pool is full; the retry then stores them twice.",
)
def failed_append_half_written(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add(5)
        rows = twin.rows(4)
        twin.refuses(MemoryError, "append", seq, 0, rows, rows)
        twin.append(seq, 3)
        twin.check(attend=False)


@trap(
    "refused-rows-already-written",
    catches="v is found to be wrong after k was stored",
    severity="major",
    story="Validation and writing interleaved: the cache kept a key without its value.",
)
def refused_rows_already_written(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add(2)
        twin.refuses(BAD, "append", seq, 1, twin.rows(2), twin.normal(2, 2, 3))
        twin.append(seq, 6)
        twin.check(attend=False)


@trap(
    "free-leaks-pages",
    catches="pages of a freed sequence never come back",
    severity="critical",
    story="Served well in every demo, and ran out of pages after an hour.",
)
def free_leaks_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, pages=3)
        for n in (12, 9, 12):
            twin.free(twin.add(n))
        twin.add(12)


@trap(
    "truncate-leaks-pages",
    catches="pages behind the new end stay taken",
    severity="major",
    story="Rejected drafts are cut off thousands of times a minute; each cut lost a page.",
)
def truncate_leaks_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, pages=4)
        seq = twin.add(16)
        twin.truncate(seq, 4)
        twin.add(12)
        twin.check(attend=False)


@trap(
    "truncate-frees-a-page-in-use",
    catches="the page that is cut in the middle is given away",
    severity="critical",
    story="n // P pages kept where ⌈n/P⌉ hold data.",
)
def truncate_frees_a_page_in_use(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=4)
        seq = twin.add(12)
        twin.truncate(seq, 6)
        twin.add(8)
        twin.check()


@trap(
    "keep-leaks-pages",
    catches="keep takes new pages and forgets to give the old ones back",
    severity="major",
    story="Tree decoding compacts every step; the pool lasted as many steps as it had pages.",
)
def keep_leaks_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=4)
        seq = twin.add(8)
        for _ in range(6):
            twin.keep(seq, [*range(7), *[7]][::-1])
        twin.keep(seq, [3, 1, 2])
        twin.add(12)
        twin.check(attend=False)
        # Pages in front that stay as they are; only the last one is written anew.
        twin = Twin(submission, rng, kind, bits, pages=5)
        twin.keep(twin.add(12), [*range(8), 9, 8])
        twin.add(8)
        twin.check(attend=False)


@trap(
    "keep-needs-a-second-copy",
    catches="keep in a full pool fails although it frees what it needs",
    severity="major",
    story="New pages were taken before the old ones were released.",
)
def keep_needs_a_second_copy(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, pages=3)
        seq = twin.add(12)
        twin.keep(seq, range(11, -1, -1))
        twin.check(attend=False)
