"""The torch path against the oracle, torch's own attention, and torch's checks of an operator."""

import numpy as np
import pytest

from trapline.gold.attention import oracle
from trapline.gold.errors import UnsupportedError

torch = pytest.importorskip("torch")
from trapline.gold.attention.dense import (  # noqa: E402
    Problem,
    dense_problem,
    reference,
    registry,
)


@pytest.fixture(autouse=True, params=["tiles", "fused"])
def path(monkeypatch, request):
    """Small tiles, none of which divides a length; or torch's kernel where it serves."""
    monkeypatch.setattr(reference, "TILE", 4)
    if request.param == "tiles":
        monkeypatch.setattr(reference, "cpu_kernel_supports", lambda _: "tiles are asked for")
    return request.param


def attention(*arguments):
    return registry.Attention.apply(*dense_problem(*arguments), "torch")


def packed_attention(inputs, ends, longest, rules):
    return registry.Attention.apply(*Problem(*inputs, *ends, *longest, *rules, True), "torch")[0]


def as_rules(rules, width):
    return rules["causal"], rules["window"] or 0, rules["softcap"], width**-0.5


def leaves(*arrays, dtype=torch.float64):
    return [torch.tensor(x, dtype=dtype).requires_grad_() for x in arrays]


def test_forward_agrees_with_the_oracle(problem, rules):
    q, k, v, _ = problem
    out, lse = attention(*leaves(q, k, v), *as_rules(rules, q.shape[-1]))
    want_out, want_lse = oracle.attention(q, k, v, **rules)
    np.testing.assert_allclose(out.detach(), want_out, atol=1e-13)
    np.testing.assert_allclose(lse.detach(), want_lse, atol=1e-13)


def test_backward_agrees_with_the_oracle(problem, rules):
    q, k, v, dout = problem
    inputs = leaves(q, k, v)
    out, _ = attention(*inputs, *as_rules(rules, q.shape[-1]))
    got = torch.autograd.grad(out, inputs, torch.tensor(dout))
    want = oracle.attention_backward(dout, q, k, v, **rules)
    for one, truth in zip(got, want, strict=True):
        np.testing.assert_allclose(one, truth, atol=1e-12)


@pytest.mark.parametrize("rules", [(True, 0, 0.0, 0.5), (False, 3, 2.0, 0.7)])
def test_gradients_of_out_and_lse_together(rules):
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *inputs: attention(*inputs, *rules), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_at_most_twice_that_of_torch(dtype, causal):
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 30, 16).to(dtype) for _ in range(4))
    wide = [x.double().numpy() for x in (q, k, v, dout)]
    exact = oracle.attention(*wide[:3], causal=causal)[0]
    exact_grads = oracle.attention_backward(wide[3], *wide[:3], causal=causal)

    def answers(function):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        assert out.dtype == dtype
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    ours = answers(lambda q, k, v: attention(q, k, v, causal, 0, 0.0, 0.25)[0])
    peer = answers(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    )
    eps = torch.finfo(dtype).eps
    for got, other, truth in zip(ours, peer, (exact, *exact_grads), strict=True):
        errors = [np.abs(x.double().numpy() - truth).max() for x in (got, other)]
        assert errors[0] <= 2 * errors[1] + 4 * eps * np.abs(truth).max()


def test_any_strides():
    torch.manual_seed(2)
    base = torch.randn(3, 2, 9, 4, 6, dtype=torch.float64)
    q, k, v = base.transpose(2, 3)[..., ::2]
    got = attention(q, k, v, True, 0, 0.0, 1.0)[0]
    want = attention(*(x.contiguous() for x in (q, k, v)), True, 0, 0.0, 1.0)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_gradient_of_an_expanded_sum():
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 1, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    attention(q, k, v, True, 0, 0.0, 0.5)[0].sum().backward()
    want = oracle.attention_backward(
        np.ones((1, 1, 7, 4)), *(x.detach().numpy() for x in (q, k, v)), causal=True
    )
    np.testing.assert_allclose(q.grad, want[0], atol=1e-13)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_second_derivatives_are_rejected(kind):
    """Of a sum too, where the incoming gradient has no gradient of its own."""
    inputs, _, ends = packed([5], [5])
    rules = True, 0, 0.0, 0.5
    if kind == "packed":
        out = packed_attention(inputs, ends, (5, 5), rules)
    else:
        out, _ = attention(*(x.transpose(0, 1)[None] for x in inputs), *rules)
    grads = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    penalty = out.sum() + sum(grad.square().sum() for grad in grads)
    with pytest.raises(UnsupportedError, match="once"):
        penalty.backward()


