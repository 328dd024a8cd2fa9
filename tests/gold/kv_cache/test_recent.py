"""The newest rows with a second code: which they are after every verb, their bytes, refusals."""

import numpy as np
import pytest
import torch

from trapline.gold.errors import DTypeError, RangeError, UnsupportedError
from trapline.gold.kv_cache.api import KVCache, chunked_prefill
from trapline.gold.kv_cache.calibrate import calibrate
from trapline.gold.kv_cache.oracle import attention

LAYERS, HEADS, WIDTH, RECENT = 2, 2, 8, 5
SIZES = {
    "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, "block_size": 4,
    "num_blocks": 20,
}  # fmt: skip
#: Bytes of a position in one layer: 4 bits an element and a float16 scale, of a key and a value.
A_ROW = 2 * HEADS * (WIDTH // 2 + 2)
WAYS = {"arrays": np.asarray, "tensors": torch.from_numpy}
KINDS = ["quantized", "paged_quantized"]


@pytest.fixture(params=WAYS)
def draw(request, rng):
    """Rows (n,G,D), as an array or as a tensor."""
    return lambda n, heads=HEADS: WAYS[request.param](rng.standard_normal((n, heads, WIDTH)))


class Twins:
    """A cache with recent rows beside one without; every verb goes to both."""

    def __init__(self, kind="paged_quantized", bits=4, recent=RECENT, **options):
        self.fine, self.coarse = (
            KVCache(kind, bits=bits, recent=n, **{**SIZES, **options}) for n in (recent, 0)
        )

    def __getattr__(self, verb):
        def both(*arguments, **options):
            answers = [
                getattr(cache, verb)(*arguments, **options) for cache in (self.fine, self.coarse)
            ]
            assert answers[0] == answers[1]
            return answers[0]

        return both

    def append(self, seq, k, v, layers=range(LAYERS)):
        for layer in layers:
            for cache in (self.fine, self.coarse):
                cache.append(seq, layer, k, v)

    def extra(self):
        """Bytes of the second codes."""
        return self.fine.nbytes() - self.coarse.nbytes()

    def refined(self, seq, want, layer=0):
        """Which rows come back more exactly than without; the others as without, bit for bit.

        `want` are the keys that were stored; values are their negatives.
        """
        (k, v), (coarse, _) = (cache.view(seq, layer) for cache in (self.fine, self.coarse))
        k, v, coarse, want = map(np.asarray, (k, v, coarse, want))
        np.testing.assert_array_equal(k, -v)
        near, far = (np.abs(x - want).max(axis=(1, 2)) for x in (k, coarse))
        found = np.flatnonzero((k != coarse).any(axis=(1, 2)))
        assert np.all(near[found] < 0.15 * far[found])
        return found.tolist()


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_rows_have_a_second_code(draw, kind, n):
    twins, rows = Twins(kind), draw(27)
    seq = twins.add()
    for start in range(0, 27, n):
        twins.append(seq, rows[start : start + n], -rows[start : start + n])
        have = min(27, start + n)
        assert twins.refined(seq, rows[:have]) == list(range(max(0, have - RECENT), have))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"bits": 8}, 0.1),
        ({"bits": 4}, 0.1),
        ({"bits": "fp8"}, 0.2),
        ({"bits": 4, "rotate": True}, 0.2),
        ({"bits": 4, "calibration": True}, 0.2),
    ],
)
def test_second_codes_refine_every_codec(draw, options, limit):
    if "calibration" in options:
        seen = [[np.asarray(draw(300))] * LAYERS for _ in range(3)]
        options = {**options, "calibration": calibrate(*seen, turns=0.5 ** np.arange(WIDTH // 2))}
    twins, k, v = Twins(**options, recent=60), draw(60), draw(60)
    seq = twins.add()
    twins.append(seq, k, v)
    for got, coarse, want in zip(
        twins.fine.view(seq, 1), twins.coarse.view(seq, 1), (k, v), strict=True
    ):
        assert float(((got - want) ** 2).sum() / ((coarse - want) ** 2).sum()) ** 0.5 < limit


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_drops_second_codes(draw, kind):
    twins, rows = Twins(kind), draw(20)
    seq = twins.add()
    twins.append(seq, rows[:12], -rows[:12])
    twins.truncate(seq, 10)
    assert twins.refined(seq, rows[:10]) == [7, 8, 9]
    twins.append(seq, rows[10:11], -rows[10:11])
    assert twins.refined(seq, rows[:11]) == [7, 8, 9, 10]
    twins.append(seq, rows[11:14], -rows[11:14])
    assert twins.refined(seq, rows[:14]) == [9, 10, 11, 12, 13]
    twins.truncate(seq, 4)
    assert twins.refined(seq, rows[:4]) == []
    twins.truncate(seq, 0)
    twins.append(seq, rows[:1], -rows[:1])
    assert twins.refined(seq, rows[:1]) == [0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("order", "refined"),
    [
        ([*range(15), 17, 19], [15, 16]),  # what a verified tree leaves
        ([*range(15), 19, 15], [15, 16]),
        ([0, 17, 3, 18, 16], [3, 4]),  # a row without stands between
        ([19, 0], []),
        ([18, 15, 19, 17, 16], [0, 1, 2, 3, 4]),
        ([], []),
    ],
)
def test_moved_rows_keep_their_second_codes(draw, kind, order, refined):
    twins, rows = Twins(kind), draw(22)
    seq = twins.add()
    twins.append(seq, rows[:20], -rows[:20])
    twins.keep(seq, order)
    now = rows[[*order, 20, 21]]
    assert twins.refined(seq, now[:-2], layer=1) == refined
    twins.append(seq, rows[20:], -rows[20:])
    refined = [*refined, len(order), len(order) + 1][-RECENT:]
    assert twins.refined(seq, now, layer=1) == refined


@pytest.mark.parametrize("kind", KINDS)
def test_forks_are_independent(draw, kind):
    twins, rows = Twins(kind), draw(30)
    seq = twins.add()
    twins.append(seq, rows[:10], -rows[:10])
    extra = twins.extra()
    child = twins.fork(seq)
    assert twins.extra() == extra  # what is stored is shared until one of them goes on
    twins.append(seq, rows[10:13], -rows[10:13])
    assert twins.refined(child, rows[:10]) == [5, 6, 7, 8, 9]
    twins.append(child, rows[20:21], -rows[20:21])
    assert twins.refined(seq, rows[:13]) == [8, 9, 10, 11, 12]
    twins.free(seq)
    assert twins.refined(child, rows[[*range(10), 20]]) == [6, 7, 8, 9, 10]


def test_reused_prefix_has_first_codes_only(draw):
    twins, rows, tokens = Twins(), draw(11), list(range(11))
    seq = twins.add()
    twins.append(seq, rows, -rows)
    twins.publish(seq, tokens)
    other = twins.add(tokens)
    assert twins.length(other) == 8
    assert twins.refined(other, rows[:8]) == []
    twins.append(other, rows[8:10], -rows[8:10])
    assert twins.refined(other, rows[:10]) == [8, 9]
    assert twins.refined(seq, rows) == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("recent", [3, 9, 30])
def test_second_codes_behind_a_window_are_ignored(draw, recent):
    twins, rows = Twins(window=7, recent=recent, num_blocks=5), draw(40)
    seq = twins.add()
    for step in range(40):
        twins.append(seq, rows[step : step + 1], -rows[step : step + 1])
        first = twins.first(seq)
        want = list(range(max(first, step + 1 - recent), step + 1))
        assert [first + i for i in twins.refined(seq, rows[first : step + 1])] == want


def test_layers_of_different_lengths(draw):
    twins, rows = Twins(), draw(20)
    seq = twins.add()
    twins.append(seq, rows[:12], -rows[:12], layers=[0])
    twins.append(seq, rows[:9], -rows[:9], layers=[1])
    twins.truncate(seq, 9)
    assert twins.refined(seq, rows[:9], layer=0) == [7, 8]
    assert twins.refined(seq, rows[:9], layer=1) == [4, 5, 6, 7, 8]
    twins.append(seq, rows[9:11], -rows[9:11], layers=[0])
    twins.keep(seq, [8, 0, 7])
    assert twins.refined(seq, rows[[8, 0, 7]], layer=0) == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_nbytes_counts_second_codes(draw, kind):
    twins, rows = Twins(kind), draw(30)
    seq = twins.add()
    for at, held in ((3, 3), (30, RECENT)):
        have = twins.length(seq)
        twins.append(seq, rows[have:at], -rows[have:at])
        assert twins.extra() == held * LAYERS * A_ROW
    twins.truncate(seq, 28)
    assert twins.extra() == (RECENT - 2) * LAYERS * A_ROW
    for layers in twins.fine._recent._held.values():
        for field in (field for fields in layers for field in fields):
            assert _allocated(field) == field.nbytes
    twins.free(seq)
    assert twins.extra() == 0


def _allocated(field):
    if isinstance(field, np.ndarray):
        return field.nbytes if field.base is None else field.base.nbytes
    return field.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", KINDS)
def test_failed_append_changes_nothing(draw, kind):
    twins, rows = Twins(kind, num_blocks=3), draw(13)
    seq = twins.add()
    twins.append(seq, rows[:10], -rows[:10])
    for raised, bad in ((MemoryError, rows[:3]), (RangeError, rows[:1] * np.nan)):
        with pytest.raises(raised):
            twins.fine.append(seq, 0, bad, bad)
    assert twins.refined(seq, rows[:10]) == [5, 6, 7, 8, 9]


def test_failed_fork_leaves_no_second_codes(draw):
    twins, rows = Twins("quantized", num_blocks=3), draw(10)
    seq = twins.add()
    twins.append(seq, rows, -rows)
    with pytest.raises(MemoryError):
        twins.fine.fork(seq)
    twins.free(seq)
    assert twins.extra() == 0


def test_failed_keep_changes_nothing(draw):
    twins, rows = Twins(num_blocks=3), draw(10)
    seq = twins.add()
    twins.append(seq, rows, -rows)
    twins.fork(seq)
    with pytest.raises(MemoryError):
        twins.fine.keep(seq, [9, 0, 8, 7])
    assert twins.refined(seq, rows) == [5, 6, 7, 8, 9]


def test_rows_without_a_finite_second_scale_raise(draw):
    """Of a float8 row the first code may miss more than 7 times the largest float16."""
    row = draw(1)
    row[...] = 448 * 6e4 / 1.055
    row[..., 0] = 448 * 6e4
    cache = KVCache("paged_quantized", bits="fp8", recent=2, **SIZES)
    seq = cache.add()
    with pytest.raises(RangeError, match="at most"):
        cache.append(seq, 0, row, row)
    assert len(cache.view(seq, 0)[0]) == 0
    assert cache._storage.book.free_pages == SIZES["num_blocks"]
    assert len(cache._storage.pools) == 0


def test_attention_uses_the_current_second_codes(draw):
    """What is recent is so for every query of a call; chunks of a prompt differ by design."""
    q, k, v = draw(20, 2 * HEADS), draw(20), draw(20)
    outs = []
    for chunk in (20, 3):
        cache = KVCache("paged_quantized", bits=4, recent=RECENT, **SIZES)
        seq = cache.add()
        out = chunked_prefill(cache, seq, 0, q, k, v, chunk)
        want = attention(*map(np.asarray, (q[18:], *cache.view(seq, 0))))
        np.testing.assert_allclose(out[18:], want, atol=1e-10)
        outs.append(np.asarray(out))
    exact = attention(*map(np.asarray, (q, k, v)))
    errors = [np.linalg.norm(out - exact) for out in outs]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision(rng, dtype):
    rows = torch.from_numpy(rng.standard_normal((9, HEADS, WIDTH))).to(dtype)
    cache = KVCache("paged_quantized", bits=4, recent=4, **SIZES)
    seq = cache.add()
    cache.append(seq, 0, rows, -rows)
    keys, values = cache.view(seq, 0)
    assert keys.dtype == values.dtype == dtype
    missed = (keys.double() - rows.double()).abs().amax(dim=(1, 2))
    assert float(missed[5:].max()) < 0.03 < float(missed[:5].max())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"recent": -1}, RangeError, "recent"),
        ({"recent": 1.5}, DTypeError, "recent"),
        ({"recent": True}, DTypeError, "recent"),
        ({"kind": "dense", "bits": None}, RangeError, "recent needs a quantised kind"),
        ({"kind": "paged", "bits": None}, RangeError, "recent needs a quantised kind"),
    ],
)
def test_invalid_recent_options_raise(options, error, says):
    with pytest.raises(error, match=says):
        KVCache(**{"kind": "quantized", "bits": 4, "recent": 2, **SIZES, **options})


