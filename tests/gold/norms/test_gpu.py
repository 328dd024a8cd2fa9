"""Every configuration of the kernels on a GPU, against float64."""

from itertools import product
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import layer_norm, rms_norm  # noqa: E402
from trapline.gold.norms.registry import backward_operator, forward_operator  # noqa: E402

pytestmark = pytest.mark.needs_gpu
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: One width for each configuration, and widths that fill none; the widest first.
WIDTHS = (65536, 50257, 32768, 20000, 16384, 12289, 8192, 5000, 4096, 2048)
NARROW = (1024, 1000, 768, 512, 256, 128, 97, 64, 7, 1)
#: Affine, unaffine; with and without a residual; statistics saved and not.
CHOICES = (
    ("layer", True, False, True),
    ("layer", False, False, False),
    ("rms", True, True, True),
    ("rms", True, True, False),
    ("layer", True, False, False),
    ("layer", False, False, True),
    ("rms", False, True, True),
    ("rms", False, False, False),
    ("rms", True, False, True),
)
#: Relative to the largest element: a rounding to the dtype, and float32 sums behind it.
ROUNDINGS = 2.0
SUMS = 4e-6


class Case(NamedTuple):
    rows: int
    width: int
    dtype: torch.dtype
    kind: str
    affine: bool
    added: bool
    saved: bool
    strided: bool = False
    only: str = ""  # weight or bias: the other is not there

    @property
    def centred(self) -> bool:
        return self.kind == "layer"


def cases() -> list[Case]:
    made = []
    for number, (width, dtype) in enumerate(product((*WIDTHS, *NARROW), DTYPES)):
        # The common choices for everybody, the others in turn: each is compiled on its own.
        turn = number % (len(CHOICES) - 3)
        for choice in (*CHOICES[:3], CHOICES[3 + turn]):
            rows = 301 if width < 16384 else 140
            made.append(Case(rows, width, dtype, *choice, strided=width % 8 != 0))
    for width, only in product((16384, 5000, 97), ("weight", "bias")):
        made.append(Case(301, width, DTYPES[1], *CHOICES[0], only=only))
    made += [Case(rows, 1024, DTYPES[1], *CHOICES[0]) for rows in (0, 1, 2, 5000)]
    made += [Case(rows, 16384, DTYPES[1], *CHOICES[0]) for rows in (0, 1, 133)]
    return made


class Data(NamedTuple):
    x: torch.Tensor
    dy: torch.Tensor
    residual: torch.Tensor | None
    dtotal: torch.Tensor | None
    w: torch.Tensor | None
    b: torch.Tensor | None


