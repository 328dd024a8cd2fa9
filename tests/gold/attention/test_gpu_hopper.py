"""The Hopper kernels on a GPU: every configuration against float64 and against its plain twin."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from trapline.gold import flash_attention, flash_attention_lse  # noqa: E402
from trapline.gold.attention.dense import dense_problem, reference  # noqa: E402
from trapline.gold.attention.dense.hopper import tiles as hopper  # noqa: E402
from trapline.gold.attention.dense.hopper.backward import backward as hopper_backward  # noqa: E402
from trapline.gold.attention.dense.hopper.forward import forward  # noqa: E402
from trapline.gold.attention.dense.registry import (  # noqa: E402
    backward_tiers,
    fastest,
    forward_tiers,
)
from trapline.gold.attention.dense.triton.backward import backward as plain_backward  # noqa: E402
from trapline.gold.errors import UnsupportedError  # noqa: E402

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.needs_gpu,
    pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU"),
]
#: Relative to float64, in the 2-norm: what rounding the weights and the result costs.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
#: The same of gradients, for which slopes are rounded too.
GRADIENT_LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def exact(q, k, v, causal):
    """out and lse in float64 by the torch reference, which is tested against the oracle."""
    wide = q.double(), k.double(), v.double()
    return reference.forward(dense_problem(*wide, causal, scale=q.shape[-1] ** -0.5))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", hopper.WIDTHS)
@pytest.mark.parametrize("dtype", sorted(hopper.TYPES, key=str))
def test_forward_agrees_with_float64_and_its_twin(drawn, relative, gpu_shape, dtype, D, causal):
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
def test_forward_is_as_accurate_as_cudnn(drawn, relative, D, causal):
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


def test_forward_is_the_default_only_where_it_is_faster(drawn):
    q, k, v, _ = drawn(1, 16, 16, 4096, 4096, 128, torch.bfloat16)
    for causal, D in itertools.product((True, False), hopper.WIDTHS):
        parts = (x[..., :D].contiguous() for x in (q, k, v))
        assert fastest(dense_problem(*parts, causal), forward_tiers()) == "hopper"
    assert fastest(dense_problem(q, k, v, True, window=5), forward_tiers()) == "triton"
    with pytest.raises(UnsupportedError, match="softcap"):
        flash_attention(q, k, v, softcap=2.0, impl="hopper")


def test_forward_in_a_cuda_graph(drawn):
    q, k, v, _ = drawn(1, 4, 4, 512, 512, 128, torch.bfloat16)
    wanted = flash_attention(q, k, v, causal=True, impl="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, causal=True, impl="hopper")
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def exact_gradients(q, k, v, dout, dlse, causal):
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
@pytest.mark.parametrize("D", hopper.WIDTHS)
@pytest.mark.parametrize("dtype", sorted(GRADIENT_LIMITS, key=str))
def test_gradients_agree_with_float64_both_ways(drawn, relative, gpu_shape, dtype, D, causal):
    q, k, v, dout = drawn(*gpu_shape, D, dtype)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), causal
    wanted = exact_gradients(*problem)
    for deterministic in (True, False):
        for got, want in zip(gradients(*problem, deterministic), wanted, strict=True):
            assert torch.isfinite(got).all()
            # One query that sees one key has a gradient of v only: nothing to be relative to.
            if want.abs().max() > 1e-6:
                assert relative(got, want) <= GRADIENT_LIMITS[dtype]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_gradients_agree_with_the_plain_kernels_both_ways(drawn, relative, D, causal):
    q, k, v, dout = drawn(3, 10, 5, 1111, 1300, D, torch.bfloat16)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), causal
    twins = gradients(*problem, backward=plain_backward)
    for deterministic in (True, False):
        for got, twin in zip(gradients(*problem, deterministic), twins, strict=True):
            assert relative(got, twin.double()) <= GRADIENT_LIMITS[torch.bfloat16]


@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_heads_that_do_not_fit_the_gpu_at_once_walk_without_a_ring(drawn, relative, monkeypatch, D):
    q, k, v, dout = drawn(3, 10, 5, 1111, 1300, D, torch.bfloat16)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), False
    ring = gradients(*problem)
    monkeypatch.setattr(f"{hopper_backward.__module__}.walks_in_a_ring", lambda *_: False)
    found = gradients(*problem)
    for got, other in zip(found, ring, strict=True):
        assert relative(got, other.double()) <= GRADIENT_LIMITS[torch.bfloat16]
    for _ in range(5):
        assert all(map(torch.equal, found, gradients(*problem)))


def test_gradients_through_autograd(drawn, relative):
    q, k, v, dout = drawn(2, 4, 2, 300, 400, 64, torch.float16)
    dlse = torch.randn(q.shape[:-1], device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for deterministic in (True, False):
        way = {"impl": "hopper", "deterministic": deterministic}
        out, lse = flash_attention_lse(*leaves, causal=True, **way)
        found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        for got, want in zip(found, exact_gradients(q, k, v, dout, dlse, True), strict=True):
            assert relative(got, want) <= GRADIENT_LIMITS[torch.float16]


def error_ratios(drawn, relative, D, causal, seed, outliers):
    """Our error over cuDNN's, for dq, dk and dv, both ways."""
    q, k, v, dout = drawn(1, 4, 4, 2048, 2048, D, torch.bfloat16, seed, outliers)
    problem = q, k, v, dout, torch.zeros(q.shape[:-1], device="cuda"), causal
    peers = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*peers, is_causal=causal)
    wanted, theirs = exact_gradients(*problem), torch.autograd.grad(out, peers, dout)
    ours = [gradients(*problem, deterministic) for deterministic in (True, False)]
    return torch.tensor(
        [
            [relative(mine, want) / relative(other, want) for mine in mines]
            for *mines, other, want in zip(*ours, theirs, wanted, strict=True)
        ]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_gradients_are_as_accurate_as_cudnn(drawn, relative, D, causal):
    # 1 %: the same numbers are rounded, but sums come in another order.
    assert (error_ratios(drawn, relative, D, causal, seed=1, outliers=False) <= 1.01).all()
    # Outliers leave the error to a few numbers: one draw says little, for or against.
    draws = [error_ratios(drawn, relative, D, causal, seed, outliers=True) for seed in range(8)]
    assert (torch.stack(draws).log().mean(0).exp() <= 1.05).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_deterministic_gradients_are_bitwise_repeatable(drawn, D, causal):
    q, k, v, dout = drawn(2, 16, 4, 2048, 2048, D, torch.bfloat16, seed=2)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), causal
    first = gradients(*problem)
    for _ in range(20):
        for one, again in zip(first, gradients(*problem), strict=True):
            assert torch.equal(one, again)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_calls_on_several_streams_wait_for_none_but_their_own(drawn, D, causal):
    """Each has more programs than fit the GPU, and programs that wait for others."""
    problems = []
    for seed in range(4):
        q, k, v, dout = drawn(1, 16, 16, 4096, 4096, D, torch.bfloat16, seed=seed)
        problem = dense_problem(q, k, v, causal, scale=D**-0.5)
        problems.append(
            (problem, *forward(problem), dout, torch.zeros(q.shape[:-1], device="cuda"))
        )
    wanted = [hopper_backward(*one) for one in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(5):
        busy @ busy
        found = []
        for stream, one in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                found.append(hopper_backward(*one))
        torch.cuda.synchronize()
        for some, others in zip(found, wanted, strict=True):
            assert all(map(torch.equal, some, others))


@pytest.mark.parametrize("D", hopper.WIDTHS)
def test_sums_need_no_cleared_memory(drawn, D):
    """Of more queries than keys the first see nothing: their dq is 0, whatever was there."""
    q, k, v, dout = drawn(2, 4, 2, 700, 130, D, torch.bfloat16)
    problem = q, k, v, dout, torch.randn(q.shape[:-1], device="cuda"), True
    wanted = gradients(*problem)
    for filled in (torch.nan, torch.inf, 1.0):
        kept = [torch.full((1 << size,), filled, device="cuda") for size in (16, 20, 21, 22)]
        del kept
        found = gradients(*problem)
        assert all(map(torch.equal, found, wanted))
        assert not found[0][:, :, :570].any()


def test_dout_may_have_any_strides(drawn, relative):
    q, k, v, dout = drawn(1, 2, 1, 200, 200, 64, torch.float16)
    dlse = torch.zeros(q.shape[:-1], device="cuda")
    for odd in (dout[:, :1, :1].expand(dout.shape), dout.mT.contiguous().mT):
        problem = q, k, v, odd, dlse, True
        for got, want in zip(gradients(*problem), exact_gradients(*problem), strict=True):
            assert relative(got, want) <= GRADIENT_LIMITS[torch.float16]


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


def test_backward_is_the_default_where_it_is_faster(drawn):
    q, k, v, _ = drawn(1, 8, 8, 4096, 4096, 128, torch.bfloat16)
    for deterministic in (True, False):
        problem = dense_problem(q, k, v, True, deterministic=deterministic)
        assert fastest(problem, backward_tiers()) == "hopper"
        assert fastest(problem._replace(window=5), backward_tiers()) == "triton"


@pytest.mark.parametrize("deterministic", [True, False])
def test_backward_in_a_cuda_graph(drawn, deterministic):
    q, k, v, dout = drawn(1, 4, 4, 512, 512, 128, torch.bfloat16)
    dlse = torch.zeros(q.shape[:-1], device="cuda")
    out, lse = flash_attention_lse(q, k, v, causal=True)
    problem = dense_problem(q, k, v, True, scale=0.1, deterministic=deterministic)
    saved = problem, out, lse, dout, dlse
    wanted = hopper_backward(*saved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = hopper_backward(*saved)
    for _ in range(3):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        # dk and dv have one owner each; dq's sums come in any order unless one is asked for.
        assert all(map(torch.equal, found[1:], wanted[1:]))
        assert torch.equal(found[0], wanted[0]) or not deterministic
