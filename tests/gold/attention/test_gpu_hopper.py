"""The Hopper forward on a GPU: every configuration against float64 and against its plain twin."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import flash_attention, flash_attention_lse  # noqa: E402
from trapline.gold.attention import fast, kernels  # noqa: E402
from trapline.gold.attention import kernels_hopper_fwd as hopper  # noqa: E402
from trapline.gold.errors import UnsupportedError  # noqa: E402

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.needs_gpu,
    pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU"),
]
#: Relative to float64, in the 2-norm: what rounding the weights and the result costs.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
#: B, H, G, T, S: one tile and many, tails in both, a cached prefix, rows that see nothing, one
#: query, one key, more tiles than processors, grouped heads.
SHAPES = [
    (1, 1, 1, 64, 128),
    (2, 4, 2, 256, 256),
    (1, 2, 1, 300, 555),
    (1, 2, 2, 555, 300),
    (1, 3, 3, 1, 1),
    (2, 8, 1, 1, 700),
    (2, 8, 1, 1000, 1000),
    (1, 2, 1, 129, 127),
    (4, 16, 16, 1024, 1024),
    (3, 10, 5, 1111, 1300),
]


def drawn(B, H, G, T, S, D, dtype, seed=0, outliers=False):
    """q, k, v as projections give them: (B,T,H,D) viewed as (B,H,T,D)."""
    make = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
    made = [torch.randn(B, N, heads, D, **make) for N, heads in ((T, H), (S, G), (S, G))]
    if outliers:
        made = [x * torch.where(torch.rand(x.shape, **make) < 0.01, 20.0, 1.0) for x in made]
    return [x.to(dtype).transpose(1, 2) for x in made]


def exact(q, k, v, causal):
    """out and lse in float64 by the CPU path's operators, which the oracle checks."""
    rules = causal, 0, 0.0, q.shape[-1] ** -0.5
    return getattr(torch.ops, fast.TORCH).forward(q.double(), k.double(), v.double(), *rules)


def relative(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", sorted(hopper.PLANS))
@pytest.mark.parametrize("dtype", sorted(hopper.TYPES, key=str))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_float64_and_with_its_twin(shape, dtype, D, causal):
    q, k, v = drawn(*shape, D, dtype)
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
@pytest.mark.parametrize("D", sorted(hopper.PLANS))
def test_it_is_as_accurate_as_cudnn(D, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for outliers in (False, True):
        q, k, v = drawn(1, 8, 8, 4096, 4096, D, torch.bfloat16, seed=1, outliers=outliers)
        wanted, _ = exact(q, k, v, causal)
        ours = relative(flash_attention(q, k, v, causal=causal, impl="hopper"), wanted)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        # 2 %: which of two nearest numbers a tie rounds to is nobody's merit.
        assert ours <= 1.02 * relative(theirs, wanted), (ours, relative(theirs, wanted))


@pytest.mark.parametrize("D", sorted(hopper.PLANS))
def test_it_gives_the_same_bits_again(D):
    q, k, v = drawn(2, 16, 4, 2048, 2048, D, torch.bfloat16, seed=2)
    first = flash_attention_lse(q, k, v, causal=True, impl="hopper")
    for _ in range(20):
        again = flash_attention_lse(q, k, v, causal=True, impl="hopper")
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


def test_it_is_the_default_where_it_is_faster_and_not_elsewhere():
    q, k, v = drawn(1, 16, 16, 4096, 4096, 128, torch.bfloat16)
    rules = 0, 0.0, 0.1
    for causal, D in itertools.product((True, False), sorted(hopper.PLANS)):
        parts = (x[..., :D].contiguous() for x in (q, k, v))
        assert kernels.chosen("forward", *parts, causal, *rules) == "hopper"
    assert kernels.chosen("forward", q, k, v, True, 5, 0.0, 0.1) == "triton"
    with pytest.raises(UnsupportedError, match="softcap"):
        flash_attention(q, k, v, softcap=2.0, impl="hopper")


def test_it_runs_in_a_graph():
    q, k, v = drawn(1, 4, 4, 512, 512, 128, torch.bfloat16)
    wanted = flash_attention(q, k, v, causal=True, impl="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, causal=True, impl="hopper")
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
