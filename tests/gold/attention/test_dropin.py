"""The drop-in against torch's own function, and what it refuses."""

import numpy as np
import pytest

from trapline.gold.errors import DTypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention as torchs  # noqa: E402 - needs torch

from trapline.gold.attention.dropin import scaled_dot_product_attention  # noqa: E402


def draw(q_shape, kv_shape):
    torch.manual_seed(0)
    q = torch.randn(q_shape, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(kv_shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((2, 3, 7, 4), (2, 3, 7, 4)),
        ((2, 3, 7, 4), (2, 3, 11, 4)),  # more keys: torch counts from the first, not the last
        ((2, 3, 11, 4), (2, 3, 7, 4)),  # more queries: the later ones see every key
        ((3, 7, 4), (3, 9, 4)),
        ((7, 4), (9, 4)),
        ((2, 2, 3, 5, 4), (2, 2, 3, 6, 4)),
        ((1, 2, 1, 4), (1, 2, 6, 4)),
        ((0, 2, 3, 4), (0, 2, 5, 4)),  # nothing of each thing in turn
        ((1, 0, 3, 4), (1, 0, 5, 4)),
        ((1, 2, 0, 4), (1, 2, 5, 4)),
        ((1, 2, 3, 4), (1, 2, 0, 4)),
        ((1, 2, 3, 0), (1, 2, 5, 0)),
    ],
)
def test_agrees_with_torch_forward_and_backward(q_shape, kv_shape, is_causal):
    inputs = draw(q_shape, kv_shape)
    ours = scaled_dot_product_attention(*inputs, is_causal=is_causal)
    theirs = torchs(*inputs, is_causal=is_causal)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    upstream = torch.randn_like(theirs)
    for got, want in zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(theirs, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 8), (8, 5)])
def test_grouped_heads_and_scale(queries, keys, is_causal):
    inputs = draw((2, 6, queries, 4), (2, 2, keys, 4))
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    ours, theirs = scaled_dot_product_attention(*inputs, **options), torchs(*inputs, **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_argument_order_is_that_of_torch():
    q, k, v = draw((1, 2, 5, 4), (1, 1, 5, 4))
    arguments = (q, k, v, None, 0.0, True)
    ours = scaled_dot_product_attention(*arguments, scale=None, enable_gqa=True)
    torch.testing.assert_close(ours, torchs(*arguments, scale=None, enable_gqa=True))


def test_unsupported_arguments_are_named():
    q, k, v = draw((1, 2, 5, 4), (1, 2, 5, 4))
    with pytest.raises(UnsupportedError, match="attn_mask is not supported: is_causal=True is"):
        scaled_dot_product_attention(q, k, v, torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match=r"dropout_p must be 0, got 0\.1"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(UnsupportedError, match="same width"):
        scaled_dot_product_attention(q, k, v[..., :2])
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k[:, :1], v[:, :1])
    with pytest.raises(ShapeError, match=r"axes \(…, T, D\)"):
        scaled_dot_product_attention(q, k[0], v[0])
    with pytest.raises(ShapeError, match="must be a multiple of"):
        scaled_dot_product_attention(q[:, [0, 1, 1]], k, v, enable_gqa=True)
    with pytest.raises(DTypeError, match="torch tensor, got ndarray"):
        scaled_dot_product_attention(np.zeros((1, 2, 3, 4)), k, v)
    with pytest.raises(DTypeError, match="key must be a torch tensor, got NoneType"):
        scaled_dot_product_attention(q, None, v)


def test_autocast_casts_as_torch_does():
    q, k, v = (x.detach() for x in draw((1, 2, 5, 4), (1, 2, 5, 4)))
    mixed = q.float(), k.float(), v.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = scaled_dot_product_attention(*mixed), torchs(*mixed)
        untouched = scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2)
    torch.testing.assert_close(untouched, scaled_dot_product_attention(q, k, v))


def test_compiles_without_graph_breaks(compiles_into_one_graph):
    def loss(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    compiles_into_one_graph(loss, draw((1, 2, 5, 4), (1, 2, 8, 4)))


@pytest.mark.needs_gpu
@pytest.mark.parametrize(("queries", "keys"), [(500, 500), (300, 700), (700, 300)])
def test_16_bit_error_on_a_gpu_is_at_most_that_of_torch(queries, keys):
    torch.manual_seed(1)
    wide = [
        torch.randn(2, heads, length, 128, dtype=torch.float64, device="cuda")
        for heads, length in ((8, queries), (2, keys), (2, keys))
    ]
    narrow = [x.bfloat16() for x in wide]
    options = {"is_causal": True, "enable_gqa": True}
    exact = torchs(*(x.double() for x in narrow), **options)
    ours, theirs = (
        float((function(*narrow, **options).double() - exact).norm() / exact.norm())
        for function in (scaled_dot_product_attention, torchs)
    )
    assert ours <= 1.1 * theirs
