"""The cache on tensors: the codes of the reference, in place, at addresses that stay."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trapline.gold.errors import RangeError, ShapeError, UnsupportedError
from trapline.gold.kv_cache import codecs as quantized
from trapline.gold.kv_cache import torch_backend as fast
from trapline.gold.kv_cache.api import KVCache, chunked_prefill
from trapline.gold.kv_cache.oracle import attention
from trapline.gold.kv_cache.reorder import follow

SIZES = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "block_size": 4, "num_blocks": 16}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("bits", "fitted"), [(8, False), (4, False), (8, True), (4, True)])
def test_integer_codes_equal_the_numpy_codec(rng, bits, fitted, dtype):
    for width in (1, 7, 64):
        rows = (
            rng.standard_normal((30, 2, width)) * 10.0 ** rng.integers(-6, 4, (30, 2, 1))
        ).astype(dtype)
        rows[3] = 0
        ours = quantized.IntCodec(bits, width, fitted=fitted)
        theirs = fast.IntCodec(bits, width, fitted=fitted)
        want, got = ours.encode(rows), theirs.encode(torch.from_numpy(rows))
        if not fitted:  # sums of squares are added in another order, which can turn a near tie
            for a, b in zip(want, got, strict=True):
                np.testing.assert_array_equal(a, b.numpy())
        back = theirs.decode(got, torch.from_numpy(rows).dtype).numpy()
        error = np.linalg.norm(back - rows, axis=-1)
        np.testing.assert_allclose(
            error, np.linalg.norm(ours.decode(want, rows.dtype) - rows, axis=-1), rtol=1e-4
        )


def test_fp8_codes_equal_torch(rng):
    grid = np.arange(0, 450, 0.0078125, dtype=np.float32)  # holds every halfway point above 1/8
    values = np.concatenate([grid[grid <= 448], rng.standard_normal(2000).astype(np.float32) / 64])
    values = np.concatenate([values, -values])
    want = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(quantized.to_fp8(values), want)
    rows = rng.standard_normal((20, 2, 16)).astype(np.float32)
    ours, theirs = quantized.Fp8Codec(), fast.Fp8Codec()
    for a, b in zip(ours.encode(rows), theirs.encode(torch.from_numpy(rows)), strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    np.testing.assert_array_equal(
        ours.decode(ours.encode(rows), rows.dtype),
        theirs.decode(theirs.encode(torch.from_numpy(rows)), torch.float32).numpy(),
    )


class LikeAGpu(TorchDispatchMode):
    """Divides by Python's numbers as CUDA tensors do: times the inverse, which rounds twice."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            rows, number = args
            return rows * (rows.new_ones(()) / rows.new_full((), number))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", [8, 4, "fp8"])
def test_scales_are_rounded_once_on_a_gpu(rng, bits):
    """Rows whose largest element is an exact float16 times the largest code."""
    scales = rng.integers(2**10, 2**11, (2000, 1, 1)) / 2.0**14
    rows = np.float32(scales * {8: 127, 4: 7, "fp8": 448}[bits])
    with LikeAGpu():
        _, got = fast.codec(bits, 1, fitted=False).encode(torch.from_numpy(rows))
    np.testing.assert_array_equal(got.numpy(), scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [None, 8, 4, "fp8"])
