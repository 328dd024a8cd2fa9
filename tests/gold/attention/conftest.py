"""Attention problems shared by the tests of this component."""

import numpy as np
import pytest

#: B, H, G, T, S, D: square, cached prefix, empty rows, one query, grouped, no queries, no keys.
SHAPES = [
    (2, 4, 2, 17, 17, 5),
    (1, 2, 1, 5, 23, 4),
    (1, 2, 2, 23, 5, 4),
    (1, 6, 3, 1, 9, 3),
    (1, 2, 1, 0, 4, 3),
    (1, 2, 1, 4, 0, 3),
    (0, 2, 1, 3, 3, 3),
]
#: B, H, G, T, S for the Hopper kernels: one tile and many, tails in both, a cached prefix, rows
#: that see nothing, one query, one key, more tiles than processors, grouped heads, bunches of tiles
#: that do not come out even.
GPU_SHAPES = [
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
#: causal, window, softcap
RULES = [(False, None, 0.0), (True, None, 0.0), (False, 4, 0.0), (True, 3, 0.0), (True, None, 1.5)]


@pytest.fixture(params=SHAPES, ids=lambda shape: "B{}H{}G{}T{}S{}D{}".format(*shape))
def problem(request):
    """q, k, v, dout in float64."""
    B, H, G, T, S, D = request.param
    rng = np.random.default_rng(3)
    q, dout = rng.standard_normal((2, B, H, T, D))
    k, v = rng.standard_normal((2, B, G, S, D))
    return q, k, v, dout


@pytest.fixture(params=RULES, ids=lambda rules: "causal={} window={} softcap={}".format(*rules))
def rules(request):
    causal, window, softcap = request.param
    return {"causal": causal, "window": window, "softcap": softcap}


@pytest.fixture(params=GPU_SHAPES, ids=str)
def gpu_shape(request):
    return request.param


@pytest.fixture
def drawn():
    """Draws q, k, v, dout on the GPU as projections give them: (B,T,H,D) viewed as (B,H,T,D)."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)  # for what a test draws besides

    def draw(B, H, G, T, S, D, dtype, seed=0, outliers=False):
        make = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
        sizes = (T, H), (S, G), (S, G), (T, H)
        made = [torch.randn(B, N, heads, D, **make) for N, heads in sizes]
        if outliers:
            made = [x * torch.where(torch.rand(x.shape, **make) < 0.01, 20.0, 1.0) for x in made]
        return [x.to(dtype).transpose(1, 2) for x in made]

    return draw


@pytest.fixture
def compiles_into_one_graph():
    """A loss has the same gradients when compiled, without graph breaks."""
    torch = pytest.importorskip("torch")

    def check(loss, inputs):
        want = torch.autograd.grad(loss(*inputs), inputs)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
            torch.testing.assert_close(a, b)

    return check


@pytest.fixture
def pass_opcheck():
    """Both operators are what they declare, for a problem and a gradient of its result."""
    torch = pytest.importorskip("torch")
    from trapline.gold.attention.dense import registry

    def check(problem, dout, impl):
        arguments = *problem, impl
        torch.library.opcheck(registry.forward_operator.overload, arguments)
        out, lse = registry.forward_operator(*arguments)
        saved = dout, torch.zeros_like(lse), out, lse
        torch.library.opcheck(registry.backward_operator.overload, (*saved, *arguments))

    return check


@pytest.fixture
def relative():
    """The distance of an answer from the truth, relative in the 2-norm."""
    return lambda got, want: float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
