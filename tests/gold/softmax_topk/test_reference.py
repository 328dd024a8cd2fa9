import numpy as np
import pytest

from trapline.gold.softmax_topk import oracle

torch = pytest.importorskip("torch")
from trapline.gold.softmax_topk import reference  # noqa: E402 - needs torch
from trapline.gold.softmax_topk.cpu import topk as native  # noqa: E402 - needs torch


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request, monkeypatch):
    """Both CPU paths; a machine without a compiler takes torch's twice."""
    if request.param == "torch":
        monkeypatch.setattr(native, "unavailable", lambda: "switched off")
    else:
        monkeypatch.setattr(reference, "_LEAST_COMPILED", 1)
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(reference, "_TILE", 16)
    monkeypatch.setattr(reference, "_BLOCK", 64)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(
    ("vocabulary", "k"),
    [(1, 1), (16, 16), (17, 3), (100, 40), (61, 61), (1000, 1), (997, 5), (5000, 7), (4096, 16)],
)
def test_results_do_not_depend_on_tiles(small_tiles, dtype, vocabulary, k):
    rng = np.random.default_rng(vocabulary)
    logits = np.round(rng.standard_normal((5, vocabulary)) * 4, 1).astype(dtype)  # many ties
    want = oracle.softmax_topk(logits, k, 0.7)
    got = reference.softmax_topk(torch.from_numpy(logits), k, 0.7)
    assert np.array_equal(got.indices, want.indices)
    tolerance = 1e-12 if dtype == np.float64 else 2e-5
    assert np.allclose(got.log_probs, want.log_probs, atol=tolerance)
    assert np.allclose(got.lse, want.lse, atol=tolerance)


def test_a_first_tile_of_minus_infinity(small_tiles):
    logits = torch.full((2, 40), -torch.inf)
    logits[0, 39], logits[1, 20] = 1.0, 1e30
    got = reference.softmax_topk(logits, 2, 1.0)
    assert got.indices.tolist() == [[39, 0], [20, 0]]
    assert got.log_probs.tolist() == [[0.0, -torch.inf]] * 2


@pytest.mark.parametrize("kind", ["constant", "rising", "falling", "one group", "zeros", "coarse"])
@pytest.mark.parametrize("k", [1, 6, 64])
def test_rows_made_to_mislead_group_maxima(kind, k):
    V = 3001
    rows = {
        "constant": torch.full((V,), 2.5),
        "rising": torch.arange(V, dtype=torch.float32),
        "falling": -torch.arange(V, dtype=torch.float32),
        "one group": torch.zeros(V).index_fill(0, torch.arange(2048, 2112), 1.0),
        "zeros": torch.tensor([0.0, -0.0]).repeat(V)[:V],
        "coarse": torch.randint(0, 4, (V,), generator=torch.manual_seed(0)).float(),
    }
    logits = torch.stack((rows[kind], torch.randn(V, generator=torch.manual_seed(1))))
    want = oracle.softmax_topk(logits.numpy(), k)
    got = reference.softmax_topk(logits, k, 1.0)
    assert np.array_equal(got.indices, want.indices)
    assert np.allclose(got.log_probs, want.log_probs, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_number_ranks_above_everything(dtype):
    logits = torch.randn(2, 3000).to(dtype)
    logits[0, [2999, 7]] = torch.nan
    logits[1, [5, 2000]] = torch.tensor([torch.inf, -torch.nan], dtype=dtype)
    got = reference.softmax_topk(logits, 3, 1.0)
    assert got.indices[0, :2].tolist() == [7, 2999]
    assert got.indices[1, :2].tolist() == [2000, 5]
    assert got.lse.isnan().all()


def test_every_row_may_have_its_temperature():
    logits = torch.randn(3, 50, dtype=torch.float64)
    each = torch.tensor([0.5, 1.0, 4.0])
    got = reference.softmax_topk(logits, 4, each)
    for row, temperature in enumerate(each.tolist()):
        want = oracle.softmax_topk(logits[row : row + 1].numpy(), 4, temperature)
        assert np.allclose(got.log_probs[row], want.log_probs[0], atol=1e-12)
        assert np.allclose(got.lse[row], want.lse[0], atol=1e-12)


def test_strided_logits(small_tiles):
    wide = torch.randn(40, 12, dtype=torch.float64)
    got, want = (
        reference.softmax_topk(wide.T[::2], 5, 1.0),
        oracle.softmax_topk(wide.numpy().T[::2], 5),
    )
    assert np.array_equal(got.indices, want.indices)
    assert np.allclose(got.log_probs, want.log_probs)


def test_operator_passes_opcheck():
    torch.library.opcheck(
        reference.topk_operator.overload,
        (torch.randn(3, 20), 4, torch.ones(3)),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("row", "fine"),
    [
        ([0.0, 1.0], True),
        ([-torch.inf, 1.0], True),
        ([torch.nan, 1.0], False),
        ([torch.inf, 1.0], False),
        ([-torch.inf, -torch.inf], False),
    ],
)
def test_row_maximum_reveals_bad_rows(row, fine):
    found = reference.softmax_topk(torch.tensor([row]), 1, 1e-30)
    assert reference.every_row_has_a_softmax(found.row_max) is fine


@pytest.mark.full
def test_one_graph_under_compile():
    logits = torch.randn(4, 50)
    compiled = torch.compile(
        lambda x: reference.softmax_topk(x, 3, 1.0), backend="aot_eager", fullgraph=True
    )
    got, want = compiled(logits), reference.softmax_topk(logits, 3, 1.0)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