def data_of(case: Case) -> Data:
    torch.manual_seed(case.rows + case.width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(case.dtype)

    def matrix() -> torch.Tensor:
        wide = normal(case.rows, case.width + (3 if case.strided else 0))
        return wide[:, : case.width]

    pair = (matrix(), matrix()) if case.added else (None, None)
    w = normal(case.width) if case.affine and case.only != "bias" else None
    b = normal(case.width) if case.affine and case.centred and case.only != "weight" else None
    return Data(matrix() + 0.5, matrix(), *pair, w, b)


def solved(case: Case, data: Data) -> dict[str, torch.Tensor]:
    x, dy, residual, dtotal, w, b = data
    y, total, mean, rstd = forward_operator(x, residual, w, b, EPS, case.centred, "kernels")
    normed = total if case.added else x
    saved = ((mean if case.centred else None), rstd) if case.saved else (None, None)
    options = EPS, case.centred, b is not None, "kernels"
    dx, dw, db = backward_operator(dy, dtotal, normed, w, *saved, *options)
    found = {"y": y, "dx": dx, "dw": dw, "db": db, "total": total}
    absent = {"dw": w, "db": b, "total": residual}
    return {name: part for name, part in found.items() if absent.get(name, x) is not None}


def exact(case: Case, data: Data, total: torch.Tensor | None) -> dict[str, torch.Tensor]:
    x = (data.x if total is None else total).double()
    dy = data.dy.double()
    w = data.w.double() if data.w is not None else 1.0
    mean = x.mean(1, keepdim=True) * case.centred
    rstd = ((x - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
    x_hat = (x - mean) * rstd
    g = dy * w
    dx = g - x_hat * (g * x_hat).mean(1, keepdim=True)
    dx = rstd * (dx - g.mean(1, keepdim=True) * case.centred)
    found = {
        "y": x_hat * w + (0.0 if data.b is None else data.b.double()),
        "dx": dx + (0.0 if data.dtotal is None else data.dtotal.double()),
        "dw": (dy * x_hat).sum(0),
        "db": dy.sum(0),
    }
    if total is not None:
        found["total"] = data.x.double() + data.residual.double()
    return found


def check(got: torch.Tensor, want: torch.Tensor, case: Case, least: float = 1e-3) -> None:
    """By the largest difference, relative to the largest element (or to `least`)."""
    if want.numel():
        error = (got.double() - want).abs().max() / want.abs().max().clamp_min(least)
        assert float(error) <= ROUNDINGS * torch.finfo(case.dtype).eps + SUMS


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(other[name], part) for name, part in one.items())


@pytest.mark.parametrize("case", cases(), ids=str)
def test_kernels_agree_with_float64(case):
    data = data_of(case)
    found = solved(case, data)
    wanted = exact(case, data, found.get("total"))
    # A row of one element has no variance: dx is a difference of equal numbers times 1/√eps.
    least = EPS**-0.5 if case.width == 1 else 1e-3
    for name, part in found.items():
        check(part, wanted[name], case, least)


@pytest.mark.parametrize("width", [97, 1024, 8192, 16384, 65536])
def test_twenty_runs_are_the_same_bits(width):
    case = Case(4000, width, torch.bfloat16, *CHOICES[0])
    data = data_of(case)
    first = solved(case, data)
    for _ in range(20):
        assert same(first, solved(case, data))


@pytest.mark.parametrize("width", [1024, 16384, 65536])
def test_cuda_graph(width):
    """Forward and backward in a CUDA graph answer as they do outside."""
    case = Case(300, width, torch.bfloat16, *CHOICES[2])
    data = data_of(case)
    plain = solved(case, data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = solved(case, data)
    for part in kept.values():
        part.fill_(torch.nan)
    graph.replay()
    assert same(plain, kept)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("width", [8192, 16384, 65536])
def test_zeros_and_nan_stay_in_their_rows(width, dtype):
    case = Case(200, width, dtype, *CHOICES[0])
    data = data_of(case)
    data.dy[::3] = 0.0
    data.dy[1] = torch.nan
    dx = solved(case, data)["dx"]
    assert dx[1].isnan().all()
    assert not dx[::3].any()
    check(dx[2:], exact(case, data, None)["dx"][2:], case)


@pytest.mark.parametrize("width", [16384, 65536])
def test_launches_on_two_streams(width):
    """They neither wait for each other nor mix their answers."""
    problems = [Case(rows, width, torch.bfloat16, *CHOICES[0]) for rows in (500, 700)]
    given = [data_of(case) for case in problems]
    wanted = [solved(*pair) for pair in zip(problems, given, strict=True)]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, case, data in zip(streams, problems, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(solved(case, data))
        torch.cuda.synchronize()
        assert all(same(want, got) for want, got in zip(wanted, found, strict=True))


@pytest.mark.parametrize(("rows", "width"), [(2_147_500, 1000), (32_800, 65536), (131_200, 16384)])
def test_more_than_2_to_the_31_elements(rows, width):
    """The last rows are right, and so are sums over all of them."""
    x = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16).normal_()
    w = torch.randn(width, device="cuda").bfloat16()
    case = Case(5, width, x.dtype, *CHOICES[0])
    y, _, mean, rstd = forward_operator(x, None, w, w, EPS, True, "kernels")
    wanted = exact(case, Data(x[-5:], x[-5:], None, None, w, w), None)
    check(y[-5:], wanted["y"], case)
    del y
    dx, _, db = backward_operator(x, None, x, w, mean, rstd, EPS, True, True, "kernels")
    check(dx[-5:], wanted["dx"], case)
    check(db, sum(part.double().sum(0) for part in x.split(1 << 14)), case)
    del x, dx
    torch.cuda.empty_cache()


def test_autograd_and_opcheck():
    """Autograd through the public names, and what opcheck wants of the operators."""
    case = Case(33, 1000, torch.float32, "rms", True, True, True)
    data = data_of(case)
    leaves = [part.clone().requires_grad_() for part in (data.x, data.residual, data.w)]
    y, total = rms_norm(leaves[0], leaves[2], EPS, leaves[1])
    ((y * data.dy).sum() + (total * data.dtotal).sum()).backward()
    wanted = exact(case, data, total.detach())
    for leaf, name in zip(leaves, ("dx", "dx", "dw"), strict=True):
        check(leaf.grad, wanted[name], case)
    x = data.x.clone().requires_grad_()
    layer_norm(x, data.w, data.w, EPS).backward(data.dy)
    case = case._replace(kind="layer", added=False)
    check(x.grad, exact(case, data._replace(dtotal=None), None)["dx"], case)
    w = data.w
    forward = data.x, data.residual, w, None, EPS, False, "kernels"
    backward = data.dy, data.dtotal, data.x, w, None, None, EPS, True, True, "kernels"
    for operator, given in ((forward_operator, forward), (backward_operator, backward)):
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator.overload, given, test_utils=tests)