def packed(lengths_q, lengths_k, dtype=torch.float64):
    rng = np.random.default_rng(5)
    q, dout = rng.standard_normal((2, sum(lengths_q), 4, 3))
    k, v = rng.standard_normal((2, sum(lengths_k), 2, 3))
    ends = [
        torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    ]
    return leaves(q, k, v, dtype=dtype), torch.tensor(dout, dtype=dtype), ends


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_see_each_other(causal):
    inputs, dout, (cu_q, cu_k) = packed([5, 0, 1, 7], [5, 3, 6, 2])
    rules = (causal, 0, 0.0, 3**-0.5)
    out = packed_attention(inputs, (cu_q, cu_k), (7, 6), rules)
    grads = torch.autograd.grad(out, inputs, dout)
    for i in range(4):
        here, there = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        places = (here, there, there)
        one = [
            x.detach()[place].transpose(0, 1)[None].requires_grad_()
            for x, place in zip(inputs, places, strict=True)
        ]
        alone, _ = attention(*one, *rules)
        alone_grads = torch.autograd.grad(alone, one, dout[here].transpose(0, 1)[None])
        torch.testing.assert_close(out[here], alone[0].transpose(0, 1))
        for whole, part, place in zip(grads, alone_grads, places, strict=True):
            torch.testing.assert_close(whole[place], part[0].transpose(0, 1))


def test_operators_pass_opcheck(pass_opcheck):
    torch.manual_seed(4)
    q = torch.randn(1, 2, 5, 3)
    k, v = torch.randn(2, 1, 1, 6, 3)
    inputs, dout, ends = packed([2, 3], [4, 1], torch.float32)
    flat = [x.detach() for x in inputs]
    rules = True, 0, 0.0, 0.5, True
    pass_opcheck(dense_problem(q, k, v, *rules), torch.randn_like(q), "torch")
    pass_opcheck(Problem(*flat, *ends, 3, 4, *rules), dout, "torch")


def test_compiles_without_graph_breaks(compiles_into_one_graph):
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 1, 6, 4, requires_grad=True) for _ in range(3))

    def loss(q, k, v):
        return attention(q, k, v, True, 0, 0.0, 0.5)[0].square().sum()

    compiles_into_one_graph(loss, (q, k, v))


@pytest.mark.parametrize("path", ["tiles"], indirect=True)
def test_memory_grows_with_the_length_not_its_square(monkeypatch):
    """The largest tensor that the forward and backward passes make grows with T, not with T·S."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(reference, "TILE", 32)

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            answer = function(*args, **(kwargs or {}))
            if isinstance(answer, torch.Tensor):
                self.elements = max(self.elements, answer.numel())
            return answer

    found = []
    for n in (128, 512):
        q, k, v = torch.randn(3, 1, 1, n, 4)
        lse = torch.zeros(1, 1, n)
        with Largest() as watch:
            problem = dense_problem(q, k, v, scale=0.5)
            out, _ = reference.forward(problem)
            reference.backward(problem, out, lse, out, lse)
        found.append(watch.elements)
    assert found[0] <= 32 * 32
    assert found[1] <= 512 * 4


@pytest.mark.parametrize("path", ["fused"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernel_serves_plain_problems_and_repeats_bitwise(dtype):
    torch.manual_seed(6)
    q, dout = torch.randn(2, 2, 6, 70, 16).to(dtype)
    k, v = torch.randn(2, 2, 2, 70, 16).to(dtype)
    problem = dense_problem(q, k, v, causal=True, scale=0.25)
    assert reference.cpu_kernel_supports(problem) is None
    out, lse = reference.forward(problem)
    first, again = (reference.backward(problem, out, lse, dout, None) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("path", ["fused"], indirect=True)
def test_fused_kernel_leaves_other_problems_to_the_tiles():
    x, longer = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 6, 4)
    assert "windows" in reference.cpu_kernel_supports(dense_problem(x, x, x, window=2))
    assert "soft caps" in reference.cpu_kernel_supports(dense_problem(x, x, x, softcap=2.0))
    assert "fewer queries" in reference.cpu_kernel_supports(
        dense_problem(x, longer, longer, causal=True)
    )
    assert "empty" in reference.cpu_kernel_supports(dense_problem(x, x[:, :, :0], x[:, :, :0]))


def test_hidden_tiles_are_not_visited():
    x = torch.zeros(1, 1, 4, 4)
    masked = dense_problem(x, x, x, causal=True, window=3)
    visited = list(reference.key_tiles(masked, range(8, 12), 100, 0))
    assert [(tile.start, tile.stop) for tile in visited] == [(6, 10), (10, 12)]
    free = dense_problem(x, x, x)
    assert sum(len(tile) for tile in reference.key_tiles(free, range(4), 10, 6)) == 10
    assert reference.hidden(free, range(4), range(4), 0) is None


def test_16_bit_sequences_widened_one_at_a_time_agree_with_all_at_once(monkeypatch, path):
    q = torch.randn(3, 4, 5, 8).bfloat16()
    k, v = torch.randn(2, 3, 2, 5, 8).bfloat16()
    problem = dense_problem(q, k, v, causal=True, scale=0.3)
    whole = reference.forward(problem)
    monkeypatch.setattr(reference, "_WIDENED", 1)
    for one, other in zip(reference.forward(problem), whole, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
