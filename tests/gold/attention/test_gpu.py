"""The plain kernels on a GPU: every tile of the tables, every feature, against float64."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import flash_attention, flash_attention_lse, flash_attention_varlen  # noqa: E402
from trapline.gold.attention.dense import dense_problem, reference  # noqa: E402
from trapline.gold.attention.dense.triton.backward import backward  # noqa: E402
from trapline.gold.attention.dense.triton.forward import TILES as FORWARD_TILES  # noqa: E402
from trapline.gold.attention.dense.triton.forward import forward  # noqa: E402

pytestmark = pytest.mark.needs_gpu
#: Relative to float64, in the 2-norm. What rounding inputs and weights to the dtype costs.
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
LOW = (torch.bfloat16, torch.float16)


def exact(q, k, v, dout, causal=False, window=0, softcap=0.0, scale=None):
    """out, lse, dq, dk, dv in float64 by the torch reference."""
    rules = causal, window, softcap, scale or q.shape[-1] ** -0.5
    problem = dense_problem(*(x.double() for x in (q, k, v)), *rules)
    out, lse = reference.forward(problem)
    grads = reference.backward(problem, out, lse, dout.double(), torch.zeros_like(lse))
    return named(out, lse, *grads)


def named(*results):
    return dict(zip(("out", "lse", "dq", "dk", "dv"), results, strict=True))


def far(got, want):
    """Relative distance in the 2-norm; whatever is −inf must be so on both sides."""
    got = got.double()
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    finite = want != -torch.inf
    distance = (got[finite] - want[finite]).norm() / want[finite].norm().clamp_min(1e-30)
    return float(distance)


def close(found, wanted, dtype):
    for name, got in found.items():
        assert torch.isfinite(got[got != -torch.inf]).all(), name
        assert far(got, wanted[name]) <= LIMITS[dtype], (name, far(got, wanted[name]))


#: Width, dtype, causal, by descriptors: every tile in bfloat16 in all four ways, in float16 in one.
EDGES = list(itertools.product((True, False), (True, False)))
WIDTHS = sorted({wide for wide, _ in FORWARD_TILES})
TILES = [(wide, torch.bfloat16, *way) for wide in WIDTHS for way in EDGES]
TILES += [(wide, torch.float16, True, True) for wide in WIDTHS]


@pytest.mark.parametrize(("wide", "dtype", "causal", "tma"), TILES, ids=str)
def test_every_tile_of_the_tables(drawn, wide, dtype, causal, tma):
    """Forward and backward; full attention with and without a last tile of keys that is masked."""
    q, k, v, dout = drawn(1, 4, 2, 672, 736 if causal or not tma else 768, wide, dtype)
    wanted = exact(q, k, v, dout, causal)
    problem = dense_problem(q, k, v, causal, scale=wide**-0.5)
    out, lse = forward(problem, tma=tma)
    grads = backward(problem, out, lse, dout, torch.zeros_like(lse), tma=tma)
    close(named(out, lse, *grads), wanted, dtype)


#: B, H, G, T, S, D and rules: groups, one query, empty rows, narrow and wide windows, caps, widths.
FEATURES = [
    ((2, 4, 1, 300, 300, 64), {"causal": True}),
    ((1, 8, 2, 1, 515, 128), {"causal": True}),
    ((1, 2, 2, 400, 250, 128), {"causal": True}),
    ((1, 4, 2, 333, 555, 128), {"window": 50}),
    ((1, 4, 2, 700, 700, 64), {"causal": True, "window": 300}),
    ((1, 2, 1, 257, 257, 128), {"causal": True, "softcap": 5.0}),
    ((1, 2, 1, 130, 200, 128), {"scale": 0.3, "softcap": 2.0, "window": 90}),
    *(((1, 2, 1, 150, 190, D), {"causal": True}) for D in (16, 20, 33, 48, 80, 96, 160, 192, 256)),
    ((1, 2, 1, 150, 190, 128), {}),
    ((1, 2, 2, 3, 0, 64), {}),
]


#: bfloat16 and float16 take turns; some, which have every rule between them, in float32 too.
DTYPES = [(number, LOW[number % 2]) for number in range(len(FEATURES))]
DTYPES += [(number, torch.float32) for number in (0, 2, 3, 6)]


@pytest.mark.parametrize(("number", "dtype"), DTYPES, ids=str)
def test_every_feature(drawn, number, dtype):
    shape, rules = FEATURES[number]
    q, k, v, dout = drawn(*shape, dtype)
    wanted = exact(q, k, v, dout, **rules)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = flash_attention_lse(q, k, v, **rules, impl="triton")
    grads = torch.autograd.grad(out, (q, k, v), dout)
    close(named(out.detach(), lse.detach(), *grads), wanted, dtype)


def test_packed_sequences():
    """What lies in the neighbours cannot leak: one of them is full of infinities and NaN."""
    torch.manual_seed(0)
    lengths = [(200, 200), (0, 30), (1, 300), (129, 65)]
    q, dout = torch.randn(2, 330, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 595, 2, 128, device="cuda", dtype=torch.bfloat16)
    k[200:230], v[200:230] = float("inf"), float("nan")
    ends_q, ends_k = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda")
        for x in zip(*lengths, strict=True)
    )
    for x in (q, k, v):
        x.requires_grad_()
    way = {"causal": True, "check": True, "impl": "triton"}
    out = flash_attention_varlen(q, k, v, ends_q, ends_k, 200, 300, **way)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(ends_q.tolist()), itertools.pairwise(ends_k.tolist()), strict=True
    ):
        if q0 == q1:
            continue
        at = [slice(q0, q1), slice(k0, k1), slice(k0, k1), slice(q0, q1)]
        one = [
            x.detach()[place].transpose(0, 1)[None]
            for x, place in zip((q, k, v, dout), at, strict=True)
        ]
        wanted = exact(*one, causal=True)
        found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
        places = {"out": at[0], "dq": at[0], "dk": at[1], "dv": at[2]}
        close(
            {name: x[places[name]].transpose(0, 1)[None] for name, x in found.items()},
            wanted,
            torch.bfloat16,
        )


@pytest.mark.parametrize("width", [64, 80, 128])
def test_packed_views_of_one_product(width):
    """Queries, keys and values beside each other in memory, as one linear layer makes them."""
    torch.manual_seed(0)
    product = torch.randn(330, 8, width, device="cuda", dtype=torch.bfloat16)
    views = product.split([4, 2, 2], 1)
    ends = torch.tensor([0, 200, 201, 330], dtype=torch.int32, device="cuda")
    found, wanted = (
        flash_attention_varlen(*inputs, ends, ends, 200, 200, causal=True).double()
        for inputs in (views, [x.contiguous() for x in views])
    )
    assert far(found, wanted) <= LIMITS[torch.bfloat16]


@pytest.fixture
def memory_full_of_nan():
    """Uninitialised memory is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("memory_full_of_nan")
