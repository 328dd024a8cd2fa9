"""The product of a few rows on a CPU, against float64 and against torch where torch takes over."""

import pytest
import torch
from torch.nn import functional

from trapline.gold.decoder.cpu import linear_few_rows

needs_compiler = pytest.mark.skipif(
    linear_few_rows.unavailable() is not None, reason="no C compiler"
)


def both(rows, outputs, inputs, seed=0):
    torch.manual_seed(seed)
    return torch.randn(rows, inputs), torch.randn(outputs, inputs)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 11, 15, 32, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 3), (16, 64), (37, 131), (3, 400)])
def test_every_count_of_rows_outputs_and_inputs(rows, outputs, inputs):
    x, weight = both(rows, outputs, inputs)
    exact = x.double() @ weight.double().T
    found = linear_few_rows.linear(x, weight)
    assert found.shape == (rows, outputs)
    assert (found - exact).norm() <= 1e-6 * exact.norm()


@needs_compiler
def test_threads_share_the_outputs():
    x, weight = both(8, 1500, 384)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear_few_rows.linear(x, weight)
        torch.set_num_threads(3)
        shared = linear_few_rows.linear(x, weight)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, shared)


@needs_compiler
def test_rows_are_independent():
    """An answer is the same in every batch that has the compiled product."""
    x, weight = both(8, 43, 70)
    whole = linear_few_rows.linear(x, weight)
    for count in range(2, 8):
        assert torch.equal(linear_few_rows.linear(x[:count], weight), whole[:count])


def test_views_are_supported():
    x, weight = both(6, 24, 48)
    assert torch.equal(
        linear_few_rows.linear(x[:, ::2], weight[:12, :24].contiguous()),
        linear_few_rows.linear(x[:, ::2].contiguous(), weight[:12, :24].contiguous()),
    )
    turned = weight.T.contiguous().T
    torch.testing.assert_close(linear_few_rows.linear(x, turned), functional.linear(x, weight))


def test_torch_serves_other_row_counts_and_dtypes():
    x, weight = both(4, 6, 8)
    bias = torch.arange(6.0)
    assert torch.equal(linear_few_rows.linear(x, weight, bias), functional.linear(x, weight, bias))
    half = x.bfloat16(), weight.bfloat16()
    assert torch.equal(linear_few_rows.linear(*half), functional.linear(*half))
    weight.requires_grad_()
    linear_few_rows.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, 8))


def test_torch_serves_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    linear_few_rows._library.cache_clear()
    try:
        assert "no C compiler" in linear_few_rows.unavailable()
        x, weight = both(4, 6, 8)
        assert torch.equal(linear_few_rows.linear(x, weight), functional.linear(x, weight))
    finally:
        linear_few_rows._library.cache_clear()
