import numpy as np
import pytest

from trapline.gold import testing
from trapline.gold.errors import UnsupportedError
from trapline.gold.norms import oracle

torch = pytest.importorskip("torch")
from trapline.gold.norms.registry import (  # noqa: E402 - needs torch
    backward_operator,
    forward_operator,
    norm,
)


def tensors(dtype, *, width=48, offset=0.0, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 5, width)) + offset
    gamma, beta = rng.standard_normal((2, width))
    dy = rng.standard_normal(x.shape)
    return [torch.tensor(value, dtype=dtype) for value in (x, gamma, beta, dy)]


def layer_norm(x, weight, bias, eps, **options):
    return norm(x, None, weight, bias, eps, "torch", centred=True, **options)[0]


def rms_norm(x, weight, eps, **options):
    return norm(x, None, weight, None, eps, "torch", centred=False, **options)[0]


def wide(*values):
    return [value.detach().double().numpy() for value in values]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_layer_norm_is_within_twice_the_error_of_torch(dtype, offset):
    x, gamma, beta, dy = tensors(dtype, offset=offset)
    exact_y = oracle.layer_norm(*wide(x, gamma, beta))
    exact = oracle.layer_norm_backward(*wide(dy, x, gamma))
    ours, theirs = [], []
    for function, answers in (
        (layer_norm, ours),
        (lambda x, w, b, eps: torch.nn.functional.layer_norm(x, w.shape, w, b, eps), theirs),
    ):
        leaves = [value.clone().requires_grad_() for value in (x, gamma, beta)]
        y = function(*leaves, 1e-5)
        assert y.dtype == dtype
        answers.extend([y, *torch.autograd.grad(y, leaves, dy)])
    eps = torch.finfo(dtype).eps
    for got, peer, truth in zip(ours, theirs, (exact_y, *exact), strict=True):
        floor = 4 * eps * max(1.0, np.abs(truth).max())
        allowed = 2 * testing.largest_error(*wide(peer), truth) + floor
        assert testing.largest_error(*wide(got), truth) <= allowed


def test_rms_norm_matches_the_oracle():
    x, gamma, _, dy = tensors(torch.float64)
    leaves = [value.requires_grad_() for value in (x, gamma)]
    y = rms_norm(*leaves, 1e-6)
    got = torch.autograd.grad(y, leaves, dy)
    exact = oracle.rms_norm_backward(*wide(dy, x, gamma))
    assert np.allclose(*wide(y), oracle.rms_norm(*wide(x, gamma)), atol=1e-13)
    for one, truth in zip(got, exact, strict=True):
        assert np.allclose(*wide(one), truth, atol=1e-12)