@pytest.mark.parametrize("ends", [([0, 3, 100], [0, 7, 12]), ([5, 5], [9, 9]), ([0], [0])], ids=str)
def test_tokens_outside_all_sequences_give_zeros(ends):
    """As on a CPU, in the answer and in every gradient."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1000, 4, 64).half()
    k, v = torch.randn(2, 900, 2, 64).half()
    found = {}
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
        cu = [torch.tensor(x, dtype=torch.int32, device=device) for x in ends]
        out = flash_attention_varlen(*inputs, *cu, 97, 7, causal=True)
        grads = torch.autograd.grad(out, inputs, dout.to(device))
        found[device] = [x.detach().double().cpu() for x in (out, *grads)]
    for got, want in zip(found["cuda"], found["cpu"], strict=True):
        assert far(got, want) <= LIMITS[torch.float16]


@pytest.mark.usefixtures("memory_full_of_nan")
@pytest.mark.parametrize("ends", [[0, 60, 20, 100], [30, 10, 80, 80, 50], [0, 100, 40]], ids=str)
def test_boundaries_in_disorder_leave_nothing_uninitialised(ends):
    """Unchecked boundaries that fall give wrong answers, but no memory of others."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 100, 2, 64, device="cuda").bfloat16()
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attention_varlen(*inputs, cu, cu.clone(), 100, 100, causal=True, check=False)
    for found in (out, *torch.autograd.grad(out, inputs, dout)):
        assert not found.isnan().any()


@pytest.mark.usefixtures("memory_full_of_nan")
@pytest.mark.parametrize("missing", ["B", "H", "HG", "T", "S", "D"])
def test_empty_axes(missing):
    """Batches, heads, queries, keys, width; shapes and zeros as on a CPU."""
    sizes = {"B": 2, "H": 4, "G": 2, "T": 3, "S": 5, "D": 64} | dict.fromkeys(missing, 0)
    B, H, G, T, S, D = sizes.values()
    found = {}
    for device in ("cpu", "cuda"):
        q, k = torch.ones(B, H, T, D, device=device), torch.ones(B, G, S, D, device=device)
        inputs = [x.requires_grad_() for x in (q, k, k.clone())]
        out, lse = flash_attention_lse(*inputs, causal=True)
        found[device] = out, lse, *torch.autograd.grad(out.sum(), inputs)
    for got, want in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("kind", ["contiguous", "every other", "expanded", "misaligned"])
