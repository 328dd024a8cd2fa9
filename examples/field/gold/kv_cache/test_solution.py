"""Tests of the KV cache: operation by operation against plain lists of rows."""

import numpy as np
import pytest
from solution import chunked_prefill, make_cache, max_context

KINDS = [
    ("dense", None),
    ("paged", None),
    ("quantized", 8),
    ("quantized", 4),
    ("paged_quantized", 8),
    ("paged_quantized", 4),
]
PAGED = [kind for kind in KINDS if kind[0].startswith("paged")]
QUANTISED = [kind for kind in KINDS if kind[1]]
RNG = np.random.default_rng(7)
LAYERS, HEADS, WIDTH, PAGE = 2, 2, 5, 4


def build(kind, bits=None, pages=16, **changed):
    sizes = {
        "num_layers": LAYERS,
        "num_kv_heads": HEADS,
        "head_dim": WIDTH,
        "block_size": PAGE,
        "num_blocks": pages,
    }
    return make_cache(kind, bits=bits, **{**sizes, **changed})


def rows(n, heads=HEADS, dtype=np.float64, width=WIDTH):
    return RNG.standard_normal((n, heads, width)).astype(dtype)


def reference(q, k, v):
    """Causal attention, one query and head at a time."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for h in range(q.shape[1]):
            scores = k[:seen, h // group] @ q[i, h] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ v[:seen, h // group] / weights.sum()
    return out


def refused():
    """A ValueError that says something."""
    return pytest.raises(ValueError, match=r"\w")


class Model:
    """A cache and what it should hold: rows[seq][layer] is a list of (k, v)."""

    def __init__(self, kind, bits=None, pages=16):
        self.cache = build(kind, bits, pages)
        self.bits = bits
        self.rows = {}

    def add(self, n=0):
        seq = self.cache.add()
        assert seq not in self.rows
        self.rows[seq] = [[] for _ in range(LAYERS)]
        if n:
            self.append(seq, n)
        return seq

    def append(self, seq, n, layers=range(LAYERS), size=1.0):
        for layer in layers:
            k, v = size * rows(n), size * rows(n)
            self.cache.append(seq, layer, k, v)
            self.rows[seq][layer] += list(zip(k, v, strict=True))

    def fork(self, seq):
        child = self.cache.fork(seq)
        assert child not in self.rows
        self.rows[child] = [list(layer) for layer in self.rows[seq]]
        return child

    def keep(self, seq, indices):
        self.cache.keep(seq, indices)
        self.rows[seq] = [[layer[i] for i in indices] for layer in self.rows[seq]]

    def truncate(self, seq, n):
        self.cache.truncate(seq, n)
        self.rows[seq] = [layer[:n] for layer in self.rows[seq]]

    def free(self, seq):
        self.cache.free(seq)
        del self.rows[seq]

    def check(self, attend=True):
        for seq, layers in self.rows.items():
            assert self.cache.length(seq) == min(map(len, layers))
            for layer, held in enumerate(layers):
                got = self.cache.view(seq, layer)
                for part in (0, 1):
                    assert got[part].shape == (len(held), HEADS, WIDTH)
                    for i, row in enumerate(held):
                        self.check_row(got[part][i], row[part])
                if held and attend:
                    q = rows(min(2, len(held)), 2 * HEADS)
                    out = self.cache.attend(seq, layer, q)
                    assert np.allclose(out, reference(q, *got), atol=1e-12)

    def check_row(self, got, want):
        if self.bits is None:
            assert np.array_equal(got, want)
        else:
            step = np.abs(want).max(axis=-1, keepdims=True) / (2 ** (self.bits - 1) - 1)
            assert np.all(np.abs(got - want) <= 0.501 * step)


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_random_operations(kind, bits):
    model = Model(kind, bits, pages=64)
    model.add(3)
    for _ in range(18):
        seq = int(RNG.choice(list(model.rows)))
        length = model.cache.length(seq)
        action = RNG.integers(6)
        if action == 0 and len(model.rows) < 4:
            model.fork(seq)
        elif action == 1 and len(model.rows) > 1:
            model.free(seq)
        elif action == 2:
            model.truncate(seq, int(RNG.integers(length + 1)))
        elif action == 3:
            model.keep(seq, RNG.permutation(length)[: RNG.integers(length + 1)].tolist())
        elif action == 4 and len(model.rows) < 4:
            model.add(int(RNG.integers(6)))
        else:
            model.append(seq, int(RNG.integers(1, 7)))
        model.check(attend=False)
    model.check()


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_layers_may_differ(kind, bits):
    model = Model(kind, bits)
    seq = model.add(2)
    model.append(seq, 3, [1])
    model.check()
    assert model.cache.length(seq) == 2
    child = model.fork(seq)
    model.append(child, 4, [0])
    model.append(seq, 5, [0])
    model.check()
    model.truncate(child, model.cache.length(child))
    model.check()
    with refused():
        model.cache.keep(seq, [5])


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_pool_is_exactly_as_large_as_promised(kind, bits):
    model = Model(kind, bits, pages=3)
    seq = model.add(5)
    with pytest.raises(MemoryError):
        model.cache.append(seq, 0, rows(8), rows(8))
    model.check()
    model.append(seq, 7)
    model.check()
    with pytest.raises(MemoryError):
        model.cache.append(seq, 1, rows(1), rows(1))
    other = model.add()
    with pytest.raises(MemoryError):
        model.cache.append(other, 0, rows(1), rows(1))
    model.keep(seq, list(range(11, -1, -1)))
    model.check()
    model.truncate(seq, 4)
    model.append(other, 8)
    model.check()
    model.free(seq)
    model.append(other, 4)
    model.check()


@pytest.mark.parametrize(("kind", "bits"), PAGED)
def test_forks_share_until_they_write(kind, bits):
    model = Model(kind, bits, pages=4)
    seq = model.add(6)
    children = [model.fork(seq) for _ in range(3)]
    model.append(children[0], 2)
    model.append(seq, 1)
    model.check()
    with pytest.raises(MemoryError):
        model.cache.append(children[1], 0, rows(1), rows(1))
    model.check()
    model.free(seq)
    model.append(children[1], 2)
    model.check()
    for child in children:
        model.free(child)
    model.add(16)


@pytest.mark.parametrize(("kind", "bits"), PAGED)
def test_cut_into_a_shared_page(kind, bits):
    model = Model(kind, bits)
    seq = model.add(8)
    child = model.fork(seq)
    model.truncate(child, 6)
    model.append(child, 1)
    model.check()
    model.truncate(seq, 5)
    model.append(seq, 4)
    model.check()
    model.keep(child, [3, 0, 5])
    model.check()


@pytest.mark.parametrize(("kind", "bits"), PAGED)
def test_keep_shares_what_stays_and_refuses_cleanly(kind, bits):
    model = Model(kind, bits, pages=3)
    seq = model.add(12)
    child = model.fork(seq)
    model.keep(child, [*range(8)])
    model.truncate(child, 7)
    model.check()
    with pytest.raises(MemoryError):
        model.cache.keep(child, [0, 1, 2, 3, 5, 4])
    model.check()
    model.truncate(seq, 8)
    model.keep(child, [0, 1, 2, 3, 5, 4])
    model.check()


@pytest.mark.parametrize(("kind", "bits"), QUANTISED)
def test_quantisation_is_by_row_and_for_ever(kind, bits):
    model = Model(kind, bits)
    seq = model.add(2)
    first = [part.copy() for part in model.cache.view(seq, 0)]
    for size in (100.0, 0.01, 0.0):
        model.append(seq, 2, size=size)
    model.check()
    assert np.array_equal(model.cache.view(seq, 0)[0][:2], first[0])
    assert np.array_equal(model.cache.view(seq, 0)[1][:2], first[1])


def test_codes_use_their_whole_range():
    cache = build("quantized", 4, head_dim=15)
    seq = cache.add()
    k = np.arange(-7.0, 8.0).reshape(1, 1, 15).repeat(2, axis=1)
    cache.append(seq, 0, k, -k[..., ::-1])
    assert np.array_equal(cache.view(seq, 0)[0], k)
    assert np.array_equal(cache.view(seq, 0)[1], -k[..., ::-1])


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_bytes(kind, bits):
    cache = build(kind, bits, head_dim=64, num_blocks=4)
    seq = cache.add()
    k = rows(16, dtype=np.float32, width=64)
    for layer in range(LAYERS):
        cache.append(seq, layer, k, k)
    stored = 16 * LAYERS * HEADS * 2 * (64 * bits // 8 + 4 if bits else 256)
    tables = 8 * 4 if kind.startswith("paged") else 0
    assert cache.nbytes() == stored + tables
    if kind.startswith("paged"):
        cache.fork(seq)
        assert cache.nbytes() == stored + 2 * tables


def test_dense_rows_grow_by_half():
    cache = build("dense", num_layers=1, num_blocks=100)
    seq = cache.add()
    for _ in range(10):
        cache.append(seq, 0, rows(1), rows(1))
    assert cache.nbytes() <= 2 * 15 * HEADS * WIDTH * 8


@pytest.mark.parametrize(("kind", "bits"), KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_prefill(kind, bits, dtype, chunk):
    cache = build(kind, bits)
    seq = cache.add()
    cache.append(seq, 1, rows(3, dtype=dtype), rows(3, dtype=dtype))
    q, k, v = rows(8, 4, dtype), rows(8, dtype=dtype), rows(8, dtype=dtype)
    given = [x.copy() for x in (q, k, v)]
    out = chunked_prefill(cache, seq, 1, q, k, v, chunk)
    assert out.dtype == dtype
    stored = cache.view(seq, 1)
    assert len(stored[0]) == 11
    assert stored[0].dtype == dtype
    assert np.allclose(out, reference(q, *stored), atol=1e-5 if dtype == np.float32 else 1e-12)
    assert all(np.array_equal(a, b) for a, b in zip(given, (q, k, v), strict=True))
    nothing = chunked_prefill(cache, seq, 1, q[:0], k[:0], v[:0], chunk)
    assert nothing.shape == (0, 4, WIDTH)
    assert len(cache.view(seq, 1)[0]) == 11


def test_prefill_is_all_or_nothing():
    model = Model("paged", pages=2)
    seq = model.add(2)
    before = model.cache.nbytes()
    q, k = rows(7, 4), rows(7)
    with pytest.raises(MemoryError):
        chunked_prefill(model.cache, seq, 0, q, k, k, 2)
    for bad in (rows(6, 3), rows(5, 4), rows(6, 4)[0]):
        with refused():
            chunked_prefill(model.cache, seq, 0, bad, k[:6], k[:6], 2)
    with refused():
        chunked_prefill(model.cache, seq, 0, q[:6], k[:6], k[:5], 2)
    with refused():
        chunked_prefill(model.cache, seq, 2, q[:6], k[:6], k[:6], 2)
    for chunk in (0, -1, 1.0, True):
        with refused():
            chunked_prefill(model.cache, seq, 0, q[:1], k[:1], k[:1], chunk)
    model.check()
    assert model.cache.nbytes() == before


def test_attention_survives_large_scores():
    cache = build("dense")
    seq = cache.add()
    k, v, q = 1e3 + rows(3), rows(3), 1 + np.abs(rows(2, 2))
    cache.append(seq, 0, k, v)
    assert np.allclose(cache.attend(seq, 0, q), reference(q, k, v), atol=1e-9)


def test_views_of_any_strides():
    cache = build("paged")
    seq = cache.add()
    k = RNG.standard_normal((WIDTH, HEADS, 3)).transpose(2, 1, 0)
    v = RNG.standard_normal((HEADS, 6, WIDTH)).transpose(1, 0, 2)[::2]
    cache.append(seq, 0, k, v)
    assert np.array_equal(cache.view(seq, 0)[0], k)
    assert np.array_equal(cache.view(seq, 0)[1], v)


@pytest.mark.parametrize(("kind", "bits"), [("dense", None), ("paged", None)])
def test_sequences_must_exist(kind, bits):
    model = Model(kind, bits)
    seq, gone = model.add(1), model.add(1)
    model.free(gone)
    one = rows(1)
    for bad in (gone, seq + 50, -1, 0.5, True):
        for call in (
            lambda c, s: c.append(s, 0, one, one),
            lambda c, s: c.attend(s, 0, one),
            lambda c, s: c.view(s, 0),
            lambda c, s: c.fork(s),
            lambda c, s: c.keep(s, []),
            lambda c, s: c.truncate(s, 0),
            lambda c, s: c.free(s),
            lambda c, s: c.length(s),
        ):
            with pytest.raises(KeyError):
                call(model.cache, bad)
    model.check()


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_bad_rows_change_nothing(kind, bits):
    model = Model(kind, bits, pages=1)
    seq = model.add(1)
    good = rows(2)
    for bad in (rows(2, 1), rows(2, width=1), rows(3), good[0], rows(0)):
        with refused():
            model.cache.append(seq, 0, good[: len(bad)], bad)
        with refused():
            model.cache.append(seq, 0, bad, good)
    with refused():
        model.cache.append(seq, 0, rows(0), rows(0))
    for bad in (good.astype(np.float32), good.astype(int), good.astype(complex), good.tolist()):
        with pytest.raises(TypeError):
            model.cache.append(seq, 0, good, bad)
        with pytest.raises(TypeError):
            model.cache.append(seq, 0, bad, bad)
    for layer in (-1, LAYERS, 0.0, True):
        with refused():
            model.cache.append(seq, layer, good, good)
    model.append(seq, 3)
    model.check()


def test_bad_queries_and_indices():
    model = Model("paged")
    seq = model.add(4)
    for bad in (rows(5, 2), rows(1, 3), rows(1, 2, width=4), rows(1, 2)[0]):
        with refused():
            model.cache.attend(seq, 0, bad)
    with pytest.raises(TypeError):
        model.cache.attend(seq, 0, np.ones((1, 2, WIDTH), int))
    assert model.cache.attend(seq, 0, rows(0, 2)).shape == (0, 2, WIDTH)
    for bad in ([4], [-1], [0, 0], [0.5], [[0]], ["a"]):
        with refused():
            model.cache.keep(seq, bad)
    for bad in (5, -1, 1.0, True):
        with refused():
            model.cache.truncate(seq, bad)
    model.check()


def test_empty_views():
    cache = build("dense")
    seq = cache.add()
    assert [x.shape for x in cache.view(seq, 0)] == [(0, HEADS, WIDTH)] * 2
    assert cache.length(seq) == 0


def test_two_caches_are_apart():
    one, other = Model("paged"), Model("paged")
    one.add(3)
    other.add(2)
    one.check()
    other.check()


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_sizes_are_checked(name):
    for bad in (0, -1, 1.5, True):
        with refused():
            build("dense", **{name: bad})


def test_kinds_and_bits_are_checked():
    for kind in ("", "Dense", "paged quantized"):
        with refused():
            build(kind, 8)
    for bits in (None, 2, 16, 8.0, True):
        with refused():
            build("quantized", bits)


LLAMA = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "bits": 16}


def test_max_context():
    free = {"weight_bytes": 0, "reserve_bytes": 0}
    assert max_context(LLAMA, 131072 * 10, utilization=1.0, **free)[0] == 10
    assert max_context(LLAMA, 131072 * 10 - 1, utilization=1.0, **free)[0] == 9
    tokens, terms = max_context(
        LLAMA, 80 * 2**30, utilization=0.5, weight_bytes=16 * 10**9, reserve_bytes=2**30
    )
    assert tokens == (40 * 2**30 - 16 * 10**9 - 2**30) // 131072
    assert terms["bytes_per_token"] == 131072
    assert terms["budget_bytes"] == 40 * 2**30 - 16 * 10**9 - 2**30
    assert max_context({**LLAMA, "bits": 4}, 2**30, utilization=1, **free)[0] == 2**30 // 32768
    assert max_context(LLAMA, 10, utilization=1, weight_bytes=20, reserve_bytes=0)[0] == 0


def test_max_context_refuses():
    free = {"weight_bytes": 0, "reserve_bytes": 0}
    for use in (0, -0.1, 1.01, 90):
        with refused():
            max_context(LLAMA, 2**30, utilization=use, **free)
    for name in LLAMA:
        for bad in (0, -1, 1.5):
            with refused():
                max_context({**LLAMA, name: bad}, 2**30, utilization=1, **free)
    for weights, reserve, gpu in ((-1, 0, 1), (0, -1, 1), (0, 0, -1)):
        with refused():
            max_context(LLAMA, gpu, utilization=1, weight_bytes=weights, reserve_bytes=reserve)
