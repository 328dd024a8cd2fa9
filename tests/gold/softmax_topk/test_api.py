from contextlib import nullcontext

import numpy as np
import pytest

from trapline.gold import TopK, softmax_topk
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.softmax_topk import api

LOGITS = np.log([[1.0, 4.0, 2.0, 1.0], [8.0, 4.0, 2.0, 2.0]])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_probabilities_come_in_the_logits_dtype(dtype):
    found = softmax_topk(LOGITS.astype(dtype), 2)
    assert isinstance(found, TopK)
    assert found.values.dtype == dtype
    assert found.indices.dtype == np.int64
    assert found.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert np.allclose(found.values, [[0.5, 0.25], [0.5, 0.25]], rtol=2e-3)


def test_log_probabilities_on_request():
    logs = softmax_topk(LOGITS, 4, log_probs=True).values
    assert np.allclose(logs, np.log(softmax_topk(LOGITS, 4).values))


def test_tensors_agree_with_arrays():
    torch = pytest.importorskip("torch")
    got = softmax_topk(torch.from_numpy(LOGITS), 3, temperature=2.0)
    want = softmax_topk(LOGITS, 3, temperature=2.0)
    assert got.values.dtype == torch.float64
    for one, other in zip(got, want, strict=True):
        assert np.allclose(one, other)


@pytest.mark.parametrize("vocabulary", [50, 5000])
def test_logits_that_require_grad_get_no_gradient(vocabulary):
    torch = pytest.importorskip("torch")
    logits = torch.randn(2, vocabulary, generator=torch.manual_seed(0))
    want = softmax_topk(logits, 3)
    got = softmax_topk(logits.requires_grad_(), 3)
    assert not any(part.requires_grad for part in got)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_bad_rows_are_rejected_unless_checks_are_off():
    torch = pytest.importorskip("torch")
    logits = torch.tensor([[0.0, torch.nan]])
    with pytest.raises(RangeError, match="NaN or"):
        softmax_topk(logits, 1)
    assert softmax_topk(logits, 1, check=False).indices.shape == (1, 1)


@pytest.mark.parametrize(
    ("logits", "k", "error"),
    [
        (LOGITS[0], 1, ShapeError),
        (LOGITS, 0, RangeError),
        (LOGITS, 5, RangeError),
        (LOGITS, 1.0, DTypeError),
        (LOGITS.astype(int), 1, DTypeError),
        (LOGITS.tolist(), 1, DTypeError),
    ],
)
def test_bad_input_is_refused(logits, k, error):
    with pytest.raises(error):
        softmax_topk(logits, k)


def test_a_bad_temperature_is_refused():
    with pytest.raises(RangeError, match="temperature"):
        softmax_topk(LOGITS, 1, temperature=0.0)


@pytest.mark.parametrize("where", ["oracle", "torch"])
def test_temperatures_by_row(where):
    make = np.asarray if where == "oracle" else pytest.importorskip("torch").tensor
    logits = make(LOGITS.tolist())
    found = softmax_topk(logits, 2, temperature=make([1.0, 2.0]))
    assert np.allclose(found.values[0], softmax_topk(LOGITS, 2).values[0])
    assert np.allclose(found.values[1], softmax_topk(LOGITS, 2, temperature=2.0).values[1])
    with pytest.raises(RangeError, match="temperature"):
        softmax_topk(logits, 2, temperature=make([1.0, 0.0]))
    with pytest.raises(ShapeError, match="temperature"):
        softmax_topk(logits, 2, temperature=make([1.0, 1.0, 1.0]))


@pytest.mark.parametrize("temperature", [0.5, "one", "rows"])
def test_values_on_a_gpu_are_read_on_request_only(monkeypatch, temperature):
    torch = pytest.importorskip("torch")

    class OnGpu(torch.Tensor):
        is_cuda = True

    logits = torch.full((2, 5), torch.nan).as_subclass(OnGpu)
    given = {"one": torch.tensor(-1.0), "rows": torch.full((2,), -1.0)}.get(temperature, 0.5)
    reads = []
    monkeypatch.setattr(api, "_by_kernels", lambda logits, *_: (api.TopK(None, None, None), logits))
    monkeypatch.setattr(api, "_refuse_rows_without_a_softmax", reads.append)
    api.softmax_topk(logits, 2, temperature=given)
    assert reads == []
    with pytest.raises(RangeError) if temperature != 0.5 else nullcontext():
        api.softmax_topk(logits, 2, temperature=given, check=True)
    assert len(reads) == (temperature == 0.5)
