"""The Hopper backward on a GPU: every configuration against float64 and against its plain twin."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import flash_attention_lse  # noqa: E402
from trapline.gold.attention.dense import dense_problem, reference  # noqa: E402
from trapline.gold.attention.dense.hopper import WIDTHS  # noqa: E402
from trapline.gold.attention.dense.hopper.backward import backward as hopper_backward  # noqa: E402
from trapline.gold.attention.dense.hopper.forward import forward  # noqa: E402
from trapline.gold.attention.dense.registry import backward_tiers, fastest  # noqa: E402
from trapline.gold.attention.dense.triton.backward import backward as plain_backward  # noqa: E402

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.needs_gpu,
    pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU"),
]
#: Relative to float64, in the 2-norm: what rounding weights, slopes and the result costs.
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def exact(q, k, v, dout, dlse, causal):
    """dq, dk, dv in float64 by the torch reference, which is tested against the oracle."""
    q, k, v, dout, dlse = (x.double() for x in (q, k, v, dout, dlse))
    problem = dense_problem(q, k, v, causal, scale=q.shape[-1] ** -0.5)
    return reference.backward(problem, *reference.forward(problem), dout, dlse)


def gradients(q, k, v, dout, dlse, causal, deterministic=True, backward=hopper_backward):
    """dq, dk, dv by these kernels, or by others, from the results of the Hopper forward pass."""
    rules = {"scale": q.shape[-1] ** -0.5, "deterministic": deterministic}
    problem = dense_problem(q, k, v, causal, **rules)
    return backward(problem, *forward(problem), dout, dlse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("dtype", sorted(LIMITS, key=str))
def test_both_ways_agree_with_float64(drawn, relative, gpu_shape, dtype, D, causal):
    q, k, v, dout = drawn(*gpu_shape, D, dtype)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), causal
    wanted = exact(*problem)
    for deterministic in (True, False):
        for got, want in zip(gradients(*problem, deterministic), wanted, strict=True):
            assert torch.isfinite(got).all()
            # One query that sees one key has a gradient of v only: nothing to be relative to.
            if want.abs().max() > 1e-6:
                assert relative(got, want) <= LIMITS[dtype]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", WIDTHS)
def test_both_ways_agree_with_the_plain_kernels(drawn, relative, D, causal):
    q, k, v, dout = drawn(3, 10, 5, 1111, 1300, D, torch.bfloat16)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), causal
    twins = gradients(*problem, backward=plain_backward)
    for deterministic in (True, False):
        for got, twin in zip(gradients(*problem, deterministic), twins, strict=True):
            assert relative(got, twin.double()) <= LIMITS[torch.bfloat16]


def test_through_autograd(drawn, relative):
    q, k, v, dout = drawn(2, 4, 2, 300, 400, 64, torch.float16)
    dlse = torch.randn(q.shape[:-1], device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for deterministic in (True, False):
        way = {"impl": "hopper", "deterministic": deterministic}
        out, lse = flash_attention_lse(*leaves, causal=True, **way)
        found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        for got, want in zip(found, exact(q, k, v, dout, dlse, True), strict=True):
            assert relative(got, want) <= LIMITS[torch.float16]


def error_ratios(drawn, relative, D, causal, seed, outliers):
    """Our error over cuDNN's, for dq, dk and dv, both ways."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dout = drawn(1, 4, 4, 2048, 2048, D, torch.bfloat16, seed, outliers)
    problem = q, k, v, dout, torch.zeros(q.shape[:-1], device="cuda"), causal
    peers = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*peers, is_causal=causal)
    wanted, theirs = exact(*problem), torch.autograd.grad(out, peers, dout)
    ours = [gradients(*problem, deterministic) for deterministic in (True, False)]
    return torch.tensor(
        [
            [relative(mine, want) / relative(other, want) for mine in mines]
            for *mines, other, want in zip(*ours, theirs, wanted, strict=True)
        ]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", WIDTHS)
def test_is_as_accurate_as_cudnn(drawn, relative, D, causal):
    # 1 %: the same numbers are rounded, but sums come in another order.
    assert (error_ratios(drawn, relative, D, causal, seed=1, outliers=False) <= 1.01).all()
    # Outliers leave the error to a few numbers: one draw says little, for or against.
    draws = [error_ratios(drawn, relative, D, causal, seed, outliers=True) for seed in range(8)]
    assert (torch.stack(draws).log().mean(0).exp() <= 1.05).all()


@pytest.mark.parametrize("D", WIDTHS)
def test_deterministic_gradients_are_bitwise_repeatable(drawn, D):
    q, k, v, dout = drawn(2, 16, 4, 2048, 2048, D, torch.bfloat16, seed=2)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), True
    first = gradients(*problem)
    for _ in range(20):
        for one, again in zip(first, gradients(*problem), strict=True):
            assert torch.equal(one, again)


def test_dout_may_have_any_strides(drawn, relative):
    q, k, v, dout = drawn(1, 2, 1, 200, 200, 64, torch.float16)
    dlse = torch.zeros(q.shape[:-1], device="cuda")
    for odd in (dout[:, :1, :1].expand(dout.shape), dout.mT.contiguous().mT):
        problem = q, k, v, odd, dlse, True
        for got, want in zip(gradients(*problem), exact(*problem), strict=True):
            assert relative(got, want) <= LIMITS[torch.float16]


@pytest.mark.parametrize("deterministic", [True, False])
def test_neighbours_do_not_leak(drawn, deterministic):
    """Tiles reach beyond the end of a head; what lies there may be anything."""
    q, k, v, dout = drawn(1, 3, 3, 200, 200, 128, torch.bfloat16)
    dlse = torch.zeros(q.shape[:-1], device="cuda")
    clean = gradients(q, k, v, dout, dlse, False, deterministic)
    for x in (q, k, v, dout):
        x[:, 1] = float("nan")
    dirty = gradients(q, k, v, dout, dlse, False, deterministic)
    for one, other in zip(clean, dirty, strict=True):
        torch.testing.assert_close(one[:, ::2], other[:, ::2])


def test_is_the_default_where_it_is_faster(drawn):
    q, k, v, _ = drawn(1, 8, 8, 4096, 4096, 128, torch.bfloat16)
    for deterministic in (True, False):
        problem = dense_problem(q, k, v, True, deterministic=deterministic)
        assert fastest(problem, backward_tiers()) == "hopper"
        assert fastest(problem._replace(window=5), backward_tiers()) == "triton"


def test_cuda_graph(drawn):
    q, k, v, dout = drawn(1, 4, 4, 512, 512, 128, torch.bfloat16)
    dlse = torch.zeros(q.shape[:-1], device="cuda")
    out, lse = flash_attention_lse(q, k, v, causal=True)
    problem = dense_problem(q, k, v, True, scale=0.1, deterministic=False)
    saved = problem, out, lse, dout, dlse
    _, dk, dv = hopper_backward(*saved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, dk_again, dv_again = hopper_backward(*saved)
    graph.replay()
    # dk and dv have one owner each; only dq's sums come in any order.
    assert torch.equal(dk, dk_again)
    assert torch.equal(dv, dv_again)
