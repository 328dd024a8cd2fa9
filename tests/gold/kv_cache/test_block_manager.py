"""The page book by itself: prefixes found again, collisions, eviction, and 5 000 operations."""

import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.block_manager import GONE, BlockManager

AAAA_BBBB = [1] * 4 + [2] * 4


def filled(book, seq, tokens):
    book.tables[seq] = []
    book.reserve(seq, 0, len(tokens))
    book.publish(seq, tokens)


def begin(book, seq, tokens, salt=None):
    book.tables[seq] = []
    return book.adopt(seq, tokens, salt)


def test_cached_prefix_is_found_in_whole_pages_without_the_last_token():
    book = BlockManager(8, 4)
    filled(book, 0, AAAA_BBBB)
    assert begin(book, 1, [*AAAA_BBBB, 5]) == 8
    assert book.tables[1] == book.tables[0]
    assert begin(book, 2, AAAA_BBBB) == 4  # the last token must be computed for its logits
    assert begin(book, 3, AAAA_BBBB[:5]) == 4
    assert begin(book, 4, AAAA_BBBB[:4]) == 0
    assert begin(book, 5, [1, 1, 1, 3, 2, 2, 2, 2, 9]) == 0


def test_equal_page_after_another_prefix_is_not_found():
    book = BlockManager(8, 4)
    filled(book, 0, AAAA_BBBB)
    assert begin(book, 1, [3] * 4 + [2] * 4 + [9]) == 0
    assert begin(book, 2, [2] * 4 + [9]) == 0


def test_colliding_keys_are_distinguished_by_tokens():
    book = BlockManager(8, 4, key=lambda parent, salt, tokens: 7)
    filled(book, 0, AAAA_BBBB)
    assert begin(book, 1, [3] * 4 + [9]) == 0
    assert begin(book, 2, [*AAAA_BBBB, 9]) == 4  # the second page found no place beside the first
    filled(book, 3, [3] * 4)
    assert begin(book, 4, [1] * 4 + [9]) == 4


def test_salt_separates_tenants():
    book = BlockManager(8, 4)
    book.tables[0] = []
    book.reserve(0, 0, 4)
    book.publish(0, [1] * 4, "adapter")
    assert begin(book, 1, [1] * 5) == 0
    assert begin(book, 2, [1] * 5, "adapter") == 4


def test_freed_pages_are_evicted_least_recently_used_first():
    book = BlockManager(4, 4)
    filled(book, 0, [1] * 4)
    filled(book, 1, [2] * 4)
    for seq in (0, 1):
        book.shrink(seq, 0)
    assert book.free_pages == 4
    assert begin(book, 2, [1] * 5) == 4  # used again: now the younger one
    book.shrink(2, 0)
    begin(book, 3, [])
    book.reserve(3, 0, 12)  # two free pages, and the page of 2s
    assert begin(book, 4, [2] * 5) == 0
    assert begin(book, 5, [1] * 5) == 4


def test_end_of_a_prefix_is_evicted_before_its_start():
    book = BlockManager(2, 4)
    filled(book, 0, AAAA_BBBB)
    book.shrink(0, 0)
    begin(book, 1, [])
    book.reserve(1, 0, 1)
    assert begin(book, 2, [*AAAA_BBBB, 9]) == 4


def test_reused_pages_are_not_found():
    """After others used the whole pool the first prompt must miss."""
    book = BlockManager(3, 4)
    filled(book, 0, [1] * 4)
    book.shrink(0, 0)
    begin(book, 1, [])
    book.reserve(1, 0, 12)
    book.shrink(1, 0)
    assert begin(book, 2, [1] * 5) == 0


def test_overwritten_page_is_not_found():
    book = BlockManager(4, 4)
    filled(book, 0, [1] * 4)
    book.shrink(0, 2)
    assert book.reserve(0, 2, 2) == []
    assert begin(book, 1, [1] * 5) == 0
    book.publish(0, [1, 1, 5, 5])
    assert begin(book, 2, [1, 1, 5, 5, 9]) == 4


