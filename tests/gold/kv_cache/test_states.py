"""All kinds against lists of rows, over random operations; the page book's balance after each."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.oracle import RecentRows, attention, quantization_step
from trapline.gold.kv_cache.paged import PagedStorage

LAYERS, HEADS, WIDTH, PAGE, PAGES = 2, 2, 3, 3, 12
KINDS = [
    ("dense", None, 0),
    ("paged", None, 0),
    ("quantized", 8, 0),
    ("paged_quantized", 4, 0),
    ("quantized", 4, 3),
    ("paged_quantized", 8, 3),
    ("paged_quantized", 4, 16),
]
#: Steps that a second code of 4 bits leaves of the half that the first one does.
REFINED = 0.501 / 13.9
#: How rows are handed to the cache: as they are drawn, or as tensors.
WAYS = {"arrays": np.asarray, "tensors": torch.from_numpy}


class CacheMachine(RuleBasedStateMachine):
    """A cache beside a list of rows; a refused append must leave both as they were."""

    kind = "paged"
    bits: int | None = None
    recent = 0
    way = "arrays"

    def __init__(self):
        super().__init__()
        self.cache = KVCache(
            self.kind,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=WIDTH,
            block_size=PAGE,
            num_blocks=PAGES,
            bits=self.bits,
            recent=self.recent,
        )
        self.model = RecentRows(LAYERS, self.recent)
        self.rng = np.random.default_rng(0)
        self.seen: dict[tuple, tuple] = {}

    def _rows(self, n):
        return self.rng.standard_normal((n, HEADS, WIDTH))

    def _pick(self, number):
        names = list(self.model.rows)
        return names[number % len(names)]

    @rule()
    def add(self):
        self.model.add(self.cache.add())

    @precondition(lambda self: self.model.rows)
    @rule(number=st.integers(0, 9), n=st.integers(1, 7), layer=st.sampled_from([None, 0, 1]))
    def append(self, number, n, layer):
        seq = self._pick(number)
        for at in range(LAYERS) if layer is None else [layer]:
            k, v = self._rows(n), self._rows(n)
            try:
                self.cache.append(seq, at, *map(WAYS[self.way], (k, v)))
            except MemoryError:
                return
            self.model.append(seq, at, k, v)

    @precondition(lambda self: self.model.rows)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        seq = self._pick(number)
        try:
            child = self.cache.fork(seq)
        except MemoryError:
            assert self.kind in ("dense", "quantized")
            return
        self.model.fork(seq, child)

    @precondition(lambda self: self.model.rows)
    @rule(number=st.integers(0, 9), order=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def keep(self, number, order, share):
        seq = self._pick(number)
        indices = list(range(self.model.length(seq)))
        order.shuffle(indices)
        indices = indices[: int(share * len(indices))]
        try:
            self.cache.keep(seq, indices)
        except MemoryError:
            return
        self.model.keep(seq, indices)

    @precondition(lambda self: self.model.rows)
    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    def truncate(self, number, share):
        seq = self._pick(number)
        n = round(share * self.model.length(seq))
        self.cache.truncate(seq, n)
        self.model.truncate(seq, n)

    @precondition(lambda self: self.model.rows)
    @rule(number=st.integers(0, 9))
    def free(self, number):
        seq = self._pick(number)
        self.cache.free(seq)
        self.model.free(seq)
        with pytest.raises(KeyError):
            self.cache.length(seq)

    @invariant()
    def holds_what_the_lists_hold(self):
        for seq, layers in self.model.rows.items():
            assert self.cache.length(seq) == self.model.length(seq)
            for layer, rows in enumerate(layers):
                got = tuple(map(np.asarray, self.cache.view(seq, layer)))
                assert [len(part) for part in got] == [len(rows)] * 2
                if rows:
                    marks = self.model.marks[seq][layer]
                    self._compare(got, self.model.view(seq, layer), rows, marks)

    def _compare(self, got, want, rows, marks):
        for part, exact in zip(got, want, strict=True):
            if self.bits is None:
                np.testing.assert_array_equal(part, exact)
            else:
                steps = np.where(marks, REFINED, 0.501)[:, None, None]
                assert np.all(np.abs(part - exact) <= steps * quantization_step(exact, self.bits))
        # A row has two looks, with a mark and without, and each is always the same.
        for row, mark, k, v in zip(rows, marks, *got, strict=True):
            _, before = self.seen.setdefault((id(row), mark), (row, k.tobytes() + v.tobytes()))
            assert before == k.tobytes() + v.tobytes()

    @invariant()
    def pages_balance(self):
        storage = self.cache._storage
        if isinstance(storage, PagedStorage):
            book = storage.book
            held = [page for table in book.tables.values() for page in table]
            assert book.free_pages + len(set(held)) == PAGES
            assert sorted(book._free) == sorted(set(range(PAGES)) - set(held))
            assert [book._holders[p] for p in range(PAGES)] == [held.count(p) for p in range(PAGES)]


def _run(kind, bits, recent, way, examples, steps):
    options = {"kind": kind, "bits": bits, "recent": recent, "way": way}
    machine = type("Machine", (CacheMachine,), options)
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "bits", "recent"), KINDS)
def test_random_operations(kind, bits, recent, way):
    _run(kind, bits, recent, way, examples=12, steps=25)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "bits", "recent"), KINDS)
def test_many_random_operations(kind, bits, recent, way):
    _run(kind, bits, recent, way, examples=150, steps=50)


@pytest.mark.parametrize(("kind", "bits", "recent"), KINDS)
def test_attention_reads_what_is_stored(kind, bits, recent):
    machine = type("Machine", (CacheMachine,), {"kind": kind, "bits": bits, "recent": recent})()
    machine.add()
    machine.append(0, 7, None)
    k, v = machine.cache.view(0, 1)
    for heads, n in ((2, 1), (4, 3), (6, 7)):
        q = machine.rng.standard_normal((n, heads, WIDTH))
        got = machine.cache.attend(0, 1, q)
        np.testing.assert_allclose(got, attention(q, k, v), atol=1e-13)
