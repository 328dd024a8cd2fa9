"""The public functions as torch sees them: what autograd keeps, and whole graphs."""

import pytest

from trapline.gold.attention.api import (
    flash_attention,
    flash_attention_lse,
    flash_attention_varlen,
)
from trapline.gold.errors import UnsupportedError

torch = pytest.importorskip("torch")


def draw(tokens=6, keys=8):
    torch.manual_seed(0)
    q = torch.randn(1, 4, tokens, 4, requires_grad=True)
    k, v = (torch.randn(1, 2, keys, 4, requires_grad=True) for _ in range(2))
    return q, k, v


def test_autograd_saves_only_q_k_v_out_and_lse():
    q, k, v = draw()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, lse = flash_attention_lse(q, k, v, causal=True, window=3, softcap=2.0)
    addresses = [x.data_ptr() for x in (q, k, v, out, lse)]
    assert [tensor.data_ptr() for tensor in kept] == addresses


def dense(q, k, v):
    out, lse = flash_attention_lse(q, k, v, causal=True, window=5, softcap=3.0)
    return out.square().sum() + lse.sum() + flash_attention(q, k, v).sum()


def packed(q, k, v):
    ends = [torch.tensor(cu, dtype=torch.int32) for cu in ([0, 2, 6], [0, 5, 8])]
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    return flash_attention_varlen(*flat, *ends, 4, 5, causal=True).square().sum()


@pytest.mark.parametrize("loss", [dense, packed])
def test_public_functions_compile_into_one_graph(compiles_into_one_graph, loss):
    compiles_into_one_graph(loss, draw())


def test_compiles_into_one_graph_without_gradients():
    q, k, v = (x.detach() for x in draw())
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, window=3), flash_attention(q, k, v, window=3))


def test_second_derivative_is_rejected():
    q, k, v = draw()
    (first,) = torch.autograd.grad(flash_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="attention can be differentiated once, not twice"):
        first.sum().backward()


def gradients(function):
    return torch.func.grad(lambda *given: function(*given).square().sum(), argnums=(0, 1, 2))


def mapped_queries(function):
    return lambda q, k, v: torch.vmap(function, in_dims=(0, None, None))(q, k[0], v[0])


def flat(x):
    """Leading axes as one batch."""
    return x.flatten(0, -4)


@pytest.mark.parametrize(
    "transform",
    [
        gradients,
        torch.vmap,
        mapped_queries,
        lambda function: torch.vmap(gradients(function)),
        lambda function: gradients(torch.vmap(function)),
    ],
    ids=["grad", "vmap", "vmap of queries", "gradients per sample", "grad of vmap"],
)
def test_transforms_agree_with_torch(transform):
    torch.manual_seed(0)
    given = torch.randn(3, 2, 2, 4, 6, 8, dtype=torch.float64).unbind()

    def ours(q, k, v):
        return flash_attention(flat(q), flat(k), flat(v), causal=True)

    def theirs(q, k, v):
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(flat(q), flat(k), flat(v), is_causal=True)

    torch.testing.assert_close(transform(ours)(*given), transform(theirs)(*given))


@pytest.mark.needs_gpu
def test_kernels_compile_into_one_graph_and_pass_opcheck(pass_opcheck):
    from trapline.gold.attention.dense import dense_problem

    inputs = [x.detach().cuda().requires_grad_() for x in draw(70, 90)]
    want = torch.autograd.grad(dense(*inputs), inputs)
    compiled = torch.compile(dense, fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    plain = [x.detach() for x in inputs]
    problem = dense_problem(*plain, causal=True, scale=0.5)
    pass_opcheck(problem, torch.randn_like(plain[0]), "kernels")


def test_autocast_does_not_change_the_products():
    """The operands' dtype is the caller's choice: float32 stays float32 all the way."""
    q, k, v = (x.detach() for x in draw(40, 40))
    want = flash_attention(q, k, v, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
