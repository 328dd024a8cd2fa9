"""Packed products on a GPU against float64: every plan, every edge, one after the other."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.ternary import packed_linear as fast  # noqa: E402
from trapline.gold.ternary.hopper.many_rows import ManyRowsTiles, many_rows  # noqa: E402
from trapline.gold.ternary.triton import packed_matmul as kernels  # noqa: E402

pytestmark = pytest.mark.needs_gpu
#: Of the largest result: rounding it to the dtype, and a little for the sum in float32.
LIMITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11 * 1.2, torch.float32: 3e-6}
LOW = (torch.bfloat16, torch.float16)


def drawn(rows, N, K, dtype, seed=0, group=128):
    """x, plane and scales, all codes equally likely; scales of every size float16 has."""
    numbers = torch.Generator("cuda").manual_seed(seed)
    make = {"device": "cuda", "generator": numbers}
    fields = torch.randint(0, 3, (4, N, -(-K // 4)), dtype=torch.uint8, **make)
    plane = fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6
    scales = (torch.randn(N, -(-K // group), **make).exp() * 0.02).half()
    return torch.randn(rows, K, **make).to(dtype), plane, scales


def exact(x, plane, scales, group=128):
    weights = fast.unpacked(plane, scales, x.shape[1], group).double()
    return x.double() @ weights.T


def agree(y, x, plane, scales, group=128):
    wanted = exact(x, plane, scales, group)
    assert y.shape == wanted.shape
    assert y.dtype == x.dtype
    worst = (y.double() - wanted).abs().amax() / wanted.abs().amax().clamp_min(1e-30)
    assert float(worst) <= LIMITS[x.dtype], float(worst)


#: One to eight rows of x; widths of one group, an odd number of groups, the benchmark's.
WIDTHS = (128, 384, 1152, 2560, 4096, 8192, 13824)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("rows", range(1, 9))
def test_few_rows(rows, K, dtype):
    for N in (1, 15, 333):
        x, plane, scales = drawn(rows, N, K, dtype, seed=K + rows)
        agree(fast.packed_linear(x, plane, scales), x, plane, scales)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("K", [16, 130, 272, 1024, 2560])
@pytest.mark.parametrize("rows", [1, 3, 9, 64, 200])
def test_other_kernels(rows, K, dtype):
    x, plane, scales = drawn(rows, 333, K, dtype, seed=K + rows)
    agree(fast.packed_linear(x, plane, scales), x, plane, scales)


#: Rows of x, columns: every block of x, one group and odd numbers of them, shared and not.
MANY = [(9, 2560), (16, 128), (17, 13824), (33, 1152), (64, 2560), (65, 384), (128, 1024)]
MANY += [(129, 4096), (256, 2560), (300, 640)]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("rows", "K"), MANY)
def test_many_rows(rows, K, dtype):
    for N in (1, 15, 333, 2560):
        x, plane, scales = drawn(rows, N, K, dtype, seed=K + rows)
        for settled in (False, True):
            y = fast.packed_linear(x, plane, scales, settled=settled)
            agree(y, x, plane, scales)


@pytest.mark.parametrize("rows", [4, 5, 8])
def test_few_rows_times_a_large_matrix(rows):
    x, plane, scales = drawn(rows, 32769, 4096, torch.bfloat16)
    assert plane.numel() * 4 >= kernels.LARGE
    agree(fast.packed_linear(x, plane, scales), x, plane, scales)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rows", [1, 8, 16, 64, 100, 256])
def test_zero_and_extreme_scales(rows, dtype):
    """A group whose scale is 0 counts for nothing, wherever it lies; others may differ by 2^20."""
    x, plane, scales = drawn(rows, 200, 1280, dtype)
    scales[:50, 0] = 0
    scales[25:75, 4:6] = 0
    scales[70:100] = 0
    scales[100:150, ::2] *= 2.0**-10
    scales[120:, 1::2] *= 2.0**10
    agree(fast.packed_linear(x, plane, scales), x, plane, scales)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("N", "K"), [(13824, 2560), (28672, 8192)])
def test_benchmark_matrices(N, K, dtype):
    x, plane, scales = drawn(1, N, K, dtype)
    agree(fast.packed_linear(x, plane, scales), x, plane, scales)


#: Width, rows of x, how: each kind of plan, more tiles than programs and fewer.
PLANS = [
    (2560, 1, kernels.FewRowsPlan(2, 5, 2)),
    (2560, 2, kernels.FewRowsPlan(4, 5, stay=2)),
    (1152, 8, kernels.FewRowsPlan(4, 3, stay=1, registers=168)),
    (4096, 1, kernels.FewRowsPlan(4, 8, stay=1, stages=3)),
    (8192, 1, kernels.FewRowsPlan(8, 8, stay=1, stages=3)),
    (8192, 1, kernels.FewRowsPlan(8, 8, stay=1, stages=2)),
    (8192, 2, kernels.FewRowsPlan(8, 8, stay=1, stages=3)),
    (16384, 2, kernels.FewRowsPlan(16, 8, stay=1, stages=3)),
    (13824, 8, kernels.FewRowsPlan(4, 9, 3)),
    (28672, 1, kernels.FewRowsPlan(8, 7, 4)),
]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("K", "rows", "plan"), PLANS)
def test_every_kind_of_plan(K, rows, plan, dtype):
    """Twice with the same plan: with and without waiting for the weights."""
    for N in (5, 16 * 132 * 3 + 7, 16 * 132):
        x, plane, scales = drawn(rows, N, K, dtype, seed=N)
        for settled in (False, True):
            y = torch.full((rows, N), torch.nan, device="cuda", dtype=dtype)
            torch.cuda.synchronize()
            kernels.few_rows(x, plane, scales, y, settled=settled, plan=plan)
            agree(y, x, plane, scales)


#: Columns, rows of x, how: both heights and numbers of warpgroups, one and two groups a step, rows
#: shared by programs, one set of sums, more stages than steps and fewer.
TILES = [
    (2560, 16, ManyRowsTiles(16, 64, 2, 8, 1, 1)),
    (2560, 9, ManyRowsTiles(16, 64, 4, 4, 2, 1)),
    (1152, 32, ManyRowsTiles(32, 64, 4, 8, 1, 3)),
    (8192, 33, ManyRowsTiles(64, 64, 4, 6, 1, 1)),
    (1024, 64, ManyRowsTiles(64, 128, 2, 3, 2, 2)),
    (2560, 200, ManyRowsTiles(128, 64, 2, 2, 2, 1)),
    (384, 128, ManyRowsTiles(128, 128, 2, 5, 1, 1, True)),
    (2560, 256, ManyRowsTiles(128, 128, 2, 2, 1, 5, True)),
    (1280, 300, ManyRowsTiles(256, 64, 2, 3, 1, 1, True)),
]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("K", "rows", "how"), TILES)
def test_every_kind_of_tiles(K, rows, how, dtype):
    """With and without waiting for the weights; some scales are 0 beside codes that are not."""
    for N in (5, 256 * 133 + 9):
        x, plane, scales = drawn(rows, N, K, dtype, seed=N)
        scales[::3, 0] = 0
        scales[1::5, -1] = 0
        for settled in (False, True):
            y = torch.full((rows, N), torch.nan, device="cuda", dtype=dtype)
            torch.cuda.synchronize()
            many_rows(x, plane, scales, y, settled=settled, how=how)
            agree(y, x, plane, scales)


@pytest.mark.parametrize("dtype", LOW)
def test_wider_groups(dtype):
    x, plane, scales = drawn(2, 64, 1024, dtype, group=256)
    agree(fast.packed_linear(x, plane, scales, 256), x, plane, scales, 256)


@pytest.mark.parametrize("dtype", LOW)
def test_groups_do_not_affect_each_other(dtype):
    """One activation at a time: nothing leaks from a group to another, whatever its scale."""
    _, plane, scales = drawn(1, 40, 1152, dtype)
    weights = fast.unpacked(plane, scales, 1152, 128)
    for place in (0, 1, 7, 8, 31, 32, 127, 128, 640, 1151):
        x = torch.zeros(1, 1152, device="cuda", dtype=dtype)
        x[0, place] = 1.5
        wanted = (1.5 * weights[:, place]).to(dtype)
        torch.testing.assert_close(fast.packed_linear(x, plane, scales)[0], wanted)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [2.0**-10, 2.0**10])
def test_small_and_large_activations(dtype, size):
    x, plane, scales = drawn(4, 100, 2560, dtype)
    x = x * size
    agree(fast.packed_linear(x, plane, (scales * 0.01).half()), x, plane, (scales * 0.01).half())


def test_infinite_activations_stay_infinite():
    x, plane, scales = drawn(2, 50, 512, torch.bfloat16)
    x[0, 300] = torch.inf
    y = fast.packed_linear(x, plane, scales)
    assert not torch.isfinite(y[0]).any()
    agree(y[1:], x[1:], plane, scales)


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_gradients_of_packed_products(rows):
    x, plane, scales = drawn(rows, 333, 640, torch.float32)
    y = fast.packed_linear(x.requires_grad_(), plane, scales)
    given = torch.randn(rows, 333, device="cuda")
    (found,) = torch.autograd.grad(y, x, given)
    wanted = given.double() @ fast.unpacked(plane, scales, 640, 128).double()
    torch.testing.assert_close(
        found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())
    )


@pytest.mark.parametrize(("rows", "K"), [(1, 2560), (4, 2560), (8, 2560), (1, 8192), (2, 8192)])
def test_early_started_kernels_read_finished_inputs(rows, K):
    """Kernels start before the one before is done: two buffers in turn show a read too early."""
    N = K
    stored = [drawn(rows, N, K, torch.bfloat16, seed)[1:] for seed in range(8)]
    first = drawn(rows, N, K, torch.bfloat16)[0]
    buffers = [torch.empty_like(first) for _ in range(2)]

    def chain(product):
        buffers[0].copy_(first)
        for step in range(40):
            product(buffers[step % 2], *stored[step % 8], buffers[1 - step % 2])
        return buffers[0].clone()

    def early(x, plane, scales, y):
        kernels.few_rows(x, plane, scales, y, settled=True)

    def alone(x, plane, scales, y):
        torch.cuda.synchronize()
        kernels.few_rows(x, plane, scales, y)

    wanted = chain(alone)
    assert torch.isfinite(wanted).all()
    assert wanted.abs().amax() > 0
    chain(early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(early)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffers[0], wanted)


def test_weights_written_by_the_previous_kernel():
    """The kernel before may have made the weights, not only x."""
    x, plane, scales = drawn(1, 4096, 2560, torch.bfloat16)
    others = [drawn(1, 4096, 2560, torch.bfloat16, seed)[1:] for seed in range(1, 30)]
    wanted = [kernels.packed_matmul(x, *one) for one in others]
    torch.cuda.synchronize()
    found = []
    for codes, factors in others:
        plane.copy_(codes)
        scales.copy_(factors)
        found.append(kernels.packed_matmul(x, plane, scales))
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