def test_any_strides(kind):
    """Some can be read by descriptors, some cannot; the answer is the same."""
    torch.manual_seed(0)
    B, H, T, D = 2, 4, 200, 64
    if kind == "every other":
        q = torch.randn(B, H, T, 2 * D, device="cuda").half()[..., ::2]
    elif kind == "expanded":
        q = torch.randn(B, 1, T, D, device="cuda").half().expand(B, H, T, D)
    elif kind == "misaligned":
        q = torch.randn(B * H * T * D + 1, device="cuda").half()[1:].view(B, H, T, D)
    else:
        q = torch.randn(B, H, T, D, device="cuda").half()
    wanted = exact(q, q, q, q, causal=True)
    out, lse = flash_attention_lse(q, q, q, causal=True, impl="triton")
    problem = dense_problem(q, q, q, True, scale=D**-0.5)
    grads = backward(problem, out, lse, q, torch.zeros_like(lse))
    close(named(out, lse, *grads), wanted, torch.float16)


def test_expanded_gradient(drawn):
    q, k, v, _ = drawn(1, 2, 2, 130, 130, 64, torch.float16)
    wanted = exact(q, k, v, torch.ones_like(q))
    for x in (q, k, v):
        x.requires_grad_()
    grads = torch.autograd.grad(flash_attention(q, k, v, impl="triton").sum(), (q, k, v))
    close({"dk": grads[1], "dv": grads[2]}, wanted, torch.float16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [64, 128])
def test_gradients_repeat_bit_for_bit(drawn, D, causal):
    q, k, v, dout = drawn(2, 8, 2, 1500, 1500, D, torch.bfloat16)
    problem = dense_problem(q, k, v, causal, scale=D**-0.5)
    out, lse = forward(problem)
    saved = problem, out, lse, dout, torch.zeros_like(lse)
    first = backward(*saved)
    for _ in range(20):
        again = backward(*saved)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        assert torch.equal(forward(problem)[0], out)


def test_cuda_graph(drawn):
    q, k, v, dout = drawn(1, 4, 4, 512, 512, 128, torch.bfloat16)
    problem = dense_problem(q, k, v, True, scale=128**-0.5)

    def step():
        out, lse = forward(problem)
        return out, *backward(problem, out, lse, dout, torch.zeros_like(lse))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    q.copy_(torch.randn_like(q))
    graph.replay()
    for got, want in zip(kept, step(), strict=True):
        assert torch.equal(got, want)


def test_operators_pass_opcheck(drawn, pass_opcheck):
    q, k, v, dout = drawn(1, 4, 2, 96, 128, 64, torch.bfloat16)
    for impl in ("kernels", "triton"):
        pass_opcheck(dense_problem(q, k, v, True, scale=0.125), dout, impl)


def test_compiles_without_graph_breaks(drawn):
    def loss(q, k, v):
        return flash_attention(q * 1.5, k, v, causal=True, impl="triton").float().square().sum()

    q, k, v, _ = drawn(1, 4, 2, 192, 192, 64, torch.float16)
    plain = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    traced = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    loss(*plain).backward()
    torch.compile(loss, fullgraph=True)(*traced).backward()
    for one, other in zip(plain, traced, strict=True):
        assert far(other.grad, one.grad.double()) < 2e-3


@pytest.mark.parametrize("D", [128, 96])
def test_offsets_beyond_two_to_the_31(D):
    """The last rows of a tensor of more than 2³¹ elements, by descriptors and by pointers."""
    torch.manual_seed(0)
    B, H, T = 1, 2, 300
    step = (2**31 // (T - 1) + 16) // 16 * 16
    assert (T - 1) * step >= 2**31
    store = torch.empty(8 * D + (T - 1) * step, device="cuda", dtype=torch.float16)
    # Beside each other in every row: they must differ, or a query would see itself and little else.
    q, k, v, dout = (
        store.as_strided((B, H, T, D), (2 * D, D, step, 1), first)
        for first in range(0, 8 * D, 2 * D)
    )
    for x in (q, k, v, dout):
        x.copy_(torch.randn(B, H, T, D, device="cuda"))
    wanted = exact(q, k, v, dout, causal=True)
    for tma in (True, False):
        problem = dense_problem(q, k, v, True, scale=D**-0.5)
        out, lse = forward(problem, tma=tma)
        grads = backward(problem, out, lse, dout, torch.zeros_like(lse), tma=tma)
        close(named(out, lse, *grads), wanted, torch.float16)


def test_unsupported_tier_is_rejected():
    from trapline.gold.errors import UnsupportedError

    q = torch.randn(1, 1, 8, 24, device="cuda")
    with pytest.raises(UnsupportedError, match="use impl='triton'"):
        flash_attention(q, q, q, impl="hopper")