def test_autograd_agrees_with_differences():
    x, gamma, beta, _ = tensors(torch.float64, width=5)
    leaves = [value.requires_grad_() for value in (x, gamma, beta)]
    assert torch.autograd.gradcheck(lambda *args: layer_norm(*args, 1e-5), leaves)
    assert torch.autograd.gradcheck(lambda *args: rms_norm(*args, 1e-6), leaves[:2])


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("bare", [True, False], ids=["bare", "affine"])
def test_registered_operators_pass_opcheck(rows, centred, bare):
    x, residual = torch.randn(2, rows, 6)
    w, b = (None, None) if bare else torch.randn(2, 6)
    forward = (x, None if bare else residual, w, b, 1e-5, centred, "torch")
    y, _, mean, rstd = forward_operator(*forward)
    saved = (None, None) if bare else (mean if centred else None, rstd)
    backward = (y, None if bare else x, x, w, *saved, 1e-5, centred, b is not None, "torch")
    for op, args in ((forward_operator, forward), (backward_operator, backward)):
        torch.library.opcheck(op.overload, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("centred", [True, False])
def test_statistics_computed_again_give_the_same_gradients(centred):
    x, gamma, beta, dy = tensors(torch.float64)
    leaves = [value.requires_grad_() for value in (x, gamma, beta)][: 3 if centred else 2]
    function = layer_norm if centred else rms_norm
    kept, again = (
        torch.autograd.grad(function(*leaves, 1e-5, save_statistics=choice), leaves, dy)
        for choice in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_without_weight_and_bias_nothing_is_scaled():
    x, _, _, dy = tensors(torch.float64)
    bare, plain = x.requires_grad_(), x.detach().clone().requires_grad_()
    ones, zeros = torch.ones(48, dtype=x.dtype), torch.zeros(48, dtype=x.dtype)
    for got, want in (
        (layer_norm(bare, None, None, 1e-5), layer_norm(plain, ones, zeros, 1e-5)),
        (rms_norm(bare, None, 1e-5), rms_norm(plain, ones, 1e-5)),
    ):
        assert torch.equal(got, want)
        (one,), (other,) = torch.autograd.grad(got, bare, dy), torch.autograd.grad(want, plain, dy)
        assert torch.allclose(one, other, atol=1e-14)


@pytest.mark.parametrize("unused", ["y", "total", None])
def test_gradients_flow_through_norm_and_sum(unused):
    x, gamma, residual_row, dy = tensors(torch.float64)
    x, residual = x.requires_grad_(), residual_row.expand(x.shape).clone().requires_grad_()
    y, total = norm(x, residual, gamma, None, 1e-6, "torch", centred=False)
    parts = {"y": (y * dy).sum(), "total": (total * 3.0).sum()}
    parts.pop(unused, None)
    dx, dresidual = torch.autograd.grad(sum(parts.values()), (x, residual))
    want = np.zeros(x.shape)
    if unused != "y":
        want += oracle.rms_norm_backward(*wide(dy, x + residual, gamma)).dx
    if unused != "total":
        want += 3.0
    assert np.allclose(dx.numpy(), want, atol=1e-12)
    assert torch.equal(dx, dresidual)


def test_inputs_are_not_modified_and_strides_are_free():
    x, gamma, beta, _ = tensors(torch.float32)
    turned = x.transpose(0, 1)
    before = turned.clone()
    y = layer_norm(turned, gamma, beta, 1e-5)
    assert torch.equal(turned, before)
    assert torch.equal(y, layer_norm(turned.contiguous(), gamma, beta, 1e-5))


@pytest.mark.full
def test_one_graph_under_compile():
    """`aot_eager` traces forward and backward and needs no C++ compiler."""
    x, gamma, beta, dy = tensors(torch.float64, width=6)
    compiled = torch.compile(
        lambda *args: layer_norm(*args, 1e-5), backend="aot_eager", fullgraph=True
    )
    leaves = [value.requires_grad_() for value in (x, gamma, beta)]
    got, want = compiled(*leaves), layer_norm(*leaves, 1e-5)
    assert torch.equal(got, want)
    for one, other in zip(
        torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True
    ):
        assert torch.equal(one, other)


def second_derivative(function, *leaves):
    (dx,) = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)
    return torch.autograd.grad(dx.square().sum(), leaves)


@pytest.mark.parametrize("rows", [3, 4096], ids=["few rows", "many rows"])
@pytest.mark.parametrize("centred", [True, False])
def test_second_derivatives_are_right_or_refused(rows, centred):
    """torch's own functions have second derivatives; ours must not leave out terms silently."""
    leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((rows, 48), (48,))]
    functional = torch.nn.functional
    if centred:
        ours = lambda x, w: layer_norm(x, w, None, 1e-5)  # noqa: E731
        theirs = lambda x, w: functional.layer_norm(x, (48,), w, None, 1e-5)  # noqa: E731
    else:
        ours = lambda x, w: rms_norm(x, w, 1e-5)  # noqa: E731
        theirs = lambda x, w: functional.rms_norm(x, (48,), w, 1e-5)  # noqa: E731
    if not centred and rows > 3:
        with pytest.raises(UnsupportedError, match="differentiated once"):
            second_derivative(ours, *leaves)
        return
    for got, want in zip(
        second_derivative(ours, *leaves), second_derivative(theirs, *leaves), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_second_derivatives_raise_without_statistics():
    x = torch.randn(3, 8, requires_grad=True)
    y = layer_norm(x, None, None, 1e-5, save_statistics=False)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated once"):
        torch.autograd.grad(dx.square().sum(), x)
