"""Norms beside torch's own: transforms of `torch.func`, mixed dtypes, autocast."""

import warnings

import pytest

import trapline.gold as gold
from trapline.gold.errors import DTypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
WIDTH = 8


def ours_layer(x, weight, bias):
    return gold.layer_norm(x, weight, bias)


def ours_rms(x, weight, bias):
    return gold.rms_norm(x, weight, 1e-5)


def torch_layer(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (WIDTH,), weight, bias)


def torch_rms(x, weight, bias):
    return torch.nn.functional.rms_norm(x, (WIDTH,), weight, 1e-5)


PAIRS = pytest.mark.parametrize(
    ("ours", "theirs"), [(ours_layer, torch_layer), (ours_rms, torch_rms)], ids=["layer", "rms"]
)


def draw(dtype=torch.float64):
    torch.manual_seed(0)
    return (torch.randn(3, 5, WIDTH, dtype=dtype), *torch.randn(2, WIDTH, dtype=dtype))


def gradient(function):
    return torch.func.grad(lambda *given: function(*given).square().sum(), argnums=(0, 1))


@PAIRS
@pytest.mark.parametrize(
    "transform",
    [
        gradient,
        lambda function: torch.vmap(function, (0, None, None)),
        lambda function: torch.vmap(function, (1, None, None), out_dims=1),
        lambda function: torch.vmap(gradient(function), (0, None, None)),
        lambda function: gradient(torch.vmap(function, (0, None, None))),
    ],
    ids=["grad", "vmap", "vmap of another axis", "gradients per sample", "grad of vmap"],
)
def test_transforms_agree_with_torch(ours, theirs, transform):
    given = draw()
    torch.testing.assert_close(transform(ours)(*given), transform(theirs)(*given))


@PAIRS
def test_vmap_takes_one_weight_per_element(ours, theirs):
    x, _, bias = draw()
    weights = torch.randn(3, WIDTH, dtype=x.dtype)
    got, want = (torch.vmap(f, (0, 0, None))(x, weights, bias) for f in (ours, theirs))
    torch.testing.assert_close(got, want)


@PAIRS
@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacfwd])
def test_second_and_forward_derivatives_are_those_of_torch_on_a_cpu(ours, theirs, transform):
    given = draw()
    got, want = (transform(lambda *x, f=f: f(*x).pow(3).sum())(*given) for f in (ours, theirs))
    torch.testing.assert_close(got, want)


def test_second_derivatives_of_our_own_norm_are_refused():
    x, weight, bias = draw()
    first = torch.func.grad(lambda x: gold.layer_norm(x, weight, bias, impl="torch").square().sum())
    with pytest.raises(UnsupportedError, match="differentiated once"):
        torch.func.grad(lambda x: first(x).square().sum())(x)


@PAIRS
def test_gradients_per_sample_of_16_bits(ours, theirs):
    x, weight, bias = (one.bfloat16() for one in draw())
    got, want = (
        torch.vmap(torch.func.grad(lambda x, f=f: f(x, weight, bias).float().square().sum()))(x)
        for f in (ours, theirs)
    )
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@PAIRS
def test_compiles_into_one_graph_without_gradients(ours, theirs):
    given = draw()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), theirs(*given))


@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weights_beside_16_bit_rows(ours, theirs, dtype):
    x, weight, bias = draw(torch.float32)
    answers = []
    for function in (ours, theirs):
        leaves = [
            x.to(dtype).requires_grad_(),
            *(v.clone().requires_grad_() for v in (weight, bias)),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that its RMS norm is not fused
            y = function(*leaves)
        y.float().square().sum().backward()
        answers.append((y, *(leaf.grad for leaf in leaves[: 3 if function is ours_layer else 2])))
    for got, want in zip(*answers, strict=False):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=0.05)


def test_other_mixtures_of_dtypes_are_refused():
    x, weight, bias = draw(torch.float32)
    with pytest.raises(DTypeError, match="one dtype"):
        gold.layer_norm(x, weight.bfloat16(), bias.bfloat16())
    with pytest.raises(DTypeError, match="one dtype"):
        gold.layer_norm(x.bfloat16(), weight, bias.bfloat16())


@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_on_a_cpu_leaves_norms_alone(ours, theirs, dtype):
    given = draw(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = ours(*given), theirs(*given)
    assert got.dtype == want.dtype
    assert torch.equal(got, ours(*given))


@pytest.mark.parametrize("ours", [ours_layer, ours_rms])
def test_autocast_on_cuda_gives_float32(ours):
    """As torch's norms, which are in CUDA's list of functions that run in float32."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(2, WIDTH, device="cuda", dtype=torch.bfloat16)]
        given += [torch.empty(WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        assert ours(*given).dtype == torch.bfloat16
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            assert ours(*given).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "refusal"),
    [
        (torch.ones(2, 8), torch.ones(7), None, ShapeError),
        (torch.ones(2, 8), torch.ones(8), torch.ones(1, 8), ShapeError),
        (torch.tensor(1.0), None, None, ShapeError),
        (torch.ones(2, 8), torch.ones(8).double(), None, DTypeError),
        (torch.ones(2, 8).bfloat16(), torch.ones(8).bfloat16(), torch.ones(8), DTypeError),
        (torch.ones(2, 8), torch.ones(8).numpy(), None, DTypeError),
        (torch.ones(2, 8).long(), None, None, DTypeError),
        (torch.ones(2, 8) * 1j, None, None, DTypeError),
    ],
)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_torch_would_take_otherwise_is_refused_by_name(x, weight, bias, refusal, is_recorded):
    with torch.set_grad_enabled(is_recorded):
        with pytest.raises(refusal, match=r"x|weight|bias"):
            gold.layer_norm(x, weight, bias)
        if bias is None:
            with pytest.raises(refusal, match=r"x|weight"):
                gold.rms_norm(x, weight)


def test_16_bit_rows_far_from_zero_keep_exact_statistics_for_backward():
    """torch's own function keeps a 16-bit mean: 100.3 becomes 100.5, half a deviation off."""
    torch.manual_seed(0)
    x = (torch.randn(4, WIDTH) + 100.3).bfloat16().requires_grad_()
    w, b = (torch.randn(WIDTH).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.randn(4, WIDTH).bfloat16()
    exact = [one.detach().double().requires_grad_() for one in (x, w, b)]
    truth = torch.autograd.grad(torch_layer(*exact), exact, dy.double())
    errors = {}
    for function in (ours_layer, torch_layer):
        found = torch.autograd.grad(function(x, w, b), (x, w, b), dy)
        errors[function] = max(
            float((one - sure).norm() / sure.norm()) for one, sure in zip(found, truth, strict=True)
        )
    assert errors[ours_layer] < 0.01 < errors[torch_layer]