def test_equal_pages_stay_private_and_wrong_tokens_raise():
    book = BlockManager(4, 4)
    filled(book, 0, [1] * 4)
    filled(book, 1, [1] * 4)
    begin(book, 2, [1] * 5)
    assert book.tables[2] == book.tables[0] != book.tables[1]
    with pytest.raises(RangeError, match="other tokens"):
        book.publish(0, [3] * 4)


def test_page_with_a_lost_parent_is_cached_again():
    """Its parent was the twin of the page in front of it; the twin is overwritten."""
    book = BlockManager(6, 4)
    filled(book, 0, [1] * 4)
    filled(book, 1, AAAA_BBBB)  # its second page follows the page of sequence 0
    book.shrink(0, 2)
    book.reserve(0, 2, 2)
    assert begin(book, 2, [*AAAA_BBBB, 9]) == 0
    book.publish(1, AAAA_BBBB)
    assert begin(book, 3, [*AAAA_BBBB, 9]) == 8
    assert book.tables[3] == book.tables[1]


def test_full_pool_raises_and_changes_nothing():
    book = BlockManager(2, 4)
    filled(book, 0, [1] * 8)
    book.fork(0, 1)
    before = (dict(book.tables), list(book._holders))
    with pytest.raises(MemoryError, match="1 pages needed, 0 of 2 available"):
        book.reserve(1, 7, 1)
    assert (book.tables, book._holders) == before


def test_pages_behind_a_window_are_freed():
    book = BlockManager(4, 2)
    filled(book, 0, [1] * 8)
    book.fork(0, 1)
    book.forget(0, 5)
    assert book.tables[0][:2] == [GONE, GONE]
    assert book.first(0) == 4
    assert book.free_pages == 0
    book.forget(1, 5)
    assert book.free_pages == 2


def crowded(*facts):
    """One of five keys, so that many collide; Python's own hash of a text differs by process."""
    return zlib.crc32(repr(facts).encode()) % 5


