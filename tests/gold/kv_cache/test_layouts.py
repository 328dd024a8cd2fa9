"""Orders of pages in memory: the same results, with the memory that each one promises."""

import numpy as np
import pytest
import torch

from trapline.gold.attention.paged.api import paged_append, paged_attention
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.kv_cache.api import KVCache

LAYOUTS = ["bshd", "bhsd", "hbsd"]
SHAPES = {"bshd": (5, 3, 2, 8), "bhsd": (5, 2, 3, 8), "hbsd": (2, 5, 3, 8)}


def cache_of(kind, layout, bits=None, like=None):
    return KVCache(
        kind,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        block_size=3,
        num_blocks=5,
        bits=bits,
        layout=layout,
        like=like,
    )


def rows(n, seed, kind):
    found = np.random.default_rng(seed).standard_normal((2, n, 2, 8)).astype(np.float32)
    return torch.from_numpy(found) if kind == "torch" else found


@pytest.mark.parametrize("array", ["numpy", "torch"])
@pytest.mark.parametrize("bits", [None, 8, 4, "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_returns_the_same_in_every_layout(array, bits, layout):
    """Appends, a fork that copies on write, a reordering, a truncation."""
    kind = "paged" if bits is None else "paged_quantized"
    caches = [cache_of(kind, name, bits) for name in ("bshd", layout)]
    found = []
    for cache in caches:
        seq = cache.add()
        for layer in range(2):
            cache.append(seq, layer, *rows(4, layer, array))
            cache.append(seq, layer, *rows(1, 7 + layer, array))
        other = cache.fork(seq)
        for layer in range(2):
            cache.append(other, layer, *rows(2, 9, array))
        cache.keep(other, [0, 2, 1, 6])
        cache.truncate(seq, 4)
        q = rows(1, 5, array)[0]
        found.append(
            [cache.view(one, 1)[side] for one in (seq, other) for side in (0, 1)]
            + [cache.attend(one, 0, q) for one in (seq, other)]
        )
    for one, same in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(same))
    assert caches[0].nbytes() == caches[1].nbytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_in_the_order_of_the_layout(layout):
    cache = cache_of("paged", layout, like=torch.zeros(1))
    pages = cache.pages(1)
    assert tuple(pages.k.shape) == (5, 2, 3, 8)
    back = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "hbsd": (1, 0, 2, 3)}[layout]
    stored = pages.k.permute(back)
    assert tuple(stored.shape) == SHAPES[layout]
    assert stored.is_contiguous()
    address = pages.k.data_ptr()
    cache.append(cache.add(), 1, *rows(4, 0, "torch"))
    assert cache.pages(1).k.data_ptr() == address
    assert pages.k.abs().sum() > 0


@pytest.mark.parametrize("array", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_attention_takes_pages_in_every_layout(array, layout):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 4, 8)).astype(np.float32)
    plain = rng.integers(-127, 127, (2, 5, 2, 3, 8)).astype(np.int8)
    scales = rng.random((2, 5, 2, 3)).astype(np.float16)
    table, lengths = np.array([[1, 4], [3, 0]], np.int32), np.array([5, 3], np.int32)
    order = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "hbsd": (1, 0, 2)}[layout]
    turned = [np.ascontiguousarray(x.transpose(*order, 3)) for x in plain]
    turned_scales = [np.ascontiguousarray(x.transpose(order)) for x in scales]
    given = [q, *plain, table, lengths, *scales, *turned, *turned_scales]
    if array == "torch":
        given = [torch.from_numpy(x) for x in given]
    q, k, v, table, lengths, ks, vs, k2, v2, ks2, vs2 = given
    expected = paged_attention(q, k, v, table, lengths, k_scale=ks, v_scale=vs)
    found = paged_attention(q, k2, v2, table, lengths, k_scale=ks2, v_scale=vs2, layout=layout)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_append_writes_in_every_layout(layout):
    k, v = rows(3, 1, "torch")
    slots = torch.tensor([4, -1, 14])
    plain, stored = torch.zeros(2, 5, 2, 3, 8), torch.zeros(2, *SHAPES[layout])
    paged_append(k, v, *plain, slots)
    paged_append(k, v, *stored, slots, layout=layout)
    order = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "hbsd": (1, 0, 2, 3)}[layout]
    for one, other in zip(plain, stored, strict=True):
        assert torch.equal(one.permute(order), other)


def test_wrong_layouts_are_refused():
    with pytest.raises(RangeError, match="layout must be one of bhsd, bshd, hbsd, got 'sbhd'"):
        cache_of("paged", "sbhd")
    with pytest.raises(RangeError, match="layout 'hbsd' needs a paged kind"):
        cache_of("dense", "hbsd")
    k, v = torch.zeros(2, 5, 3, 2, 8)
    given = torch.zeros(1, 2, 8), k, v, torch.zeros(1, 1).int(), torch.ones(1).int()
    assert paged_attention(*given, layout="bshd").shape == (1, 2, 8)
    with pytest.raises(RangeError, match="layout must be one of"):
        paged_attention(*given, layout="bthd")
    with pytest.raises(ShapeError, match=r"k_pages must have 4 axes in layout bshd, got \(3, 2, 8"):
        paged_attention(given[0], k[0], *given[2:], layout="bshd")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_read_and_write_pages_in_every_layout(layout):
    torch.manual_seed(0)
    order = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "hbsd": (1, 0, 2, 3)}[layout]
    q, new_k, new_v = (x.cuda() for x in torch.randn(3, 2, 4, 32))
    plain = [torch.randn(5, 2, 16, 32).cuda() for _ in range(2)]
    turned = [x.permute(order).contiguous() for x in plain]
    table, lengths = torch.tensor([[1, 4], [3, 0]]).int(), torch.tensor([21, 8]).int()
    slots = torch.tensor([4 * 16 + 4, 3 * 16 + 7], device="cuda")
    paged_append(new_k[:, :2], new_v[:, :2], *plain, slots)
    paged_append(new_k[:, :2], new_v[:, :2], *turned, slots, layout=layout)
    for one, other in zip(plain, turned, strict=True):
        assert torch.equal(one.permute(order), other)
    found = paged_attention(q, *turned, table.cuda(), lengths.cuda(), layout=layout)
    expected = paged_attention(q.cpu(), *(x.cpu() for x in plain), table, lengths)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
