import numpy as np
import pytest

from trapline.gold import testing
from trapline.gold.norms import oracle

torch = pytest.importorskip("torch")
from trapline.gold.norms import fast  # noqa: E402 - needs torch


def tensors(dtype, *, width=48, offset=0.0, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 5, width)) + offset
    gamma, beta = rng.standard_normal((2, width))
    dy = rng.standard_normal(x.shape)
    return [torch.tensor(value, dtype=dtype) for value in (x, gamma, beta, dy)]


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
        (fast.layer_norm, ours),
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
    y = fast.rms_norm(*leaves, 1e-6)
    got = torch.autograd.grad(y, leaves, dy)
    exact = oracle.rms_norm_backward(*wide(dy, x, gamma))
    assert np.allclose(*wide(y), oracle.rms_norm(*wide(x, gamma)), atol=1e-13)
    for one, truth in zip(got, exact, strict=True):
        assert np.allclose(*wide(one), truth, atol=1e-12)


def test_autograd_agrees_with_differences():
    x, gamma, beta, _ = tensors(torch.float64, width=5)
    leaves = [value.requires_grad_() for value in (x, gamma, beta)]
    assert torch.autograd.gradcheck(lambda *args: fast.layer_norm(*args, 1e-5), leaves)
    assert torch.autograd.gradcheck(lambda *args: fast.rms_norm(*args, 1e-6), leaves[:2])


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_registered_operators_hold_what_they_declare(rows):
    x = torch.randn(rows, 6)
    w, b = torch.randn(2, 6)
    y, mean, rstd = torch.ops.trapline_norms.layer_norm(x, w, b, 1e-5)
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.trapline_norms
    for op, args in (
        (ops.layer_norm, (x, w, b, 1e-5)),
        (ops.layer_norm_backward, (y, x, w, mean, rstd)),
        (ops.rms_norm, (x, w, 1e-6)),
        (ops.rms_norm_backward, (y, x, w, rstd)),
    ):
        torch.library.opcheck(op, args, test_utils=tests)


def test_inputs_are_not_modified_and_strides_are_free():
    x, gamma, beta, _ = tensors(torch.float32)
    turned = x.transpose(0, 1)
    before = turned.clone()
    y = fast.layer_norm(turned, gamma, beta, 1e-5)
    assert torch.equal(turned, before)
    assert torch.equal(y, fast.layer_norm(turned.contiguous(), gamma, beta, 1e-5))


@pytest.mark.full
def test_one_graph_under_compile():
    """`aot_eager` traces forward and backward and needs no C++ compiler."""
    x, gamma, beta, dy = tensors(torch.float64, width=6)
    compiled = torch.compile(
        lambda *args: fast.layer_norm(*args, 1e-5), backend="aot_eager", fullgraph=True
    )
    leaves = [value.requires_grad_() for value in (x, gamma, beta)]
    got, want = compiled(*leaves), fast.layer_norm(*leaves, 1e-5)
    assert torch.equal(got, want)
    for one, other in zip(
        torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True
    ):
        assert torch.equal(one, other)