class BookMachine(RuleBasedStateMachine):
    """The book beside a memory of single tokens: every sequence must read what it wrote."""

    PAGES, PAGE = 10, 3
    operations = 0

    def __init__(self):
        super().__init__()
        self.book = BlockManager(self.PAGES, self.PAGE, key=crowded)
        self.memory = {}
        self.texts = {}
        self.next = 0

    def _pick(self, number):
        return list(self.texts)[number % len(self.texts)]

    def _slots(self, seq, start, stop):
        return self.book.slots(seq, np.arange(start, stop)).tolist()

    def _write(self, seq, tokens):
        start = len(self.texts[seq])
        for source, copy in self.book.reserve(seq, start, len(tokens)):
            for at in range(self.PAGE):
                value = self.memory.get(source * self.PAGE + at)
                self.memory[copy * self.PAGE + at] = value
        slots = self._slots(seq, start, start + len(tokens))
        self.memory.update(zip(slots, tokens, strict=True))
        self.texts[seq] = self.texts[seq] + tokens

    @precondition(lambda self: len(self.texts) < 6)
    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), salt=st.sampled_from([None, "a"]))
    def add(self, tokens, salt):
        seq, self.next = self.next, self.next + 1
        self.book.tables[seq] = []
        known = self.book.adopt(seq, tokens, salt)
        assert known % self.PAGE == 0
        assert known < max(1, len(tokens))
        self.texts[seq] = tokens[:known]

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def append(self, number, tokens):
        seq = self._pick(number)
        before = (self.book.free_pages, list(self.book.tables[seq]))
        try:
            self._write(seq, tokens)
        except MemoryError:
            assert before == (self.book.free_pages, self.book.tables[seq])

    @precondition(lambda self: 0 < len(self.texts) < 6)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        seq, child, self.next = self._pick(number), self.next, self.next + 1
        self.book.fork(seq, child)
        self.texts[child] = list(self.texts[seq])

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    def truncate(self, number, share):
        seq = self._pick(number)
        n = round(share * len(self.texts[seq]))
        self.book.shrink(seq, n)
        self.texts[seq] = self.texts[seq][:n]

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def publish(self, number):
        seq = self._pick(number)
        try:
            self.book.publish(seq, self.texts[seq])
        except RangeError:
            # Its first page was adopted from, or published under, the other salt.
            assert any(seal.salt == "a" for seal in self.book._seals.values())

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def publish_salted(self, number):
        seq = self._pick(number)
        try:
            self.book.publish(seq, self.texts[seq], "a")
        except RangeError:
            assert any(seal.salt is None for seal in self.book._seals.values())

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def free(self, number):
        seq = self._pick(number)
        self.book.shrink(seq, 0)
        del self.book.tables[seq], self.texts[seq]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        type(self).operations += 1
        for seq, tokens in self.texts.items():
            slots = self._slots(seq, 0, len(tokens))
            assert [self.memory[slot] for slot in slots] == tokens

    @invariant()
    def free_and_held_are_all(self):
        book = self.book
        held = [page for table in book.tables.values() for page in table]
        assert book.free_pages + len(set(held)) == self.PAGES
        assert {*book._free, *book._cached} == set(range(self.PAGES)) - set(held)
        assert [book._holders[p] for p in range(self.PAGES)] == [
            held.count(p) for p in range(self.PAGES)
        ]

    @invariant()
    def what_can_be_found_holds_what_it_says(self):
        for seal in self.book._found.values():
            slots = [seal.page * self.PAGE + at for at in range(self.PAGE)]
            assert tuple(self.memory[slot] for slot in slots) == seal.tokens
            assert self.book._seals[seal.page] is seal
            assert seal.page not in self.book._free


def run_machine(examples, least):
    machine = type("Machine", (BookMachine,), {"operations": 0})
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=100,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()
    assert machine.operations >= least


def test_invariants_hold_over_5000_operations():
    run_machine(examples=75, least=5_000)


@pytest.mark.full
def test_invariants_hold_over_100000_operations():
    run_machine(examples=1500, least=100_000)


@pytest.mark.parametrize("kind", ["paged", "paged_quantized"])
def test_second_prompt_reuses_the_published_prefix(kind):
    cache = KVCache(
        kind, num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, num_blocks=8,
        bits=None if kind == "paged" else 8,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompt = list(range(9))
    first = cache.add(prompt)
    assert cache.length(first) == 0
    for layer in (0, 1):
        rows = rng.standard_normal((9, 1, 4))
        cache.append(first, layer, rows, -rows)
    cache.publish(first, prompt)
    want = [cache.view(first, layer) for layer in (0, 1)]
    cache.free(first)
    second = cache.add([*prompt[:8], 77, 78])
    assert cache.length(second) == 8
    for layer in (0, 1):
        for got, expected in zip(cache.view(second, layer), want[layer], strict=True):
            np.testing.assert_array_equal(got, expected[:8])
    assert cache.length(cache.add(prompt, salt="other")) == 0


def test_incomplete_pages_are_not_published():
    cache = KVCache("paged", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, num_blocks=8)
    seq = cache.add()
    cache.append(seq, 0, np.ones((8, 1, 4)), np.ones((8, 1, 4)))
    cache.publish(seq, list(range(8)))  # layer 1 is empty
    assert cache.length(cache.add(list(range(9)))) == 0


def test_dense_kinds_share_no_prefix():
    cache = KVCache("dense", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, num_blocks=8)
    seq = cache.add()
    cache.append(seq, 0, np.ones((8, 1, 4)), np.ones((8, 1, 4)))
    cache.publish(seq, list(range(8)))
    assert cache.length(cache.add(list(range(9)))) == 0
