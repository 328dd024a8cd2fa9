"""The bugs that caches of keys and values are written with, and the situations that show them."""

from functools import partial
from typing import Any

import numpy as np

from trapline.arena import expect
from trapline.arena.errors import SubmissionRaised
from trapline.arena.proxy import Submission
from trapline.arena.traps import trap
from trapline.challenges.kv_cache.cases import (
    KINDS,
    METHODS,
    PAGED,
    QUANTISED,
    Rng,
    Twin,
    check_attention,
    context,
    prefill,
)
from trapline.gold.kv_cache.oracle import quantization_step

BAD = (ValueError, TypeError)

# --- attention over the cache -------------------------------------------------------------------


@trap(
    "gqa-by-tiling",
    catches="query head h reads kv head h % G instead of h // (H/G)",
    severity="critical",
    story="The classic grouped-query slip: repeating the head list instead of each head.",
)
def gqa_by_tiling(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, heads=2, group=2)
    seq = twin.add()
    k, v = twin.rows(3), np.zeros((3, 2, 4))
    v[:, 1] = 100.0
    twin.put(seq, 0, k, v)
    q = twin.queries(1)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    "causal-mask-upper-left",
    catches="new queries are masked as if the sequence began with them",
    severity="critical",
    story="Reported against at least four inference engines: chunk two cannot see chunk one.",
)
def causal_mask_upper_left(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense")
    seq = twin.add(6)
    k, v = twin.model.view(seq, 0)
    q = twin.queries(2)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    "no-causal-mask",
    catches="several new queries see each other's future",
    severity="critical",
    story="A decoder tested with one token a step needs no mask; a speculative step does.",
)
def no_causal_mask(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    seq = twin.add(5)
    k, v = twin.rows(3), np.zeros((3, 2, 4))
    v[2] = 1e3
    twin.put(seq, 0, k, v)
    keys, values = twin.model.view(seq, 0)
    q = twin.queries(3)
    check_attention(twin.cache.attend(seq, 0, q), q, keys, values)


@trap(
    "query-blind-to-itself",
    catches="a query does not see its own position",
    severity="critical",
    story="A strict comparison in the mask; position 0 sees nothing and turns into NaN.",
)
def query_blind_to_itself(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense")
    seq = twin.add()
    k, v = twin.rows(2), twin.rows(2)
    twin.put(seq, 0, k, v)
    q = twin.queries(2)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    "scale-missing",
    catches="scores are not multiplied by D^-½",
    severity="critical",
    story="Lost when cached attention is rewritten beside the uncached one.",
)
def scale_missing(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, width=16)
    seq = twin.add()
    k, v = twin.rows(4), twin.rows(4)
    k[0] = 2.0
    k[1:] = -2.0
    v[0] = 5.0
    v[1:] = -5.0
    twin.put(seq, 0, k, v)
    q = np.full((1, 4, 16), 0.1)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    "softmax-overflow",
    catches="exp of a score without subtracting the largest",
    severity="critical",
    story="Works on random tests; real attention sinks have scores of several hundred.",
)
def softmax_overflow(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense")
    seq = twin.add()
    k, v = 1000.0 * (1 + np.abs(twin.rows(3))), twin.rows(3)
    twin.put(seq, 0, k, v)
    q = 1 + np.abs(twin.queries(1))
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    "keys-and-values-swapped",
    catches="attention reads values as keys",
    severity="critical",
    story="Two arrays of one shape, returned as a pair and unpacked the other way round.",
)
def keys_and_values_swapped(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged_quantized", 8)):
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k, v = twin.rows(3), 10.0 + twin.rows(3)
        twin.put(seq, 0, k, v)
        keys, values = twin.stored(seq, 0)
        q = twin.queries(1)
        check_attention(twin.cache.attend(seq, 0, q), q, keys, values)


@trap(
    "layout-disagreement",
    catches="the cache stores positions first, attention reads heads first",
    severity="critical",
    story="A published entry mixed two conventions; the shapes fitted, the values did not.",
)
def layout_disagreement(submission: Submission, rng: Rng) -> None:
    # As many positions as heads: a reshape in place of a transposition keeps every shape.
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits, heads=4, group=1)
        seq = twin.add()
        k, v = twin.rows(4), twin.rows(4)
        k[:, 0], v[:, 0] = 3.0, -50.0
        k[:, 1:], v[:, 1:] = -3.0, 50.0
        twin.put(seq, 0, k, v)
        q = np.ones((1, 4, 4))
        check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    "attend-uses-the-shortest-layer",
    catches="attention of a layer sees only the positions that all layers have",
    severity="critical",
    story="During a step layer 0 is ahead of the others; the common length is one too small.",
)
def attend_uses_the_shortest_layer(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(3)
        twin.append(seq, 1, [0])
        k, v = twin.stored(seq, 0)
        q = twin.queries(1)
        check_attention(twin.cache.attend(seq, 0, q), q, k, v, "attend of a layer that is ahead")


@trap(
    "more-queries-than-positions",
    catches="queries without a position of their own are answered",
    severity="minor",
    story="The mask leaves nothing to see and the softmax answers NaN instead of an error.",
)
def more_queries_than_positions(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    seq = twin.add(2)
    twin.refuses(BAD, "attend", seq, 0, twin.queries(3))


@trap(
    "attend-in-half-precision",
    catches="attention rounds to half precision on the way",
    severity="major",
    story="A cast that belongs to the storage and was applied to the arithmetic.",
)
def attend_in_half_precision(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        twin = Twin(submission, rng, dtype=dtype)
        seq = twin.add(12)
        k, v = twin.model.view(seq, 0)
        q = twin.queries(8) / 4
        check_attention(twin.cache.attend(seq, 0, q), q, k, v, f"attend in {np.dtype(dtype)}")


# --- appending ----------------------------------------------------------------------------------


@trap(
    "append-one-token-only",
    catches="an append of several positions stores the first one only",
    severity="critical",
    story="A winning entry stored keys[:, :, 0, :]: right for decoding, wrong for a prompt.",
)
def append_one_token_only(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        twin.add(3)
        twin.check(attend=False)


@trap(
    "append-across-pages",
    catches="an append that crosses a page border wraps inside its first page",
    severity="critical",
    story="The page is looked up once an append instead of once a position.",
)
def append_across_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(3)
        twin.append(seq, 7)
        twin.check()


@trap(
    "layers-overwrite-each-other",
    catches="all layers write to the first one's storage",
    severity="critical",
    story="A layer index left over from a placeholder.",
)
def layers_overwrite_each_other(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, layers=3)
        twin.add(5)
        twin.check()


@trap(
    "one-counter-for-all-layers",
    catches="appending to one layer moves the write position of the others",
    severity="critical",
    story="The length is kept a sequence; the second layer of a step then starts one further.",
)
def one_counter_for_all_layers(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits, layers=3)
        seq = twin.add()
        for layer in (2, 0, 1):
            twin.append(seq, 2, [layer])
            twin.check(attend=False)


@trap(
    "length-of-the-first-layer",
    catches="length() counts positions that some layers do not have yet",
    severity="major",
    story="Length was read from layer 0, which is always ahead.",
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
    "strided-input",
    catches="rows are read in memory order instead of index order",
    severity="critical",
    story="Keys arrive as a transposed view of (G,n,D) in every real model.",
)
def strided_input(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k = twin.normal(2, 5, 4).transpose(1, 0, 2)
        v = twin.normal(4, 2, 10).transpose(2, 1, 0)[::2]
        twin.put(seq, 0, k, v)
        twin.check(attend=False)
        q = twin.normal(4, 4, 3).transpose(2, 1, 0)
        check_attention(twin.cache.attend(seq, 0, q), q, k, v, "attend with a strided query")


@trap(
    "float64-stored-as-float32",
    catches="an unquantised cache rounds what it stores",
    severity="major",
    story="The pool is allocated in one dtype, whatever comes.",
)
def float64_stored_as_float32(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        twin.add(3)
        twin.check(attend=False)


@trap(
    "float32-comes-back-wider",
    catches="float32 in, float64 out",
    severity="minor",
    story="A float64 scratch array leaks out and doubles the memory of all that follows.",
)
def float32_comes_back_wider(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, dtype=np.float32)
        twin.add(3)
        twin.check()


@trap(
    "narrow-rows-are-stretched",
    catches="rows of the wrong width or head count are broadcast into the cache",
    severity="major",
    story="Assigning into a pool stretches an axis of one without a word.",
)
def narrow_rows_are_stretched(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        for shape in ((3, 2, 1), (3, 1, 4), (3, 2, 5), (3, 4), (1, 3, 2, 4)):
            rows = twin.normal(*shape)
            twin.refuses(BAD, "append", seq, 0, rows, rows)


@trap(
    "one-value-for-many-keys",
    catches="v with another number of positions than k is accepted",
    severity="major",
    story="A value of one position is broadcast over all the new keys.",
)
def one_value_for_many_keys(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        twin.refuses(BAD, "append", seq, 0, twin.rows(3), twin.rows(1))
        twin.refuses(BAD, "append", seq, 0, twin.rows(1), twin.rows(3))


@trap(
    "integer-rows-accepted",
    catches="integer or complex keys are cast in silence",
    severity="minor",
    story="Already quantised codes were appended to a float cache and nobody noticed for weeks.",
)
def integer_rows_accepted(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None), ("paged_quantized", 8)):
        twin = Twin(submission, rng, kind, bits)
        # Before the first rows, when the cache knows no dtype yet, and after them.
        for positions in (0, 2):
            seq = twin.add(positions)
            for dtype in (np.int64, np.int8, np.complex128):
                rows = np.ones((2, 2, 4), dtype)
                twin.refuses(BAD, "append", seq, 0, rows, rows)
        twin.refuses(BAD, "attend", seq, 0, np.ones((1, 4, 4), np.int64))


@trap(
    "mixed-dtypes-accepted",
    catches="float32 keys beside float64 values are accepted",
    severity="minor",
    story="One of the two lost half its digits on the way into a common pool.",
)
def mixed_dtypes_accepted(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        rows = twin.rows(1)
        twin.refuses(BAD, "append", seq, 0, rows.astype(np.float32), rows)
        twin.refuses(BAD, "append", seq, 0, rows, rows.astype(np.float32))


@trap(
    "rank-not-checked",
    catches="arrays of another rank fail somewhere deep inside, with another error",
    severity="minor",
    story="A single token without its axis: the message was about indices of a tuple.",
)
def rank_not_checked(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        for shape in ((4,), (4, 4), (1, 1, 4, 4)):
            twin.refuses(BAD, "attend", seq, 0, twin.normal(*shape))
            twin.refuses(BAD, "append", seq, 0, twin.normal(*shape), twin.normal(*shape))


@trap(
    "negative-layer",
    catches="layer −1 means the last layer",
    severity="minor",
    story="An index error upstream became silent corruption of the last layer.",
)
def negative_layer(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        rows = twin.rows(1)
        for layer in (-1, 2):
            twin.refuses(BAD, "append", seq, layer, rows, rows)
            twin.refuses(BAD, "view", seq, layer)
            twin.refuses(BAD, "attend", seq, layer, twin.queries(1))


# --- sequences ----------------------------------------------------------------------------------


@trap(
    "sequences-share-a-counter",
    catches="two sequences of different length move each other's end",
    severity="critical",
    story="Batches where every row has the length of the longest; rows influence each other.",
)
def sequences_share_a_counter(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        a, b = twin.add(), twin.add()
        twin.append(a, 3)
        twin.append(b, 1)
        twin.append(a, 2)
        twin.check()


@trap(
    "two-caches-share-state",
    catches="a second cache sees the sequences of the first",
    severity="critical",
    story="A mutable class attribute or default argument as bookkeeping.",
)
def two_caches_share_state(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        one, other = Twin(submission, rng, kind, bits), Twin(submission, rng, kind, bits)
        one.add(5)
        other.add(2)
        one.check(attend=False)
        other.check(attend=False)


@trap(
    "freed-sequence-answers",
    catches="a freed sequence looks empty instead of unknown",
    severity="major",
    story="A handle used after free read another request's tokens.",
)
def freed_sequence_answers(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        twin.add(2)
        gone = twin.add(2)
        twin.free(gone)
        for method, args in METHODS:
            twin.refuses(KeyError, method, gone, *args)


@trap(
    "unknown-sequence-created",
    catches="using a sequence that was never added creates it",
    severity="minor",
    story="A dictionary with a default factory; a typo becomes a second, empty conversation.",
)
def unknown_sequence_created(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        for method, args in METHODS:
            twin = Twin(submission, rng, kind, bits)
            seq = twin.add(2)
            twin.refuses(KeyError, method, seq + 1000, *args)


@trap(
    "sequence-number-reused",
    catches="add() gives out the number of a freed sequence",
    severity="major",
    story="The stale handle of a finished request then reads a stranger's cache.",
)
def sequence_number_reused(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None)):
        twin = Twin(submission, rng, kind, bits)
        first, second = twin.add(1), twin.add(1)
        twin.free(first)
        twin.add(1)
        twin.free(second)
        twin.fork(twin.add(1))
        twin.refuses(KeyError, "length", first)


# --- pages: order, room, release ----------------------------------------------------------------


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


# --- forks --------------------------------------------------------------------------------------


@trap(
    "shared-tail-written-in-place",
    catches="two sequences write into the same partly filled page",
    severity="critical",
    story="Reported twice against one engine: the tail block is shared without a copy.",
)
def shared_tail_written_in_place(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(5)
        child = twin.fork(seq)
        twin.append(child, 2)
        twin.append(seq, 2)
        twin.check()


@trap(
    "parent-writes-without-copy",
    catches="only the fork copies a shared page; the parent still writes in place",
    severity="critical",
    story="The parent was taken for the owner of the page.",
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
            twin.check(attend=False)


@trap(
    "copy-of-one-layer",
    catches="copy-on-write copies the written layer and loses the others",
    severity="critical",
    story="The page spans all layers, the copy did not.",
)
def copy_of_one_layer(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, layers=3)
        seq = twin.add(5)
        child = twin.fork(seq)
        for layer in (1, 0, 2):
            twin.append(child, 1, [layer])
            twin.check(attend=False)


@trap(
    "copy-of-keys-only",
    catches="copy-on-write forgets the values",
    severity="critical",
    story="Two pools, one copied.",
)
def copy_of_keys_only(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        child = twin.fork(twin.add(3))
        twin.append(child, 1)
        twin.check()


@trap(
    "copy-without-scales",
    catches="copy-on-write copies codes but not their scales",
    severity="critical",
    story="The quantised pool has two parts; reordering once reached only one of them.",
)
def copy_without_scales(submission: Submission, rng: Rng) -> None:
    for bits in (8, 4):
        twin = Twin(submission, rng, "paged_quantized", bits)
        child = twin.fork(twin.add(3))
        twin.append(child, 2)
        twin.check(attend=False)


@trap(
    "fork-shares-the-page-table",
    catches="parent and child hold the same list of pages",
    severity="critical",
    story="An assignment where a copy was meant; what one appends, the other owns.",
)
def fork_shares_the_page_table(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(4)
        child = twin.fork(seq)
        twin.append(child, 3)
        twin.append(seq, 6)
        twin.check()
        twin.truncate(child, 2)
        twin.check(attend=False)


@trap(
    "fork-shares-the-length",
    catches="an append to the child lengthens the parent",
    severity="critical",
    story="The list of lengths is handed over instead of copied.",
)
def fork_shares_the_length(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        child = twin.fork(twin.add(4))
        twin.append(child, 1)
        twin.check(attend=False)


@trap(
    "fork-not-counted",
    catches="a fork does not hold its pages; freeing the parent gives them away",
    severity="critical",
    story="Reference counts were raised for new pages only.",
)
def fork_not_counted(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=4)
        seq = twin.add(8)
        twin.fork(seq)
        twin.free(seq)
        twin.add(8)
        twin.check()


@trap(
    "free-takes-shared-pages",
    catches="freeing a fork gives away pages that its parent still holds",
    severity="critical",
    story="Found in beam search: dropping one beam corrupted its siblings.",
)
def free_takes_shared_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=4)
        seq = twin.add(8)
        child = twin.fork(twin.fork(seq))
        twin.free(child)
        twin.add(8)
        twin.check()


@trap(
    "copied-page-stays-held",
    catches="copy-on-write keeps its hold on the page it left",
    severity="major",
    story="The count of the old page is not lowered; it never becomes free.",
)
def copied_page_stays_held(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=4)
        for _ in range(2):
            seq = twin.add(6)
            child = twin.fork(seq)
            twin.append(child, 1)
            twin.free(seq)
            twin.free(child)
        twin.add(16)


@trap(
    "fork-copies-pages",
    catches="a fork takes pages although it has written nothing",
    severity="major",
    story="Eight beams over one prompt took eight times its memory.",
)
def fork_copies_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=3)
        seq = twin.add(12)
        for _ in range(3):
            twin.fork(seq)
        twin.check(attend=False)


@trap(
    "shared-pages-counted-twice",
    catches="pages held by several sequences count several times against the pool",
    severity="major",
    story="Room was computed from the lengths of all sequences.",
)
def shared_pages_counted_twice(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=5)
        seq = twin.add(12)
        child = twin.fork(seq)
        twin.append(child, 4)
        twin.append(seq, 4)
        twin.check(attend=False)


@trap(
    "copy-not-counted",
    catches="the page that a copy-on-write needs is not counted before writing",
    severity="major",
    story="The last free page decides; the copy failed half-way with another error.",
)
def copy_not_counted(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add(7)
        child = twin.fork(seq)
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", child, 0, rows, rows)
        twin.free(seq)
        twin.append(child, 1)
        twin.check(attend=False)


@trap(
    "sole-owner-copies",
    catches="a page with one holder is copied before every write",
    severity="major",
    story="The count includes the writer; comparing with 0 instead of 1 copies always.",
)
def sole_owner_copies(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add(6)
        twin.append(seq, 2)
        twin.check(attend=False)


@trap(
    "full-pages-taken-for-immutable",
    catches="a shared page is only copied if it was partly filled when it was shared",
    severity="critical",
    story="Full blocks are immutable, until a rejected draft is cut off in the middle of one.",
)
def full_pages_taken_for_immutable(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(8)
        child = twin.fork(seq)
        twin.truncate(child, 6)
        twin.append(child, 2)
        twin.check()


@trap(
    "fork-between-layers",
    catches="only the last page is copied, though a layer that lags behind writes to earlier ones",
    severity="major",
    story="A request was forked in the middle of a prefill, layer by layer.",
)
def fork_between_layers(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(1)
        twin.append(seq, 9, [0])
        child = twin.fork(seq)
        twin.append(child, 9, [1])
        twin.append(seq, 9, [1])
        twin.check(attend=False)


# --- keep and truncate --------------------------------------------------------------------------


@trap(
    "keep-sorts-its-indices",
    catches="positions come back in ascending order",
    severity="critical",
    story="A boolean mask was used where an order was given.",
)
def keep_sorts_its_indices(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(9)
        twin.keep(seq, [0, 1, 8, 3, 5])
        twin.check(attend=False)


@trap(
    "keep-in-one-layer",
    catches="only the first layer is compacted",
    severity="critical",
    story="Compaction after a tree step was written for one layer and called once.",
)
def keep_in_one_layer(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, layers=3)
        seq = twin.add(6)
        twin.keep(seq, [4, 0, 2])
        twin.check(attend=False)


@trap(
    "keep-leaves-a-layer-ahead",
    catches="layers that were ahead are still ahead after keep",
    severity="major",
    story="Compaction between two layers of a step: one layer kept a token that was rejected.",
)
def keep_leaves_a_layer_ahead(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(4)
        twin.append(seq, 2, [0])
        twin.keep(seq, [3, 0, 1])
        twin.check(attend=False)
        twin.append(seq, 1)
        twin.check(attend=False)


@trap(
    "keep-overwrites-its-source",
    catches="rows are moved one by one and read after they were overwritten",
    severity="critical",
    story="In-place compaction is right for ascending indices and wrong for any other order.",
)
def keep_overwrites_its_source(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(5)
        twin.keep(seq, [1, 0, 4, 2])
        twin.check(attend=False)


@trap(
    "keep-writes-shared-pages",
    catches="keep reorders pages that another sequence holds too",
    severity="critical",
    story="Compacting one branch of a search scrambled the others.",
)
def keep_writes_shared_pages(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(7)
        child = twin.fork(seq)
        twin.keep(child, [0, 1, 2, 6, 5])
        twin.check(attend=False)
        twin.append(child, 4)
        twin.append(seq, 2)
        twin.check()


@trap(
    "keep-without-scales",
    catches="keep moves codes but leaves their scales where they were",
    severity="critical",
    story="A beam reorder reached the residual part of a quantised cache and not the packed one.",
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
        twin.check(attend=False)


@trap(
    "keep-nothing",
    catches="keep with an empty list fails or keeps everything",
    severity="minor",
    story="An empty Python list becomes an array of floats, which cannot be an index.",
)
def keep_nothing(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(3)
        twin.keep(seq, [])
        twin.check(attend=False)
        twin.append(seq, 2)
        twin.check(attend=False)


@trap(
    "keep-fails-half-way",
    catches="keep gives its pages away and then finds that it has no room for new ones",
    severity="major",
    story="The sequence was gone, and the MemoryError said to try again later.",
)
def keep_fails_half_way(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=3)
        child = twin.fork(twin.add(12))
        # All pages are shared and none is free: there is nowhere to put another order.
        twin.refuses(MemoryError, "keep", child, list(range(11, -1, -1)))
        twin.check()


@trap(
    "keep-twice-the-same",
    catches="a position can be kept twice",
    severity="minor",
    story="The cache grew by compaction, past what the pool had promised.",
)
def keep_twice_the_same(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(4)
        twin.refuses(BAD, "keep", seq, [0, 2, 2])


@trap(
    "keep-outside-the-sequence",
    catches="negative or too large indices are accepted",
    severity="major",
    story="Position −1 is the last one of a Python list and the last one of somebody else's page.",
)
def keep_outside_the_sequence(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(6)
        # Layer 0 is ahead: position 6 exists there, but not in every layer.
        twin.append(seq, 1, [0])
        for indices in ([0, -1], [2, 6], [0, 7], [0.5, 1.5], [[0, 1], [2, 3]]):
            twin.refuses(BAD, "keep", seq, indices)


@trap(
    "truncate-in-one-layer",
    catches="only one layer is cut",
    severity="critical",
    story="The length went down, and the other layers went on attending to rejected drafts.",
)
def truncate_in_one_layer(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, layers=3)
        seq = twin.add(7)
        twin.truncate(seq, 5)
        twin.append(seq, 2)
        twin.check()


@trap(
    "truncate-to-nothing",
    catches="truncate(seq, 0) does nothing",
    severity="major",
    story="Zero is false.",
)
def truncate_to_nothing(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(6)
        twin.truncate(seq, 0)
        twin.check(attend=False)
        twin.append(seq, 2)
        twin.check()


@trap(
    "truncate-leaves-a-layer-ahead",
    catches="cutting to the common length leaves layers that were ahead as they are",
    severity="major",
    story="A step was aborted between two layers; the retry appended to what the first had kept.",
)
def truncate_leaves_a_layer_ahead(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(3)
        twin.append(seq, 2, [0])
        twin.truncate(seq, 3)
        twin.check(attend=False)
        twin.append(seq, 1)
        twin.check(attend=False)


@trap(
    "truncate-below-zero",
    catches="a negative length counts from the end",
    severity="minor",
    story="Python's slice semantics: truncate(−1) dropped the newest token.",
)
def truncate_below_zero(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(6)
        twin.refuses(BAD, "truncate", seq, -1)


@trap(
    "truncate-beyond-the-end",
    catches="truncating to more than there is succeeds",
    severity="minor",
    story="The rollback point was computed from the wrong sequence, and nothing said so.",
)
def truncate_beyond_the_end(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(3)
        twin.append(seq, 2, [0])
        for n in (4, 6):
            twin.refuses(BAD, "truncate", seq, n)


# --- quantisation -------------------------------------------------------------------------------


def _full(submission: Submission, rng: Rng, kind: str, bits: int | None) -> tuple[Twin, int]:
    """A float32 cache filled to the last position, and how many rows (of D elements) it holds."""
    twin = Twin(submission, rng, kind, bits, heads=2, width=64, page=8, pages=8, dtype=np.float32)
    twin.add(64)
    return twin, 64 * 2 * 2 * 2


def _bytes(twin: Twin) -> int:
    claim = twin.cache.nbytes()
    expect.that(isinstance(claim, int | np.integer), f"nbytes() is a {type(claim).__name__}")
    return int(claim)


def _at_most(submission: Submission, rng: Rng, kind: str, bits: int) -> None:
    twin, rows = _full(submission, rng, kind, bits)
    limit = rows * (bits * 64 // 8 + 8) + 64 * 8 * 2 + 4096
    claim = _bytes(twin)
    expect.that(claim <= limit, f"{kind} with {bits} bits takes {claim} bytes, more than {limit}")


@trap(
    "scales-eat-the-saving",
    catches="a scale for every element: the quantised cache is larger than the plain one",
    severity="critical",
    story="Two published entries stored a scale per element; one reported a saving of −125 %.",
)
def scales_eat_the_saving(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        _at_most(submission, rng, kind, bits)


@trap(
    "four-bits-in-a-byte",
    catches="4 bit codes are stored one a byte",
    severity="major",
    story="The range is right, the packing was left for later.",
)
def four_bits_in_a_byte(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        _at_most(submission, rng, kind, 4)


@trap(
    "scales-not-counted",
    catches="nbytes() leaves the scales out",
    severity="major",
    story="A saving of 4× was reported while 0.4× was stored.",
)
def scales_not_counted(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin, rows = _full(submission, rng, kind, bits)
        # The error bound holds for every row by itself: each needs at least a byte of scale.
        least = rows * (bits * 64 // 8 + 1)
        claim = _bytes(twin)
        expect.that(claim >= least, f"{kind}: {claim} bytes cannot hold {least} bytes of codes")


@trap(
    "nbytes-of-one-layer",
    catches="nbytes() counts one layer, or keys only",
    severity="minor",
    story="The number on the dashboard was a factor of 64 too small.",
)
def nbytes_of_one_layer(submission: Submission, rng: Rng) -> None:
    for kind in ("dense", "paged"):
        twin, rows = _full(submission, rng, kind, None)
        claim, least = _bytes(twin), rows * 64 * 4
        expect.that(claim >= least, f"{kind}: {claim} bytes cannot hold {least} bytes of rows")
        expect.that(claim <= 1.5 * least + 8192, f"{kind}: {claim} bytes for {least} bytes of rows")


@trap(
    "scale-of-the-whole-append",
    catches="one scale for all positions of an append",
    severity="critical",
    story="One outlier token in a prompt of a thousand erased the others.",
)
def scale_of_the_whole_append(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k, v = twin.rows(4), twin.rows(4)
        k[1], v[2] = 1000 * k[1], 1000 * v[2]
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "scale-shared-by-heads",
    catches="one scale for all heads of a position",
    severity="major",
    story="Heads differ by orders of magnitude; the loudest silenced the rest.",
)
def scale_shared_by_heads(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k, v = twin.rows(2), twin.rows(2)
        k[:, 1], v[:, 0] = 1000 * k[:, 1], 1000 * v[:, 0]
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "scale-frozen-at-the-start",
    catches="the scale of the first tokens is used for all that follow",
    severity="critical",
    story="Several engines froze scales on warm-up text; later tokens saturated.",
)
def scale_frozen_at_the_start(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        for size in (1.0, 50.0, 0.02):
            rows = size * rng.uniform(0.5, 1.0, (2, 2, 4))
            twin.put(seq, 0, rows, -rows)
        twin.check(attend=False)


@trap(
    "whole-cache-requantised",
    catches="stored positions are decoded and encoded again when others arrive",
    severity="critical",
    story="A popular library rebuilds its cache every few tokens; the oldest error tripled.",
)
def whole_cache_requantised(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        twin.check(attend=False)
        for size in (3.0, 30.0, 300.0):
            twin.put(seq, 0, size * twin.rows(1), size * twin.rows(1))
        twin.append(seq, 3, [1])
        twin.check(attend=False)


@trap(
    "zero-row",
    catches="a row of zeros divides by its scale of zero",
    severity="critical",
    story="Padding tokens: a constant group gave NaN in a well-known 2-bit cache.",
)
def zero_row(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        rows = twin.rows(3)
        rows[1] = 0.0
        twin.put(seq, 0, rows, np.zeros_like(rows))
        twin.check()


@trap(
    "small-rows-vanish",
    catches="a floor under the scale that is meant for zeros flattens small rows",
    severity="major",
    story="An epsilon of 1e-3 against division by zero; normalised keys are of that size.",
)
def small_rows_vanish(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        rows = rng.uniform(0.002, 0.004, (3, 2, 4)) * rng.choice([-1.0, 1.0], (3, 2, 4))
        rows[..., 0] = 0.001
        twin.put(seq, 0, rows, -rows)
        twin.check(attend=False)


@trap(
    "codes-cut-not-rounded",
    catches="codes are cut towards zero instead of rounded to the nearest",
    severity="major",
    story="A cast to int; twice the error, and all of it in one direction.",
)
def codes_cut_not_rounded(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, width=32)
        seq = twin.add()
        k, v = twin.rows(2), twin.rows(2)
        for rows in (k, v):
            step = quantization_step(rows, bits)
            rows[..., 0] = 0.75 * step[..., 0]
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "largest-element-wraps",
    catches="the largest positive element becomes the most negative code",
    severity="critical",
    story="128 does not fit into eight signed bits.",
)
def largest_element_wraps(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k, v = twin.rows(3), twin.rows(3)
        k[..., 1], v[..., 2] = 7.0, 7.0
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "nibbles-lose-their-sign",
    catches="negative 4 bit codes come back as 8 … 15",
    severity="critical",
    story="Unpacking forgets that the fourth bit is a sign.",
)
def nibbles_lose_their_sign(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, width=8)
        seq = twin.add()
        every = np.array([-7.0, -6, -5, -4, -3, -2, -1, 7, 6, 5, 4, 3, 2, 1, 0, -7])
        rows = every.reshape(1, 2, 8)
        twin.put(seq, 0, rows, rows[..., ::-1])
        twin.check(attend=False)


@trap(
    "nibbles-swapped",
    catches="packing and unpacking disagree on which half of a byte comes first",
    severity="critical",
    story="Two functions, two conventions, and a round trip that nobody ran.",
)
def nibbles_swapped(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, width=6)
        seq = twin.add()
        rows = np.tile(np.array([7.0, 5, 3, -1, -4, -6]), (2, 2, 1))
        twin.put(seq, 0, rows, -rows)
        twin.check(attend=False)


@trap(
    "odd-width-loses-an-element",
    catches="with an odd head_dim the last 4 bit code is dropped",
    severity="major",
    story="D // 2 bytes for D codes.",
)
def odd_width_loses_an_element(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        for width in (1, 3, 7):
            twin = Twin(submission, rng, kind, 4, width=width)
            seq = twin.add()
            rows = 2 + np.abs(twin.rows(3))
            twin.put(seq, 0, rows, -rows)
            twin.check(attend=False)


# --- chunked prefill ----------------------------------------------------------------------------


@trap(
    "prefill-with-made-up-queries",
    catches="chunks attend with random queries instead of the prompt's",
    severity="critical",
    story="A published entry drew its queries from a random generator; shapes and tests were fine.",
)
def prefill_with_made_up_queries(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    prefill(submission, twin, twin.add(), 7, 3)


@trap(
    "prefill-sees-its-future",
    catches="all keys are stored first, then every chunk is taken for the last one",
    severity="critical",
    story="seqlen_k was the length of the prompt instead of the end of the chunk.",
)
def prefill_sees_its_future(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    prefill(submission, twin, twin.add(), 8, 4)


@trap(
    "chunks-blind-to-earlier-ones",
    catches="each chunk attends to itself only",
    severity="critical",
    story="Every chunk was prefilled as a prompt of its own.",
)
def chunks_blind_to_earlier_ones(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    prefill(submission, twin, twin.add(), 9, 3)


@trap(
    "prefill-forgets-the-prefix",
    catches="positions that the sequence already holds are dropped or not attended to",
    severity="critical",
    story="A prefix hit met an attention that started at position 0.",
)
def prefill_forgets_the_prefix(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(5)
        prefill(submission, twin, seq, 6, 4)
        twin.check(attend=False)


@trap(
    "last-chunk-dropped",
    catches="a prompt that is no multiple of the chunk loses its rest",
    severity="critical",
    story="T // chunk rounds of work; a chunk larger than the prompt does none at all.",
)
def last_chunk_dropped(submission: Submission, rng: Rng) -> None:
    for total, chunk in ((7, 3), (5, 64), (4, 4), (1, 2)):
        twin = Twin(submission, rng)
        seq = twin.add()
        prefill(submission, twin, seq, total, chunk)
        twin.check(attend=False)


@trap(
    "prefill-stores-nothing",
    catches="the prompt is attended to but not left in the cache",
    severity="critical",
    story="A scratch cache did the work; decoding then began from nothing.",
)
def prefill_stores_nothing(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        for layer in range(2):
            prefill(submission, twin, seq, 5, 2, layer)
        twin.append(seq, 1)
        twin.check()


@trap(
    "prefill-into-a-shared-page",
    catches="chunked_prefill writes into a page that another sequence holds",
    severity="critical",
    story="append copied on write; the fast path of the prefill did not go through it.",
)
def prefill_into_a_shared_page(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(6)
        child = twin.fork(seq)
        twin.truncate(child, 5)
        for layer in range(2):
            prefill(submission, twin, child, 5, 2, layer)
        twin.check(attend=False)


@trap(
    "prefill-half-done-when-full",
    catches="a prompt that does not fit leaves its first chunks behind",
    severity="major",
    story="The exception came out of the third chunk; the retry stored the first two twice.",
)
def prefill_half_done_when_full(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, pages=3)
        seq = twin.add(2)
        args = (0, twin.queries(11), twin.rows(11), twin.rows(11), 3)
        expect.raises(
            MemoryError,
            partial(submission.chunked_prefill, twin.cache, seq, *args),
        )
        twin.check(attend=False)
        twin.append(seq, 10)
        twin.check(attend=False)


@trap(
    "prefill-stores-before-it-checks",
    catches="wrong queries are found after the first chunk was stored",
    severity="minor",
    story="The caller corrected its query and prefilled again, on top of the first chunk.",
)
def prefill_stores_before_it_checks(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        rows = twin.rows(4)
        bad: list[Any] = [
            (twin.normal(4, 3, 4), rows, rows, 2),
            (twin.queries(3), rows, rows, 2),
            (twin.queries(4), rows, twin.rows(3), 2),
        ]
        for args in bad:
            expect.raises(
                BAD,
                partial(submission.chunked_prefill, twin.cache, seq, 0, *args),
            )
            twin.check(attend=False)


@trap(
    "prefill-anywhere",
    catches="chunked_prefill does not look where it writes",
    severity="minor",
    story="The methods were guarded, the function beside them was not.",
)
def prefill_anywhere(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add(1)
        prompt = (twin.queries(5), twin.rows(5), twin.rows(5), 2)
        for layer in (2, -1):
            expect.raises(BAD, partial(submission.chunked_prefill, twin.cache, seq, layer, *prompt))
            twin.check(attend=False)
        twin.add(4)
        twin.check(attend=False)


@trap(
    "chunk-below-one",
    catches="a chunk of zero or less does nothing and answers garbage",
    severity="minor",
    story="range(0, T, −1) is empty, and an uninitialised array looks like an answer.",
)
def chunk_below_one(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    seq = twin.add(1)
    q, k, v = twin.queries(3), twin.rows(3), twin.rows(3)
    for chunk in (0, -1):
        expect.raises(
            BAD,
            partial(submission.chunked_prefill, twin.cache, seq, 0, q, k, v, chunk),
        )
        twin.check(attend=False)


@trap(
    "queries-modified",
    catches="the caller's queries, keys or values are scaled in place",
    severity="major",
    story="q *= scale saves an array and breaks the caller's residual stream.",
)
def queries_modified(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("paged", None), ("paged_quantized", 8)):
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        given = (twin.queries(5), twin.rows(5), twin.rows(5))
        _, left = submission.observe("chunked_prefill", twin.cache, seq, 0, *given, 2)
        for name, before, after in zip("qkv", given, left[3:6], strict=True):
            expect.equal(after, before, f"{name} after chunked_prefill")


# --- make_cache and max_context -----------------------------------------------------------------


def _make(submission: Submission, kind: str = "paged", **changed: Any) -> Any:
    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 4, "block_size": 4, "num_blocks": 4}
    return submission.make_cache(kind, **{**sizes, **changed})


@trap(
    "unknown-kind",
    catches="a kind that does not exist falls back to another",
    severity="minor",
    story="A typo in a configuration file served an unquantised cache for a month.",
)
def unknown_kind(submission: Submission, _rng: Rng) -> None:
    for kind in ("paged-quantized", "DENSE", "", "quantised"):
        expect.raises(BAD, partial(_make, submission, kind, bits=8))


@trap(
    "bits-not-checked",
    catches="a quantised cache accepts a number of bits it cannot store",
    severity="minor",
    story="Two bits in a format for four: half of the codes were never used.",
)
def bits_not_checked(submission: Submission, _rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        for bits in (None, 0, 2, 3, 16):
            expect.raises(BAD, partial(_make, submission, kind, bits=bits))


@trap(
    "sizes-not-checked",
    catches="a size of zero or less is accepted",
    severity="minor",
    story="A pool of no pages that fails on the first request instead of at the start.",
)
def sizes_not_checked(submission: Submission, _rng: Rng) -> None:
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks"):
        for size in (0, -1, 2.5):
            changed: dict[str, Any] = {name: size}
            expect.raises(BAD, partial(_make, submission, **changed))


SPEC = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "bits": 16}


@trap(
    "context-of-keys-only",
    catches="values are forgotten: twice the context",
    severity="critical",
    story="The factor two for K and V is lost between bits and bytes.",
)
def context_of_keys_only(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 1.0, 0, 0)


@trap(
    "bits-taken-for-bytes",
    catches="bits are used as bytes",
    severity="critical",
    story="A context eight times too short, and nobody bought the smaller machine.",
)
def bits_taken_for_bytes(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 2**34, 2**30)


@trap(
    "four-bit-context",
    catches="4 bits are rounded to a whole number of bytes",
    severity="major",
    story="bits // 8 is 0 for four bits.",
)
def four_bit_context(submission: Submission, _rng: Rng) -> None:
    context(submission, {**SPEC, "bits": 4}, 2**35, 1.0, 2**33, 0)
    odd = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 3, "bits": 4}
    context(submission, odd, 3001, 1.0, 1, 0)
    context(submission, {**odd, "bits": 12}, 3001, 1.0, 0, 0)


@trap(
    "negative-context",
    catches="weights that do not fit give a negative context",
    severity="major",
    story="A scheduler compared −84 000 with the request's length in unsigned arithmetic.",
)
def negative_context(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**34, 0.5, 2**34, 0)
    context(submission, SPEC, 2**34, 0.5, 2**33, 1)
    context(submission, SPEC, 2**34, 0.5, 2**33, 0)


@trap(
    "context-rounded-up",
    catches="the number of tokens is rounded to the nearest",
    severity="major",
    story="The one token too many came last, at two in the morning.",
)
def context_rounded_up(submission: Submission, _rng: Rng) -> None:
    a_token = 2 * 32 * 8 * 128 * 2
    for short in (1, a_token // 4, a_token - 1):
        context(submission, SPEC, 1000 * a_token - short, 1.0, 0, 0)
    context(submission, SPEC, 1000 * a_token, 1.0, 0, 0)


@trap(
    "utilization-of-the-rest",
    catches="the utilisation is applied to what the weights leave, not to the whole memory",
    severity="major",
    story="The share of memory that a server may use includes its weights.",
)
def utilization_of_the_rest(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 2**34, 0)


@trap(
    "reserve-ignored",
    catches="the reserve for activations is not subtracted",
    severity="major",
    story="Everything fitted until the first long prompt needed its activations.",
)
def reserve_ignored(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 1.0, 0, 2**33)


@trap(
    "specification-not-checked",
    catches="a model of no layers, or of −1, gets an answer or a division by zero",
    severity="minor",
    story="A field missing from a configuration file was read as 0.",
)
def specification_not_checked(submission: Submission, _rng: Rng) -> None:
    for name in SPEC:
        for size in (0, -1):
            call = partial(submission.max_context, {**SPEC, name: size}, 2**36)
            expect.raises(BAD, partial(call, utilization=1.0, weight_bytes=0, reserve_bytes=0))


@trap(
    "negative-bytes",
    catches="negative bytes are accepted, and add to the budget",
    severity="minor",
    story="A difference taken the wrong way round made room for more context than the GPU has.",
)
def negative_bytes(submission: Submission, _rng: Rng) -> None:
    for gpu, weights, reserve in ((-1, 0, 0), (2**30, -1, 0), (2**30, 0, -1)):
        call = partial(submission.max_context, SPEC, gpu, utilization=1.0)
        expect.raises(BAD, partial(call, weight_bytes=weights, reserve_bytes=reserve))


@trap(
    "utilization-in-percent",
    catches="a utilisation outside (0, 1] is accepted",
    severity="minor",
    story="90 instead of 0.9: a context of forty million tokens.",
)
def utilization_in_percent(submission: Submission, _rng: Rng) -> None:
    for use in (90.0, 1.5, 0.0, -0.5):
        expect.raises(
            BAD,
            partial(
                submission.max_context,
                SPEC,
                2**36,
                utilization=use,
                weight_bytes=0,
                reserve_bytes=0,
            ),
        )


@trap(
    "fraction-of-a-byte",
    catches="bytes a token are divided as whole numbers",
    severity="minor",
    story="Odd widths at 3 bits: the rest of the division was promised as context.",
)
def fraction_of_a_byte(submission: Submission, _rng: Rng) -> None:
    for layers, width, bits in ((3, 5, 3), (1, 1, 1), (1, 7, 3)):
        spec = {"num_layers": layers, "num_kv_heads": 1, "head_dim": width, "bits": bits}
        call = partial(submission.max_context, spec, 10_000, utilization=1.0)
        tokens, terms = call(weight_bytes=100, reserve_bytes=0)
        bits_a_token = 2 * layers * width * bits
        expect.equal(tokens, 9900 * 8 // bits_a_token, "tokens")
        expect.equal(terms["bytes_per_token"], bits_a_token / 8, "bytes_per_token")


# --- what a careful reader of the contract still gets wrong -------------------------------------


@trap(
    "finite-mask",
    catches="masked scores are a large negative number that real scores fall below",
    severity="major",
    story="−1e9 for minus infinity: outlier channels pushed all visible scores under the mask.",
)
def finite_mask(submission: Submission, rng: Rng) -> None:
    for size in (300.0, 1e5):
        twin = Twin(submission, rng)
        seq = twin.add()
        k, v = np.full((3, 2, 4), size), twin.rows(3)
        v[2] = 100.0
        twin.put(seq, 0, k, v)
        q = np.full((3, 4, 4), -size)
        check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    "page-boundary-taken-for-a-new-page",
    catches="a write that begins at a page's start goes into a page that a fork shares",
    severity="critical",
    story="The other layer had opened that page before the fork; only half-full pages were copied.",
)
def page_boundary_taken_for_a_new_page(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(4)
        twin.append(seq, 3, [0])
        child = twin.fork(seq)
        twin.append(child, 2, [1])
        twin.append(seq, 2, [1])
        twin.check(attend=False)


@trap(
    "copies-before-it-counts",
    catches="a refused append has already taken a page for the copy of a shared one",
    severity="major",
    story="Copy-on-write came first, the count of new pages second: each retry ate a page.",
)
def copies_before_it_counts(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin = Twin(submission, rng, kind, bits, pages=3)
        child = twin.fork(twin.add(6))
        rows = twin.rows(7)
        twin.refuses(MemoryError, "append", child, 0, rows, rows)
        twin.add(4)
        twin.check(attend=False)


@trap(
    "refused-fork-takes-room",
    catches="a fork that finds no room has already been counted",
    severity="major",
    story="The child was registered, then its copy failed; its positions were never given back.",
)
def refused_fork_takes_room(submission: Submission, rng: Rng) -> None:
    for kind, bits in (("dense", None), ("quantized", 8)):
        twin = Twin(submission, rng, kind, bits, pages=2)
        seq = twin.add(5)
        try:
            child = twin.cache.fork(seq)
        except SubmissionRaised as raised:
            expect.that("MemoryError" in {raised.kind, *raised.bases}, str(raised))
        else:
            twin.cache.free(child)
        twin.append(seq, 3)
        twin.check(attend=False)


@trap(
    "fork-shares-spare-room",
    catches="a fork shares the array of a contiguous cache, and both write behind its end",
    severity="critical",
    story="Arrays that grow have spare rows; parent and child each took the next one for theirs.",
)
def fork_shares_spare_room(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(4)
        for _ in range(2):
            twin.append(seq, 1)
            child = twin.fork(seq)
            twin.append(child, 1)
            twin.append(seq, 1)
        twin.check(attend=False)


@trap(
    "keep-of-everything-does-nothing",
    catches="keep of all positions in their order returns at once, with a layer still ahead",
    severity="major",
    story="A short cut for the common case: every token of a draft was accepted.",
)
def keep_of_everything_does_nothing(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(4)
        twin.append(seq, 2, [0])
        twin.keep(seq, range(4))
        twin.check(attend=False)
        twin.append(seq, 1)
        twin.check(attend=False)


@trap(
    "floor-near-the-smallest-row",
    catches="a floor under the scale lies above the scale of the smallest rows allowed",
    severity="minor",
    story="An epsilon of 1e-5 in a configuration file, copied from a layer norm.",
)
def floor_near_the_smallest_row(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 8, width=256)
        rows = rng.uniform(-1e-3, 1e-3, (2, 2, 256))
        rows[..., 7] = 1.001e-3
        twin.put(twin.add(), 0, rows, -rows)
        twin.check(attend=False)


@trap(
    "spare-rows-beyond-the-pool",
    catches="a growing array doubles past what the pool can ever hold",
    severity="minor",
    story="The last token before the limit doubled a cache that had no more tokens to come.",
)
def spare_rows_beyond_the_pool(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, width=64, page=3, pages=43, dtype=np.float32)
        twin.append(twin.add(128), 1)
        rows = 129 * 2 * 2 * 2
        plain = int(1.5 * rows * 64 * 4) + 8192
        limit = rows * (bits * 64 // 8 + 8) + 64 * 43 * 2 + 4096 if bits else plain
        claim = _bytes(twin)
        expect.that(claim <= limit, f"{kind} takes {claim} bytes when full, more than {limit}")


@trap(
    "prefill-of-nothing-anywhere",
    catches="a prefill of no positions answers for sequences and layers that do not exist",
    severity="minor",
    story="The early return for an empty batch came before the checks.",
)
def prefill_of_nothing_anywhere(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq, gone = twin.add(1), twin.add(1)
        twin.free(gone)
        nothing = (twin.queries(0), twin.rows(0), twin.rows(0), 2)
        call = partial(submission.chunked_prefill, twin.cache)
        expect.raises(KeyError, partial(call, gone, 0, *nothing))
        expect.raises(BAD, partial(call, seq, 2, *nothing))


@trap(
    "empty-answers-are-wider",
    catches="the answer to an empty float32 batch is float64",
    severity="minor",
    story="An early return of zeros without a dtype; joining the batches widened all of them.",
)
def empty_answers_are_wider(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits, dtype=np.float32)
        seq, nobody = twin.add(2), twin.queries(0)
        rows = twin.rows(0)
        out = submission.chunked_prefill(twin.cache, seq, 0, nobody, rows, rows, 3)
        for got in (twin.cache.attend(seq, 0, nobody), out):
            expect.array(got, shape=nobody.shape, dtype=np.float32, what="an empty answer")


@trap(
    "softmax-underflow",
    catches="the largest score is taken over positions that the query does not see",
    severity="critical",
    story="The maximum was taken before the mask: one loud token ahead, and 0 / 0 came out.",
)
def softmax_underflow(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    seq = twin.add()
    k, v = np.zeros((3, 2, 4)), twin.rows(3)
    k[2] = 1000.0
    twin.put(seq, 0, k, v)
    q = np.ones((3, 4, 4))
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)
