import numpy as np
import pytest

import trapline.gold as gold
from trapline.gold import testing
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.norms import oracle


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_go_through_float64_and_keep_their_dtype(dtype):
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(dtype)
    w, b = np.ones(8, dtype), np.zeros(8, dtype)
    y = gold.layer_norm(x, w, b)
    assert y.dtype == dtype
    assert np.array_equal(y, oracle.layer_norm(x, w, b).astype(dtype))
    assert gold.rms_norm(x, w).dtype == dtype


def test_residual_is_added_and_returned():
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 3, 8))
    y, total = gold.rms_norm(x, np.ones(8), residual=residual)
    assert np.array_equal(total, x + residual)
    assert np.array_equal(y, oracle.rms_norm(x + residual, np.ones(8)))


def test_tensors_stay_tensors_and_are_differentiable():
    torch = pytest.importorskip("torch")
    x, residual = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    w, b = torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    y = gold.layer_norm(x, w, b)
    assert np.allclose(y.detach().numpy(), oracle.layer_norm(x.detach().numpy(), w, b))
    normed = gold.rms_norm(x, w, residual=residual)
    (dx,) = torch.autograd.grad(normed.y.sum() + y.sum(), x)
    assert dx.shape == x.shape
    assert torch.equal(normed.residual, x + residual)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((np.zeros((2, 3)), np.zeros(4), np.zeros(3)), ShapeError),
        ((np.zeros((2, 3)), np.zeros(3), np.zeros((3, 1))), ShapeError),
        ((np.zeros((2, 3), int), np.zeros(3), np.zeros(3)), DTypeError),
        ((np.zeros((2, 3), np.float32), np.zeros(3), np.zeros(3)), DTypeError),
        ((np.zeros((2, 3)), np.zeros(3), np.zeros(3), 0.0), RangeError),
        (([[1.0]], np.zeros(1), np.zeros(1)), DTypeError),
    ],
)
def test_bad_input_is_refused(arguments, error):
    with pytest.raises(error):
        gold.layer_norm(*arguments)


def test_a_residual_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match="residual"):
        gold.rms_norm(np.zeros((2, 3)), np.zeros(3), residual=np.zeros((1, 3)))


@pytest.mark.parametrize("weighted", [True, False])
def test_layer_norm_backward_matches_differences(weighted):
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((2, 4, 3, 17))
    weight, bias = rng.standard_normal((2, 17))
    if not weighted:
        weight = np.ones(17)
    found = gold.layer_norm_backward(dy, x, weight if weighted else None)
    inputs, gradients = [x, bias], [found.dx, found.dbias]
    if weighted:
        inputs.insert(1, weight)
        gradients.insert(1, found.dweight)
    else:
        assert found.dweight is None

    def forward(x, *affine):
        return gold.layer_norm(x, *(affine if weighted else (None, *affine)))

    assert max(testing.gradient_errors(forward, gradients, inputs, dy)) < 1e-8


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_layer_norm_backward_matches_torch(dtype, kind):
    torch = pytest.importorskip("torch")
    x, dy = torch.randn(2, 4, 9, dtype=getattr(torch, dtype))
    weight, bias = torch.randn(2, 9, dtype=getattr(torch, dtype))
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    y = torch.nn.functional.layer_norm(leaves[0], (9,), *leaves[1:])
    given = [value.numpy() if kind == "arrays" else value for value in (dy, x, weight)]
    found = gold.layer_norm_backward(*given)
    for got, want in zip(found, torch.autograd.grad(y, leaves, dy), strict=True):
        assert isinstance(got, np.ndarray if kind == "arrays" else torch.Tensor)
        got = torch.as_tensor(got)
        assert got.dtype == want.dtype
        assert not got.requires_grad
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_layer_norm_backward_refuses_other_shapes():
    with pytest.raises(ShapeError, match="dy has leading axes"):
        gold.layer_norm_backward(np.zeros((3, 4)), np.zeros((2, 4)))
    with pytest.raises(ShapeError, match="weight"):
        gold.layer_norm_backward(np.zeros((2, 4)), np.zeros((2, 4)), np.zeros(3))