def test_recent_0_stores_no_second_codes(draw):
    twins, rows = Twins(), draw(3)
    seq = twins.add()
    twins.append(seq, rows, rows)
    assert twins.coarse._recent._held[seq] == [()] * LAYERS


def test_pages_require_recent_0():
    cache = KVCache("paged_quantized", bits=8, recent=2, like=np.zeros(1), **SIZES)
    with pytest.raises(UnsupportedError, match="recent"):
        cache.pages(0)
    with pytest.raises(UnsupportedError, match="recent"):
        cache.extend(cache.add(), 1)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_rows_match_the_cpu(rng, kind):
    rows = torch.from_numpy(rng.standard_normal((30, HEADS, WIDTH)))
    views = []
    for device in ("cpu", "cuda"):
        cache = KVCache(kind, bits=4, recent=7, **SIZES)
        seq = cache.add()
        for start in range(0, 30, 3):
            for layer in range(LAYERS):
                part = rows[start : start + 3].to(device)
                cache.append(seq, layer, part, -part)
        cache.keep(seq, [*range(26), 28, 27])
        child = cache.fork(seq)
        cache.truncate(seq, 27)
        assert cache.view(seq, 1)[0].device.type == device
        views.append([x.cpu() for one in (seq, child) for x in cache.view(one, 1)])
    for a, b in zip(*views, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
