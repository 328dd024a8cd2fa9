"""The Hopper forward on a GPU: every configuration against float64 and against its plain twin."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import flash_attention, flash_attention_lse  # noqa: E402
from trapline.gold.attention.dense import dense_problem, hopper, reference  # noqa: E402
from trapline.gold.attention.dense.registry import fastest, forward_tiers  # noqa: E402
from trapline.gold.errors import UnsupportedError  # noqa: E402

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.needs_gpu,
    pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU"),
]
#: Relative to float64, in the 2-norm: what rounding the weights and the result costs.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def exact(q, k, v, causal):
    """out and lse in float64 by the torch reference, which is tested against the oracle."""
    wide = q.double(), k.double(), v.double()
    return reference.forward(dense_problem(*wide, causal, scale=q.shape[-1] ** -0.5))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", hopper.WIDTHS)
@pytest.mark.parametrize("dtype", sorted(hopper.TYPES, key=str))
def test_agrees_with_float64_and_the_plain_kernel(drawn, relative, gpu_shape, dtype, D, causal):
    q, k, v, _ = drawn(*gpu_shape, D, dtype)
    out, lse = flash_attention_lse(q, k, v, causal=causal, impl="hopper")
    twin, twin_lse = flash_attention_lse(q, k, v, causal=causal, impl="triton")
    wanted, wanted_lse = exact(q, k, v, causal)
    assert torch.isfinite(out).all()
    assert relative(out, wanted) <= LIMITS[dtype]
    assert relative(out, twin.double()) <= 2 * LIMITS[dtype]
    assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
    seen = wanted_lse != -torch.inf
    torch.testing.assert_close(lse[seen].double(), wanted_lse[seen], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(lse[seen], twin_lse[seen], rtol=1e-6, atol=1e-5)
    assert out[~seen].abs().sum() == 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_is_as_accurate_as_cudnn(drawn, relative, D, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for outliers in (False, True):
        q, k, v, _ = drawn(1, 8, 8, 4096, 4096, D, torch.bfloat16, seed=1, outliers=outliers)
        wanted, _ = exact(q, k, v, causal)
        ours = relative(flash_attention(q, k, v, causal=causal, impl="hopper"), wanted)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        # 2 %: the direction in which ties are rounded is chance.
        assert ours <= 1.02 * relative(theirs, wanted), (ours, relative(theirs, wanted))


@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_results_are_bitwise_repeatable(drawn, D):
    q, k, v, _ = drawn(2, 16, 4, 2048, 2048, D, torch.bfloat16, seed=2)
    first = flash_attention_lse(q, k, v, causal=True, impl="hopper")
    for _ in range(20):
        again = flash_attention_lse(q, k, v, causal=True, impl="hopper")
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


def test_is_the_default_only_where_it_is_faster(drawn):
    q, k, v, _ = drawn(1, 16, 16, 4096, 4096, 128, torch.bfloat16)
    for causal, D in itertools.product((True, False), hopper.WIDTHS):
        parts = (x[..., :D].contiguous() for x in (q, k, v))
        assert fastest(dense_problem(*parts, causal), forward_tiers()) == "hopper"
    assert fastest(dense_problem(q, k, v, True, window=5), forward_tiers()) == "triton"
    with pytest.raises(UnsupportedError, match="softcap"):
        flash_attention(q, k, v, softcap=2.0, impl="hopper")


def test_cuda_graph(drawn):
    q, k, v, _ = drawn(1, 4, 4, 512, 512, 128, torch.bfloat16)
    wanted = flash_attention(q, k, v, causal=True, impl="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, causal=True, impl="hopper")
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
