"""The compiled CPU path on rows of several blocks, against the oracle and torch."""

import numpy as np
import pytest

from trapline.gold.softmax_topk import oracle

torch = pytest.importorskip("torch")
from trapline.gold.softmax_topk import reference  # noqa: E402 - needs torch
from trapline.gold.softmax_topk.cpu import topk as native  # noqa: E402 - needs torch

needs_compiler = pytest.mark.skipif(native.unavailable() is not None, reason="no C compiler")
V = 10_007  # two blocks of 4096, and a part of one


def rows_of(kind):
    source = torch.Generator().manual_seed(3)
    rising = torch.arange(V, dtype=torch.float32)
    return {
        "normal": torch.randn(V, generator=source) * 3,
        "constant": torch.full((V,), -2.5),
        "rising": rising / 100,
        "falling": -rising / 100,
        "coarse": torch.randint(-3, 4, (V,), generator=source).float(),
        "zeros": torch.tensor([0.0, -0.0]).repeat(V)[:V],
        "late": torch.zeros(V).index_fill(0, torch.arange(8190, 8200), 5.0),
        "mostly -inf": torch.full((V,), -torch.inf).index_fill(0, torch.tensor([4095, 9000]), 1.0),
        "huge": torch.randn(V, generator=source) * 1e37,
    }[kind]


@needs_compiler
@pytest.mark.parametrize("k", [1, 7, 64, 1000, V])
@pytest.mark.parametrize(
    "kind",
    ["normal", "constant", "rising", "falling", "coarse", "zeros", "late", "mostly -inf", "huge"],
)
def test_long_rows_agree_with_the_oracle(kind, k):
    logits = torch.stack((rows_of(kind), rows_of("normal")))
    for temperature in (1.0, 0.375):  # exact in float32
        want = oracle.softmax_topk(logits.numpy(), k, temperature)
        got = reference.softmax_topk(logits, k, temperature)
        assert np.array_equal(got.indices, want.indices)
        # float32 has 24 bits: the answers are rounded once.
        np.testing.assert_allclose(got.lse, want.lse, rtol=1.2e-7, atol=2e-7)
        np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=3e-7, atol=5e-7)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_as_torch_reads_it(dtype):
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = patterns.view(dtype)[torch.randperm(1 << 16, generator=torch.manual_seed(0))]
    wide = every.float()
    found = native.ranked(every[None], 1 << 16, torch.ones(1), 1)
    values, places = found.values[0], found.indices[0]
    assert torch.equal(places.sort().values, torch.arange(1 << 16))
    number = ~wide[places].isnan()
    assert torch.equal(values[number], wide[places][number])
    assert int(number.sum()) == int((~wide.isnan()).sum())
    assert not number[: int(wide.isnan().sum())].any()


@needs_compiler
def test_bad_rows_match_the_torch_path():
    logits = torch.randn(5, V, generator=torch.manual_seed(1))
    logits[0, [9999, 7]] = torch.nan
    logits[1, 4096:8192] = torch.nan
    logits[2, 5000] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 9000] = torch.nan
    found = reference.softmax_topk(logits, 3, 1.0)
    assert found.indices.tolist()[:2] == [[7, 9999, int(found.indices[0, 2])], [4096, 4097, 4098]]
    assert found.indices[2, 0] == 5000
    assert found.indices[3].tolist() == [0, 1, 2]
    assert found.indices[4].tolist() == [9000, 0, 1]
    assert found.lse[[0, 1, 2, 4]].isnan().all()
    assert found.lse[3] == -torch.inf
    assert found.row_max[2] == torch.inf
    assert found.row_max[3] == -torch.inf
    assert found.row_max[[0, 1, 4]].isnan().all()


@needs_compiler
def test_strided_rows_no_rows_and_several_threads(monkeypatch):
    monkeypatch.setattr(native, "_LOGITS_A_THREAD", 1)
    wide = torch.randn(11, 2 * V, generator=torch.manual_seed(2))
    views = [wide[:, 3 : V + 3], wide[::2, :V], wide.T[:V].T, wide[:0, :V], wide[1:2, ::2]]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for view in views:
            got, want = (
                reference.softmax_topk(view, 5, 1.0),
                reference._softmax_topk(view, 5, torch.ones(len(view))),
            )
            assert torch.equal(got.indices, want[1])
            assert torch.allclose(got.lse, want[2], atol=1e-6)
    finally:
        torch.set_num_threads(before)


def test_logits_that_have_gradients_are_read_too():
    torch.manual_seed(0)
    logits = torch.randn(2, V, requires_grad=True)
    found = reference.softmax_topk(logits, 3, torch.ones(2, requires_grad=True))
    assert torch.equal(found.indices, logits.detach().topk(3).indices)


def test_backend_is_reported(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "switched off")
    assert reference.backend() == "torch: switched off"