def test_attention_matches_the_oracle(rng, bits, dtype):
    kind = "paged" if bits is None else "paged_quantized"
    cache = KVCache(kind, bits=bits, **SIZES)
    seq = cache.add()
    q, k, v = (torch.from_numpy(rng.standard_normal((9, h, 8))).to(dtype) for h in (4, 2, 2))
    cache.append(seq, 0, k[:6], v[:6])
    cache.append(seq, 0, k[6:], v[6:])
    keys, values = cache.view(seq, 0)
    assert keys.dtype == dtype
    if bits is None:
        assert torch.equal(keys, k)
    want = attention(*(x.double().numpy() for x in (q[-3:], keys, values)))
    out = cache.attend(seq, 0, q[-3:])
    assert out.dtype == dtype
    tolerance = {torch.float16: 3e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    np.testing.assert_allclose(out.double().numpy(), want, atol=tolerance)


@pytest.mark.parametrize("bits", [None, 8])
def test_chunk_size_does_not_change_the_result(rng, bits):
    q, k, v = (torch.from_numpy(rng.standard_normal((37, h, 8))).float() for h in (4, 2, 2))
    whole = None
    for chunk in (37, 1, 2, 3, 5, 8, 16, 36):
        cache = KVCache("paged" if bits is None else "paged_quantized", bits=bits, **SIZES)
        out = chunked_prefill(cache, cache.add(), 0, q, k, v, chunk)
        whole = out if whole is None else whole
        assert float((out - whole).abs().max()) <= 1e-5


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_storage_never_moves(rng, bits):
    cache = KVCache(
        "paged" if bits is None else "paged_quantized", bits=bits, like=torch.zeros(1), **SIZES
    )
    addresses = [x.data_ptr() for layer in (0, 1) for x in cache.pages(layer) if x is not None]
    seq = cache.add()
    for step in range(20):
        rows = torch.from_numpy(rng.standard_normal((1 + step % 3, 2, 8))).float()
        for layer in (0, 1):
            cache.append(seq, layer, rows, rows)
        if step % 5 == 4:
            child = cache.fork(seq)
            cache.truncate(seq, cache.length(seq) // 2)
            cache.keep(child, [0, 2, 1])
            cache.free(child)
    after = [x.data_ptr() for layer in (0, 1) for x in cache.pages(layer) if x is not None]
    assert after == addresses


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_kernels_can_write_pages(rng, bits):
    """`extend` gives slots; what is written there through `pages` is what `view` reads."""
    cache = KVCache(
        "paged" if bits is None else "paged_quantized", bits=bits, like=torch.zeros(1), **SIZES
    )
    other, seq = cache.add(), cache.add()
    first = torch.from_numpy(rng.standard_normal((5, 2, 8))).float()
    for layer in (0, 1):
        cache.append(other, layer, first, first)
        cache.append(seq, layer, first, -first)
    slots = torch.from_numpy(cache.extend(seq, 3))
    assert slots.dtype == torch.int64
    assert cache.length(seq) == 8
    pages = cache.pages(1)
    assert pages.k.shape == (16, 2, 4, 4 if bits == 4 else 8)
    codec = fast.codec(bits, 8, fitted=False)
    new = torch.from_numpy(rng.standard_normal((3, 2, 8))).float()
    codes = codec.encode(new)
    for target, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        target[slots // 4, :, slots % 4] = codes[0]
        if bits is not None:
            assert scale.shape == (16, 2, 4)
            scale[slots // 4, :, slots % 4] = codes[1][..., 0]
    keys, values = cache.view(seq, 1)
    assert torch.equal(keys[5:], codec.decode(codes, torch.float32))
    assert torch.equal(values[5:], keys[5:])
    table = cache.block_table([seq, other])
    assert table.dtype == np.int32
    assert table.shape == (2, 2)
    assert pages.k[int(table[0, 1]), :, 3].equal(codes[0][-1])


def test_pages_require_an_allocated_paged_cache():
    with pytest.raises(UnsupportedError, match="dense cache has no pages"):
        KVCache("dense", **SIZES).pages(0)
    with pytest.raises(RangeError, match="pages are not allocated yet"):
        KVCache("paged", **SIZES).pages(0)
    cache = KVCache("paged", like=np.zeros(1), **SIZES)
    seq = cache.add()
    cache.append(seq, 0, np.ones((1, 2, 8)), np.ones((1, 2, 8)))
    with pytest.raises(RangeError, match="differ in length"):
        cache.extend(seq, 1)
    with pytest.raises(KeyError):
        cache.block_table([7])
    with pytest.raises(ShapeError, match="holds float64"):
        cache.append(seq, 0, torch.ones(1, 2, 8), torch.ones(1, 2, 8))


def test_values_without_a_finite_scale_raise():
    cache = KVCache("quantized", bits=8, **SIZES)
    seq = cache.add()
    for bad in (float("nan"), float("inf"), 1e9):
        with pytest.raises(RangeError, match="at most"):
            cache.append(seq, 0, torch.full((1, 2, 8), bad), torch.ones(1, 2, 8))
    assert cache.nbytes() < 100  # nothing was allocated either


def test_follow_forks_once_per_further_child():
    cache = KVCache("paged", **SIZES)
    seqs = [cache.add() for _ in range(3)]
    cache.append(seqs[1], 0, np.ones((5, 2, 8)), np.ones((5, 2, 8)))
    after = follow(cache, seqs, [1, 1, 0])
    assert after[0] == seqs[1]
    assert after[2] == seqs[0]
    assert len(cache.view(after[1], 0)[0]) == 5
    with pytest.raises(KeyError):
        cache.length(seqs[2])
    full = KVCache("dense", **{**SIZES, "num_blocks": 2})
    one = full.add()
    full.append(one, 0, np.ones((4, 2, 8)), np.ones((4, 2, 8)))
    two = full.add()
    with pytest.raises(MemoryError):
        follow(full, [one, two], [0, 0, 0])
    assert len(full._counts) == 2  # as before
